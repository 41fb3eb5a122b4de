"""Where copies lengthen a step, swaps are spread over steps: how many a step has, and what may happen on the way."""

import pytest

from schemas.reasons import FinishReason
from tests.engine.builders import Engine, make_config
from tests.engine.test_preemption import distinct, undisturbed
from worker.engine.block_manager import BlockManager
from worker.engine.cost import NO_BOUND, SWAP_SHARE, CostModel
from worker.engine.fakes import FakeRunner
from worker.engine.outputs import BlockCopy, CopySeconds, ScheduledSequence, StepOutcome, StepPlan, StepRecord
from worker.engine.request import Sequence

PART = ScheduledSequence(0, 7, 1, (), True)
NUM_LOW = 8  # blocks of `low` when it is displaced


def pace(blocks: float, price_in: float = 1.0) -> CostModel:
    """A step bears so many blocks out."""
    return CostModel(
        copy_out_seconds_per_block=1.0,
        copy_in_seconds_per_block=price_in,
        prefill_seconds=lambda num_tokens, _: 1e6 * num_tokens,
        compute_seconds=lambda _scheduled: (blocks + 1e-6) / SWAP_SHARE,
    )


def paced_engine(blocks: float, price_in: float = 1.0, **fields: object) -> Engine:
    """Beside `row`, which decodes all the time, `low` has computed 29 tokens: blocks of 4."""
    fields = {"num_host_blocks": 64, "preemption": "swap", "max_num_seqs": 2, "max_num_batched_tokens": 64} | fields
    engine = Engine(**fields, cost=pace(blocks, price_in))
    engine.add(distinct("row", 500, 4, priority_class=1, max_tokens=60), distinct("low", 0, 29, max_tokens=20))
    engine.step()
    return engine


def displace(engine: Engine, request_id: str = "high", max_tokens: int = 30) -> StepRecord:
    """Someone takes the seat of `low`."""
    first = 1000 + 100 * len(engine.records)
    engine.add(distinct(request_id, first, 3, priority_class=2, max_tokens=max_tokens))
    record = engine.step()
    assert record is not None
    assert [(p.request_id, p.mode) for p in record.preempted] == [("low", "swap")]
    return record


def step(engine: Engine) -> StepRecord:
    record = engine.step()
    assert record is not None
    return record


def copied(engine: Engine, num_steps: int) -> list[tuple[int, int]]:
    """(blocks out, blocks in) of the next steps."""
    records = [step(engine) for _ in range(num_steps)]
    return [(record.num_swap_out_blocks, record.num_swap_in_blocks) for record in records]


def sequence(engine: Engine, request_id: str = "low") -> Sequence:
    (seq,) = engine.scheduler._unfinished[request_id]
    return seq


def check_end(engine: Engine) -> None:
    """All that is left ends, `low` says what it would have said, and nothing is held."""
    engine.run()
    assert engine.tokens("low") == undisturbed(distinct("low", 0, 29, max_tokens=20))
    assert engine.scheduler.stats().num_host_blocks_used == 0


def test_how_many_blocks_a_step_bears() -> None:
    """A share of its time by the price of each way; what goes out leaves less for what comes in, but one at least."""
    model = pace(10, price_in=2.0)
    assert model.most_out([PART]) == 10
    assert [model.most_in([PART], num_out) for num_out in (0, 3, 8, 10, 99)] == [5, 3, 1, 1, 1]
    assert (pace(0.1).most_out([PART]), pace(0.1).most_in([PART], 1)) == (1, 1)


def test_how_many_blocks_a_step_bears_is_learned() -> None:
    """A quarter of what a step's copies took against what was known; where they are not paced, nothing is learned."""
    model, beside = pace(10), pace(10)
    beside.compute_seconds = None
    for each in (model, beside):
        each.observe(2, 0, CopySeconds(10.0, 7.0, 7.0))
        each.observe(0, 3, CopySeconds(7.0, 7.0, 15.0))
    assert (model.copy_out_seconds_per_block, model.copy_in_seconds_per_block) == (2.0, 2.0)
    assert (beside.copy_out_seconds_per_block, beside.copy_in_seconds_per_block) == (1.0, 1.0)
    assert model.most_out([PART]) == 5


