"""Swap or recompute, whose blocks, and what happens when a copy fails."""

import pytest

from schemas.reasons import FinishReason
from tests.engine.builders import Engine, make_config, make_request
from worker.engine.arrival_queue import ArrivalQueue
from worker.engine.block_manager import BlockManager
from worker.engine.cost import CostModel
from worker.engine.fakes import FakeRunner
from worker.engine.outputs import BlockCopy, StepOutcome, StepPlan
from worker.engine.policies import make_policy
from worker.engine.request import Request, Sequence

LLAMA_8B = CostModel(  # research/engine.md 3.2: 5.2 us a token for the round trip, 32.5 us for the recompute
    copy_out_seconds_per_block=16 * 2.6e-6,
    copy_in_seconds_per_block=16 * 2.6e-6,
    prefill_seconds=lambda num_tokens, _: num_tokens * 32.5e-6,
)
QWEN_600M = CostModel(  # 4.6 us against 2.4 us
    copy_out_seconds_per_block=16 * 2.3e-6,
    copy_in_seconds_per_block=16 * 2.3e-6,
    prefill_seconds=lambda num_tokens, _: num_tokens * 2.4e-6,
)


def distinct(request_id: str, first: int, length: int, **fields: object) -> Request:
    """A request whose prompt nobody else has."""
    return make_request(request_id, prompt=range(first, first + length), **fields)


def undisturbed(request: Request) -> list[int]:
    engine = Engine(num_blocks=400, max_num_batched_tokens=400)
    engine.add(make_request("alone", prompt=request.prompt_token_ids, max_tokens=request.max_tokens))
    engine.run()
    return engine.tokens("alone")


def test_the_cost_model_chooses_as_measured() -> None:
    """Swap for a model whose prefill is slow, recompute for one whose KV is large for its size; hits tip the scales."""
    assert LLAMA_8B.prefers_swap(1600, 100, 0)
    assert not QWEN_600M.prefers_swap(1600, 100, 0)
    assert not LLAMA_8B.prefers_swap(1600, 100, 1500)  # the prefix cache gives most of it back
    assert not LLAMA_8B.prefers_swap(127, 8, 0)  # below the minimum


def test_the_cost_model_knows_what_hides_a_copy() -> None:
    """A copy out hides behind a step, a copy in behind the wait; a budget that is not contended hides a prefill."""
    times = {"copy_out_seconds_per_block": 2.0, "copy_in_seconds_per_block": 3.0}
    model = CostModel(**times, prefill_seconds=lambda n, past: n + past / 10, step_seconds=15.0, min_swap_tokens=1)
    assert model.swap_seconds(10) == 5.0 + 30.0
    assert model.swap_seconds(10, expected_wait=28.0) == 5.0 + 2.0
    assert model.swap_seconds(1, expected_wait=28.0) == 0.0
    assert model.recompute_seconds(50, 10) == 41.0
    assert model.recompute_seconds(50, 10, contended=False) == pytest.approx(12.3)
    assert model.prefers_swap(50, 10, 10)  # 35 * 1.1 < 41
    assert not model.prefers_swap(46, 10, 10)  # 35 < 37 < 35 * 1.1: hysteresis
    assert not model.prefers_swap(50, 10, 10, contended=False)


@pytest.mark.parametrize(("cost", "mode"), [(LLAMA_8B, "swap"), (QWEN_600M, "recompute"), (None, "swap")])
def test_auto_asks_the_cost_model(cost: CostModel | None, mode: str) -> None:
    """Blocks are scarce, so the prefix cache will not help: the measured times decide; without any, a swap."""
    engine = Engine(
        num_blocks=64, num_host_blocks=64, block_size=4, max_num_batched_tokens=256, max_model_len=300, cost=cost
    )
    engine.add(distinct("low", 0, 200))
    engine.step()
    engine.add(distinct("high", 1000, 100, priority_class=1))
    record = engine.step()
    assert record is not None
    assert [(p.request_id, p.mode) for p in record.preempted] == [("low", mode)]
    engine.run()