@pytest.mark.parametrize("scheduled", [[], [PART]])
def test_where_copies_are_not_paced(scheduled: list[ScheduledSequence]) -> None:
    """Beside the step, at no price, or for a time that nobody knows; and where nobody waits for the step."""
    prices = {"copy_out_seconds_per_block": 1.0, "copy_in_seconds_per_block": 1.0, "prefill_seconds": lambda n, _: n}
    beside = CostModel(**prices)
    free = CostModel(**prices | dict.fromkeys(list(prices)[:2], 0.0), compute_seconds=lambda _scheduled: 1.0)
    unknown = CostModel(**prices, compute_seconds=lambda _scheduled: float("inf"))
    for model in (beside, free, unknown) if scheduled else (beside, pace(1)):
        assert model.most_out(scheduled) == model.most_in(scheduled, 3) == NO_BOUND


def test_each_step_has_its_part_of_a_swap() -> None:
    """Out, then in ahead of the seat, three blocks a step; the victim's blocks drain until they are copied."""
    engine = paced_engine(3)
    record = displace(engine)
    assert (record.num_swap_out_blocks, record.num_decode_tokens) == (3, 1)
    assert (engine.scheduler.stats().num_blocks_draining, engine.scheduler.stats().num_host_blocks_used) == (5, 8)
    assert copied(engine, 6) == [(3, 0), (2, 0), (0, 3), (0, 3), (0, 2), (0, 0)]
    assert engine.scheduler.stats().num_blocks_draining == 0
    check_end(engine)
    assert sum(record.num_swap_out_blocks for record in engine.records) == NUM_LOW


def test_a_step_that_computes_nothing_copies_all() -> None:
    """The victim had every block and every seat: nobody waits for a longer step, so the beneficiary waits for one."""
    engine = Engine(
        num_blocks=8, num_host_blocks=8, preemption="swap", max_num_batched_tokens=64, finish_soon=0, cost=pace(1)
    )
    engine.add(distinct("low", 0, 29, max_tokens=3))
    engine.step()
    engine.add(distinct("high", 100, 10, priority_class=1))
    record = step(engine)
    assert (record.num_swap_out_blocks, record.paused) == (NUM_LOW, ("high",))
    assert step(engine).num_prefill_tokens == 10
    engine.run()
    assert engine.tokens("low") == undisturbed(distinct("low", 0, 29, max_tokens=3))


def test_a_prefill_goes_on_as_blocks_come_free() -> None:
    """The beneficiary lacks blocks: with each step's copies it computes so much more, and ends with all."""
    limits = {"num_blocks": 11, "num_host_blocks": 16, "max_num_seqs": 3, "max_num_batched_tokens": 64}
    engine = Engine(**limits, preemption="swap", watermark=0.0, cost=pace(2), prefix_caching=False)
    row, low = distinct("row", 500, 4, priority_class=1, max_tokens=12), distinct("low", 0, 29, max_tokens=8)
    engine.add(row, low)
    engine.step()
    engine.add(distinct("high", 1000, 30, priority_class=2, max_tokens=2))
    records = [step(engine) for _ in range(6)]
    assert [record.num_swap_out_blocks for record in records] == [2, 2, 2, 2, 0, 0]
    assert [record.num_prefill_tokens for record in records] == [4, 8, 8, 8, 2, 0]
    engine.run()
    assert engine.tokens("row") == undisturbed(row)
    assert engine.tokens("low") == undisturbed(low)


def test_a_seat_waits_until_its_kv_is_in() -> None:
    """Nothing came ahead: it takes its seat, pauses while a block a step comes in, and is no burden to who decodes."""
    engine = paced_engine(1, look_ahead=0, prefix_caching=False)
    displace(engine, max_tokens=NUM_LOW + 2)
    assert copied(engine, NUM_LOW + 1) == [(1, 0)] * (NUM_LOW - 1) + [(0, 0)] * 2
    records = [step(engine) for _ in range(NUM_LOW + 1)]
    assert records[0].admitted == ("low",)
    assert [record.num_swap_in_blocks for record in records] == [1] * NUM_LOW + [0]
    assert [record.paused for record in records] == [("low",)] * NUM_LOW + [()]
    assert [record.num_decode_tokens for record in records] == [1] * (NUM_LOW + 1)
    assert [record.num_prefill_tokens for record in records] == [0] * NUM_LOW + [1]
    check_end(engine)
    assert engine.scheduler.stats().total_recomputed_tokens == 0