def test_auto_expects_hits_when_only_a_seat_is_scarce() -> None:
    """Plenty of blocks: what the victim computed will be found again, so it is not copied."""
    engine = Engine(num_blocks=640, num_host_blocks=64, max_num_seqs=1, max_num_batched_tokens=256, cost=LLAMA_8B)
    engine.add(distinct("low", 0, 180, max_tokens=10))
    engine.step()
    engine.add(distinct("high", 1000, 10, priority_class=1))
    record = engine.step()
    assert record is not None
    assert [(p.cause, p.mode) for p in record.preempted] == [("seat", "recompute")]
    engine.run()
    assert engine.scheduler.stats().total_recomputed_tokens < 4


def test_a_chunk_that_ends_with_a_block_is_found_whole() -> None:
    """A victim in the middle of its prompt, all its blocks full: nothing of it is lost, so nothing is copied."""
    engine = Engine(num_blocks=640, num_host_blocks=64, max_num_seqs=1, max_num_batched_tokens=160, cost=LLAMA_8B)
    engine.add(distinct("low", 0, 190))
    engine.step()
    engine.add(distinct("high", 1000, 10, priority_class=1))
    record = engine.step()
    assert record is not None
    assert [(p.mode, p.num_tokens) for p in record.preempted] == [("recompute", 160)]
    engine.run()
    assert engine.scheduler.stats().total_recomputed_tokens == 0


def test_a_swap_without_room_on_the_host_is_a_recompute() -> None:
    """Forced swap, three blocks to save, two on the host: dropped, and computed again."""
    engine = Engine(num_host_blocks=2, preemption="swap", max_num_seqs=1)
    low = distinct("low", 0, 9)
    engine.add(low)
    engine.step()
    engine.add(distinct("high", 100, 4, priority_class=1))
    record = engine.step()
    assert record is not None
    assert [p.mode for p in record.preempted] == ["recompute"]
    engine.run()
    assert engine.tokens("low") == undisturbed(low)


def test_stats_say_how_often_and_how() -> None:
    """The end of a choice tells its swaps and recomputes, and the engine the totals."""
    for mode in ("swap", "recompute"):
        engine = Engine(num_host_blocks=64, preemption=mode, max_num_seqs=1)
        engine.add(distinct("low", 0, 9))
        engine.step()
        engine.add(distinct("high", 100, 4, priority_class=1))
        engine.run()
        stats, totals = engine.finish("low").stats, engine.scheduler.stats()
        assert (stats.swaps, stats.recomputes) == (totals.total_swaps, totals.total_recomputes)
        assert (stats.swaps, stats.recomputes) == ((1, 0) if mode == "swap" else (0, 1))


def test_kv_is_swapped_in_ahead_of_the_seat() -> None:
    """While it still waits for a seat its KV comes back, and its first step computes one token."""
    engine = Engine(num_host_blocks=64, preemption="swap", max_num_seqs=1)
    low = distinct("low", 0, 9)
    engine.add(low)
    engine.step()
    engine.add(distinct("high", 100, 4, priority_class=1))
    records = [engine.step(), engine.step(), engine.step()]
    assert [(r.num_swap_out_blocks, r.num_swap_in_blocks) for r in records if r] == [(3, 0), (0, 3), (0, 0)]
    assert engine.scheduler.stats().num_host_blocks_used == 3  # until it has its seat
    engine.run()
    back = next(record for record in engine.records[3:] if record.admitted == ("low",))
    assert (back.num_prefill_tokens, back.num_swap_in_blocks) == (1, 0)
    assert engine.tokens("low") == undisturbed(low)


class FailingRunner(FakeRunner):
    """A fake runner some of whose copies fail."""

    failing: tuple[str, ...] = ()

    def execute(self, plan: StepPlan) -> StepOutcome:
        self.now_failing = [copy for name in self.failing for copy in getattr(plan, name)[1:]]
        return super().execute(plan)

    def fails(self, copy: BlockCopy) -> bool:
        return copy in self.now_failing


@pytest.mark.parametrize("name", ["swap_outs", "swap_ins"])
@pytest.mark.parametrize("ahead", [True, False])
def test_a_failed_copy_is_a_recompute(name: str, ahead: bool) -> None:
    """Out: the blocks that arrived are restored, the rest is computed again. In: all is. No request fails."""
    engine = Engine(FailingRunner, num_host_blocks=64, preemption="swap", max_num_seqs=1, prefix_caching=False)
    engine.runner.failing = (name,)
    low = distinct("low", 0, 14)
    engine.add(low)
    engine.step()
    engine.add(distinct("high", 100, 4, priority_class=1, max_tokens=4 if ahead else 1))
    engine.run()
    assert engine.tokens("low") == undisturbed(low)
    totals = engine.scheduler.stats()
    assert totals.total_failed_copies == 3
    assert totals.total_recomputed_tokens == (10 if name == "swap_outs" else 14)
    assert sum(record.num_swap_in_blocks for record in engine.records) == (1 if name == "swap_outs" else 4)
    assert totals.num_host_blocks_used == 0


def test_a_failed_fork_computes_the_prompt_again() -> None:
    """The copy of the last block did not arrive: the choice leaves its seat, comes back, and says the same."""

    class AllCopiesFail(FailingRunner):
        def execute(self, plan: StepPlan) -> StepOutcome:
            self.now_failing = list(plan.copies) if plan.step == 2 else []
            return FakeRunner.execute(self, plan)

    engine, sound = Engine(AllCopiesFail), Engine()
    for each in (engine, sound):
        each.add(make_request(prompt=10, n=2))
        each.run()
    assert engine.scheduler.stats().total_failed_copies == 1
    for choice in range(2):
        assert engine.tokens(choice=choice) == sound.tokens(choice=choice)


def test_a_copy_that_fails_for_one_who_is_gone() -> None:
    """Cancelled while its copy was in flight, and the copy failed: nothing is left, nothing comes back."""
    engine = Engine(FailingRunner, num_host_blocks=64, preemption="swap", max_num_seqs=1)
    engine.runner.failing = ("swap_outs",)
    engine.add(distinct("low", 0, 14))
    engine.step()
    engine.add(distinct("high", 100, 4, priority_class=1))
    engine.step(in_flight=lambda: engine.scheduler.abort("low"))
    engine.run()
    assert engine.scheduler.stats().num_host_blocks_used == 0


def test_victims_are_no_more_than_needed() -> None:
    """A cheap victim that frees too little does not go when a dearer one has to go anyway and is enough."""
    engine = Engine(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=64, watermark=0.0)
    engine.add(distinct("cheap", 0, 3, max_tokens=9), distinct("dear", 100, 43, max_tokens=9))
    engine.step()
    engine.add(distinct("high", 200, 40, priority_class=1, max_tokens=3))
    record = engine.step()
    assert record is not None
    assert [p.request_id for p in record.preempted] == ["dear"]
    engine.run()


def test_the_last_resort_is_itself() -> None:
    """A decode that cannot grow takes from nobody more urgent: it gives way itself, and the other one ends first."""
    engine = Engine(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=64)
    engine.add(distinct("first", 0, 14, max_tokens=12), distinct("second", 100, 15, max_tokens=12))
    engine.run()
    gave_way = [p for record in engine.records for p in record.preempted]
    assert [(p.request_id, p.beneficiary) for p in gave_way] == [("second", "second")]
    assert [request_id for record in engine.records for request_id in record.finished] == ["first", "second"]


def test_a_decode_waits_for_one_that_is_about_to_end() -> None:
    """Rather than give way, a decode pauses for the step or two that a less urgent one still takes."""
    engine = Engine(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=64)
    engine.add(distinct("first", 0, 15, max_tokens=12), distinct("second", 100, 14, max_tokens=3))
    engine.run()
    assert [record.paused for record in engine.records if record.paused] == [("first",)]
    assert not [record for record in engine.records if record.preempted]