def test_what_goes_out_goes_first_and_what_comes_in_gets_on() -> None:
    """One comes in while another one goes out: the step's part is the second's, but for a block of the first's."""
    engine = paced_engine(3, max_num_seqs=3)
    other = distinct("other", 2000, 29, max_tokens=40)
    engine.add(other)
    engine.step()
    engine.add(distinct("high", 3000, 3, priority_class=2, max_tokens=30))
    assert copied(engine, 4) == [(3, 0), (3, 0), (2, 0), (0, 3)]
    displace(engine, "high too")
    assert copied(engine, 6) == [(3, 1), (3, 1), (0, 3), (0, 3), (0, 3), (0, 3)]
    check_end(engine)
    assert engine.tokens("other") == undisturbed(other)


def test_one_turns_round_on_the_way_out() -> None:
    """Its seat is free before all has gone out: what is on the device stays there, and only the rest comes in."""
    engine = paced_engine(2, look_ahead=0)
    displace(engine, max_tokens=2)
    assert copied(engine, 1) == [(2, 0)]  # four of eight are out; `high` ends
    assert [len(sequence(engine).out_block_ids), engine.scheduler.stats().num_blocks_draining] == [4, 4]
    records = [step(engine) for _ in range(3)]
    assert records[0].admitted == ("low",)
    assert [(r.num_swap_out_blocks, r.num_swap_in_blocks) for r in records] == [(0, 2), (0, 2), (0, 0)]
    assert records[2].num_prefill_tokens == 1
    check_end(engine)


def test_one_that_has_not_begun_to_go_out_goes_on() -> None:
    """Its seat is free before any block of its copy was made: nothing is copied at all."""
    engine = paced_engine(1, max_num_seqs=3, num_host_blocks=64)
    engine.add(distinct("first", 2000, 50, max_tokens=20))
    engine.step()
    engine.add(*(distinct(f"high{i}", 3000 + 100 * i, 3, priority_class=2, max_tokens=2) for i in range(2)))
    record = step(engine)
    assert [p.request_id for p in record.preempted] == ["low", "first"]
    step(engine)
    back = step(engine)
    assert back.admitted == ("low", "first")
    assert (sequence(engine, "first").num_swaps, back.num_swap_in_blocks) == (1, 1)
    check_end(engine)
    assert sum(record.num_swap_out_blocks for record in engine.records) == 2
    assert engine.tokens("first") == undisturbed(distinct("first", 2000, 50, max_tokens=20))


def test_one_is_displaced_again_on_the_way_in() -> None:
    """In the same step, and with nothing to copy: its copy is there still, but for what had not gone out before."""
    engine = paced_engine(2, look_ahead=0)
    displace(engine, max_tokens=2)
    copied(engine, 1)
    assert copied(engine, 1) == [(0, 2)]  # it has its seat again: four blocks stayed, two of four came in
    assert displace(engine, "high too").num_swap_out_blocks == 2  # of the four that stayed
    assert copied(engine, 2) == [(2, 0), (0, 0)]
    assert sequence(engine).num_swaps == 2
    check_end(engine)
    assert engine.scheduler.stats().total_recomputed_tokens == 0


def test_one_that_took_its_seat_in_this_step_is_no_victim() -> None:
    """By arrival the lower class comes first; who comes after it in the same step does not take its seat away."""
    engine = paced_engine(1, look_ahead=0)
    displace(engine, max_tokens=2)
    for _ in range(2):
        step(engine)
    assert sequence(engine).opened_step == engine.records[-1].step
    assert not engine.scheduler._planner._victims._may_give_way(sequence(engine), engine.records[-1].step)
    assert engine.scheduler._planner._victims._may_give_way(sequence(engine), engine.records[-1].step + 1)
    check_end(engine)