def test_a_pinned_one_is_promised_its_completion() -> None:
    """Preempted as often as it may be, it takes a seat only with all its blocks, and then keeps it."""
    engine = Engine(num_blocks=40, max_num_seqs=1)
    engine.add(distinct("low", 0, 5, max_tokens=60))
    for number in range(5):
        for _ in range(4):
            engine.step()
        engine.add(distinct(f"high{number}", 1000 * number + 500, 3, priority_class=1, max_tokens=2))
    engine.run()
    stats = engine.finish("low").stats
    assert stats.swaps + stats.recomputes == 3


def test_a_victim_gives_back_its_part_of_the_step() -> None:
    """A prefill of a lower class that has tokens of this step already loses them, with its seat, to a higher one."""
    engine = Engine(max_num_seqs=3, max_num_batched_tokens=16, waiting=LastFirst())
    engine.add(distinct("mid", 0, 8, priority_class=1, max_tokens=9))
    engine.step()
    engine.add(distinct("low", 100, 40))
    engine.step()  # low: 15 of 40
    engine.add(distinct("mid too", 200, 40, priority_class=1))
    for _ in range(2):
        engine.step()
    engine.add(distinct("high", 300, 2, priority_class=2))
    record = engine.step()
    assert record is not None
    assert [p.request_id for p in record.preempted] == ["low"]
    assert record.num_decode_tokens + record.num_prefill_tokens <= 16
    assert "low" not in record.paused
    engine.run()


def test_a_victim_gives_back_its_part_of_a_prefill() -> None:
    """One of a higher class stands so far behind that the lower prefill has had its tokens when its turn comes."""
    engine = Engine(max_num_seqs=1, max_num_batched_tokens=16, waiting=make_policy("fcfs"), max_prefix_probes=1)
    engine.add(distinct("low", 0, 20), distinct("next", 100, 3))
    engine.step()  # low: 16 of 20
    engine.add(distinct("high", 300, 15, priority_class=1))
    record = engine.step()
    assert record is not None
    assert [p.request_id for p in record.preempted] == ["low"]
    assert (record.num_prefill_tokens, record.num_budget_left) == (15, 1)
    engine.run()


def test_a_seat_that_was_taken_and_not_used_is_given_up() -> None:
    """Cancelled while the blocks of its victim drain: the runner never knew it, and the victim comes back."""
    engine = Engine(num_blocks=8, num_host_blocks=8, preemption="swap", max_num_batched_tokens=64, finish_soon=0)
    low = distinct("low", 0, 29, max_tokens=3)  # all blocks
    engine.add(low)
    engine.step()
    engine.add(distinct("high", 100, 10, priority_class=1))
    record = engine.step()
    assert record is not None
    assert (record.admitted, record.paused) == (("high",), ("high",))
    engine.cancel("high", FinishReason.CANCELLED)
    assert engine.scheduler.stats().num_running == 0
    engine.run()
    assert engine.tokens("high") == []
    assert engine.tokens("low") == undisturbed(low)


def test_of_equal_victims_the_one_with_more_to_come_goes() -> None:
    """What costs the same to bring back is lost the less the nearer its end the other one is, newer or not."""
    engine = Engine(max_num_seqs=2, max_num_batched_tokens=64, preemption="recompute")
    engine.add(distinct("long", 0, 8, max_tokens=60), distinct("near", 100, 8, max_tokens=10))
    for _ in range(5):
        engine.step()
    engine.add(distinct("high", 200, 4, priority_class=1))
    record = engine.step()
    assert record is not None
    assert [p.request_id for p in record.preempted] == ["long"]
    engine.run()