@pytest.mark.parametrize("ends", ["cancel", "abort", "deadline"])
@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize(
    ("num_steps", "on_the_way"), [(1, (6, 0)), (3, (2, 0)), (6, (0, 4)), (9, (0, 2)), (11, (0, 6))]
)
def test_one_ends_on_the_way(ends: str, in_flight: bool, num_steps: int, on_the_way: tuple[int, int]) -> None:
    """Half out, half in ahead of its seat, half in with a seat: nothing of it is held, nobody else notices."""
    engine = paced_engine(2, look_ahead=8 if num_steps < 9 else 0, prefix_caching=False)
    displace(engine, max_tokens=30 if num_steps < 9 else 8)
    for _ in range(num_steps - 1):
        step(engine)

    def end() -> None:
        if ends == "abort":
            engine.scheduler.abort("low")
        else:
            reason = FinishReason.CANCELLED if ends == "cancel" else FinishReason.DEADLINE
            engine.cancel("low", reason)

    seq = sequence(engine)
    assert (len(seq.out_block_ids), len(seq.block_ids)) == on_the_way
    if in_flight:
        engine.step(in_flight=end)
    else:
        end()
    used = engine.scheduler.stats()
    assert (used.num_host_blocks_used, used.num_blocks_draining) == (0, 0)
    engine.run()
    assert engine.tokens("row") == undisturbed(distinct("row", 500, 4, max_tokens=60))


@pytest.mark.parametrize(("failing", "num_recomputed"), [("swap_outs", 9), ("swap_ins", 29)])
def test_a_copy_fails_on_the_way(failing: str, num_recomputed: int) -> None:
    """Out: what lies before the lost block still goes out, and only the rest is computed again. In: all is."""

    class FailsOnce(FakeRunner):
        num_swaps = 0  # steps that had some

        def execute(self, plan: StepPlan) -> StepOutcome:
            self.copies = getattr(plan, failing)
            self.num_swaps += bool(self.copies)
            return super().execute(plan)

        def fails(self, copy: BlockCopy) -> bool:
            return self.num_swaps == 2 and copy in self.copies[1:]

    engine = paced_engine(2, runner=FailsOnce, prefix_caching=False)
    displace(engine)
    check_end(engine)
    stats = engine.scheduler.stats()
    assert (stats.total_failed_copies, stats.total_recomputed_tokens) == (1, num_recomputed)


def test_a_prefix_is_found_while_it_drains() -> None:
    """The victim's prompt is read by who begins the same way, before and while it goes out."""
    engine = paced_engine(1, max_num_seqs=3)
    engine.add(distinct("short", 2000, 3, priority_class=1, max_tokens=3))
    engine.step()
    displace(engine)
    engine.step()
    engine.add(distinct("same", 0, 21, max_tokens=3, priority_class=1))
    record = step(engine)
    assert (record.num_cached_tokens, record.num_prefill_tokens) == (20, 1)
    check_end(engine)
    assert engine.tokens("same") == undisturbed(distinct("same", 0, 21, max_tokens=3))


def test_nobody_takes_blocks_back_from_a_seat() -> None:
    """Who came in ahead and has its seat, but is not open yet, keeps its blocks."""
    manager = BlockManager(make_config(num_blocks=6, num_host_blocks=8, watermark=0.0))
    seq, other = (Sequence(i, distinct(f"r{i}", 100 * i, 8), 0) for i in range(2))
    manager.seat(seq, [])
    manager.open(seq, None)
    manager.grow(seq, 2)
    seq.num_computed = 8
    manager.swap_out(seq)
    manager.take_outgoing(2)
    manager.end_step()
    manager.prefetch(seq, 2)
    manager.seat(seq, [])
    manager.drop_prefetched(5, keep=other)
    assert (len(seq.block_ids), manager.room) == (2, 4)


def test_a_victim_of_two_ways_is_copied_in_order() -> None:
    """Of two victims the first goes out first; of each the last blocks go first."""
    manager = BlockManager(make_config(num_blocks=6, num_host_blocks=8))
    victims = [Sequence(i, distinct(f"r{i}", 100 * i, 8), 0) for i in range(2)]
    for seq in victims:
        manager.seat(seq, [])
        manager.open(seq, None)
        manager.grow(seq, 2)
        seq.num_computed = 8
    tables = [list(seq.block_ids) for seq in victims]
    for seq in victims:
        manager.swap_out(seq)
    taken: list[tuple[int, list[int]]] = []
    for most in (1, 2, 9):
        taken += [(seq.seq_id, [copy.source for copy in copies]) for seq, copies in manager.take_outgoing(most)]
        manager.end_step()
    assert taken == [(0, tables[0][1:]), (0, tables[0][:1]), (1, tables[1][1:]), (1, tables[1][:1])]
    assert manager.device.num_free == 6