def test_what_a_swap_costs_counts_where_it_is_cheaper() -> None:
    """Newest and cheapest to compute again is one, but a copy of the other one costs less for what is to come."""
    cost = CostModel(
        copy_out_seconds_per_block=1.0,
        copy_in_seconds_per_block=1.0,
        prefill_seconds=lambda num_tokens, _: float(num_tokens**2),
        min_swap_tokens=1,
    )
    engine = Engine(max_num_seqs=2, max_num_batched_tokens=64, num_host_blocks=64, cost=cost, prefix_caching=False)
    engine.add(distinct("long", 0, 20, max_tokens=60), distinct("short", 100, 10, max_tokens=10))
    for _ in range(5):
        engine.step()
    engine.add(distinct("high", 200, 4, priority_class=1))
    record = engine.step()
    assert record is not None
    assert [(p.request_id, p.mode) for p in record.preempted] == [("long", "swap")]
    engine.run()


def test_what_a_victim_is_promised_comes_free_too() -> None:
    """A prefill that has begun holds 4 of its 16 blocks: with it go the 12 that nobody else could have."""
    engine = Engine(num_blocks=20, watermark=0.0)
    engine.add(distinct("low", 0, 64))
    engine.step()
    engine.add(distinct("high", 100, 40, priority_class=1))
    record = engine.step()
    assert record is not None
    assert [(p.request_id, p.num_blocks) for p in record.preempted] == [("low", 4)]
    assert record.admitted == ("high",)
    engine.run()


def test_blocks_in_other_tables_need_no_copy() -> None:
    """Where blocks are scarce only those that another sequence holds survive: who has mostly those is recomputed."""
    engine = Engine(num_blocks=640, num_host_blocks=400, max_num_batched_tokens=512, max_model_len=900, cost=LLAMA_8B)
    engine.add(distinct("first", 0, 400))
    engine.step()
    engine.add(distinct("twin", 0, 400), distinct("other", 1000, 400))
    engine.step()
    victims = engine.scheduler._planner._victims
    modes = {seq.request.request_id: victims.mode(seq, "block", contended=True) for seq in engine.scheduler.seated}
    assert (modes["twin"], modes["other"]) == ("recompute", "swap")
    engine.run()


class ChargedQueue(ArrivalQueue):
    """Notes what each admission has to compute of its prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.charged: list[tuple[str, int]] = []

    def on_admitted(self, seq: Sequence, num_uncached: int, now: float) -> None:
        self.charged.append((seq.request.request_id, num_uncached))


def test_what_the_host_holds_of_a_prompt_is_not_computed() -> None:
    """The policy is told that one that was swapped out has nothing of its prompt to compute."""
    queue = ChargedQueue()
    engine = Engine(waiting=queue, num_host_blocks=64, preemption="swap", max_num_seqs=1, look_ahead=0)
    engine.add(distinct("low", 0, 9))
    engine.step()
    engine.add(distinct("high", 100, 4, priority_class=1))
    engine.run()
    assert queue.charged == [("low", 9), ("high", 4), ("low", 0)]


def swapped_out(manager: BlockManager, number: int) -> Sequence:
    """A sequence of two blocks, all of them on the host."""
    seq = Sequence(number, distinct(f"r{number}", 100 * number, 8), 0)
    manager.seat(seq, [])
    manager.open(seq, None)
    manager.grow(seq, 2)
    seq.num_computed = 8
    manager.swap_out(seq)
    manager.take_outgoing(2)
    manager.end_step()
    return seq


def test_what_came_ahead_last_is_given_up_first() -> None:
    """Of two that wait with their KV on the device the later one gives it up, but never who is to be seated."""
    manager = BlockManager(make_config(num_blocks=6, num_host_blocks=8, watermark=0.0))
    first, second = swapped_out(manager, 0), swapped_out(manager, 1)
    for kept, left in ((None, first), (second, second)):
        for seq in (first, second):
            if seq.seq_id not in manager.prefetched:
                manager.prefetch(seq, 2)
        manager.drop_prefetched(4, keep=kept or swapped_out(manager, 2))
        assert list(manager.prefetched.values()) == [left]


class LastFirst(ArrivalQueue):
    """The running are ordered against their class, so lower ones get their part of a step first."""

    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        return (seq.priority_class, -seq.seq_id)
