"""Rules broken on purpose: the invariants or the fake runner notice each of them in a short run."""

from collections.abc import Callable

import pytest

from tests.engine.builders import Engine, make_request
from worker.engine import planner
from worker.engine.block_manager import BlockManager
from worker.engine.block_pool import BlockPool
from worker.engine.cost import CostModel
from worker.engine.fakes import FakeRunner
from worker.engine.outputs import BlockCopy, StepOutcome, StepPlan
from worker.engine.preemption import VictimChooser
from worker.engine.request import Sequence
from worker.engine.scheduler import SchedulerConfig
from worker.engine.tiers import TierPolicy
from worker.sim.checkers import Entry, Pauses


def busy_run() -> None:
    """Two classes, shared beginnings, forks, too few blocks and seats, swap; asserts each rule that it can see."""
    engine = Engine(
        num_blocks=20, num_host_blocks=30, preemption="swap", max_num_batched_tokens=24, max_num_seqs=4, watermark=0.15
    )
    for number in range(24):
        prompt = [*range(1, 9 if number % 2 else 1), *range(100 * number, 100 * number + 5 + number % 4)]
        request = make_request(
            f"r{number}", prompt=prompt, priority_class=number % 2, n=1 + number % 3 // 2, max_tokens=4 + number % 15
        )
        engine.add(request)
        engine.step()
        check_rules(engine)
    while engine.scheduler.has_work:
        engine.step()
        check_rules(engine)
    engine.run()


def check_rules(engine: Engine) -> None:
    """What a record must show: the watermark after an admission, and strictly lower victims for a seat."""
    record = engine.records[-1]
    classes = {f"r{number}": number % 2 for number in range(24)}
    for preemption in record.preempted:
        if preemption.beneficiary in record.admitted and preemption.beneficiary != preemption.request_id:
            assert classes[preemption.request_id] < classes[preemption.beneficiary], "a victim of equal class"
    if record.admitted and record.num_running > len(record.admitted) and not record.preempted:
        # Free, or owed to nobody: at least 15 % of 20. Ends of this very step are not counted.
        assert engine.scheduler.config.num_blocks - record.num_blocks_used >= 3, "the watermark is not left free"


def skip_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    share = BlockPool.share

    def broken(self: BlockPool, block_ids: list[int]) -> list[int]:
        table = share(self, block_ids)
        for block_id in table:
            if self._refs[block_id] > 1:
                self._refs[block_id] -= 1
        return table

    monkeypatch.setattr(BlockPool, "share", broken)


def lower_the_watermark(monkeypatch: pytest.MonkeyPatch) -> None:
    start = BlockManager.__init__

    def broken(self: BlockManager, config) -> None:
        start(self, config)
        self.watermark -= 1

    monkeypatch.setattr(BlockManager, "__init__", broken)


def lose_a_swap_in(monkeypatch: pytest.MonkeyPatch) -> None:
    swap_in = BlockManager.swap_in
    monkeypatch.setattr(BlockManager, "swap_in", lambda self, seq, most: swap_in(self, seq, most)[1:])


def lose_a_swap_out(monkeypatch: pytest.MonkeyPatch) -> None:
    take = BlockManager.take_outgoing
    monkeypatch.setattr(
        BlockManager, "take_outgoing", lambda self, most: [(seq, copies[:-1]) for seq, copies in take(self, most)]
    )


def reuse_a_draining_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "drain", BlockPool.free)
    monkeypatch.setattr(BlockPool, "end_draining", lambda self, block_ids: None)
    monkeypatch.setattr(BlockPool, "check_integrity", lambda self, tables=None, to_copy=None: None)


def displace_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        VictimChooser, "_is_lower", lambda self, victim, seq: victim.priority_class <= seq.priority_class
    )
    monkeypatch.setattr(planner.Planner, "_may_displace", lambda self, seq: bool(self.running))


def write_shared_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: BlockManager, seq: Sequence, sibling: Sequence) -> list[BlockCopy]:
        index = len(seq.block_ids)
        if seq.num_prompt % self.block_size and seq.num_prompt // self.block_size == index and not seq.output:
            seq.block_ids += self.device.share((sibling.block_ids[index],))
            seq.num_computed = seq.num_prompt - 1
        return []

    monkeypatch.setattr(BlockManager, "_fork_partial", broken)


def trust_an_old_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.block_manager.block_digest", lambda parent, tokens: bytes([tokens[-1] % 5]))


def forget_what_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "room", property(lambda self: self.device.num_free + self.device.num_draining))


def test_the_run_passes_with_all_rules_in_force() -> None:
    """Nothing is broken: the busy run ends, so that what follows proves something."""
    busy_run()


@pytest.mark.parametrize(
    ("mutate", "complaint"),
    [
        (skip_a_reference, "P1|P2|freed twice|I2|tables"),
        (lower_the_watermark, "watermark"),
        (lose_a_swap_in, "corrupt"),
        (lose_a_swap_out, "corrupt"),
        (reuse_a_draining_block, "written while it drains"),
        (displace_equals, "a victim of equal class"),
        (write_shared_blocks, "I2|written"),
        (trust_an_old_digest, "corrupt"),
    ],
)
def test_a_broken_rule_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rule is broken, and the run does not end well: the message tells which kind of rule."""
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=complaint):
        busy_run()


def test_forgetting_what_is_owed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that has begun is promised its blocks: whoever gives them away breaks I1."""
    forget_what_is_owed(monkeypatch)
    engine = Engine(num_blocks=10, max_num_batched_tokens=8)
    engine.add(make_request("low", prompt=36, max_tokens=2))
    engine.step()
    engine.add(make_request("high", prompt=range(100, 128), priority_class=1, max_tokens=2))
    with pytest.raises(AssertionError, match="I1: 12 blocks owed, 6 free now or soon"):
        engine.step(in_flight=engine.scheduler.check_integrity)


def paced_run() -> None:
    """Long ones of a low class, and urgent ones that take their seats for some steps; a block each way in a step."""
    prices = {"copy_out_seconds_per_block": 1.0, "copy_in_seconds_per_block": 1.0, "prefill_seconds": lambda n, _: n}
    cost = CostModel(**prices, compute_seconds=lambda _scheduled: 0.0)
    limits = {"num_blocks": 40, "num_host_blocks": 60, "max_num_batched_tokens": 64, "max_num_seqs": 3}
    engine = Engine(**limits, preemption="swap", prefix_caching=False, cost=cost)
    expected = Engine(num_blocks=400, max_num_batched_tokens=200, prefix_caching=False)
    for number in range(30):
        if number % 5 < 2:
            fields = {"prompt": range(100 * number, 100 * number + 26), "max_tokens": 40}
        else:
            fields = {"prompt": range(100 * number, 100 * number + 3), "max_tokens": 3 + number % 4}
        request = make_request(f"r{number}", priority_class=int(number % 5 > 1), **fields)
        engine.add(request)
        expected.add(request)
        for _ in range(3):
            engine.step()
    engine.run()
    expected.run()
    for record in engine.records:
        copies = (record.num_swap_out_blocks, record.num_swap_in_blocks)
        is_paced = record.num_decode_tokens + record.num_prefill_tokens > 0
        assert not is_paced or max(copies) <= 1, f"a step copies {copies} blocks"
    for number in range(30):
        assert engine.tokens(f"r{number}") == expected.tokens(f"r{number}")


def copy_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostModel, "_most", lambda self, scheduled, taken, price: 1000)


def reuse_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    end_step = BlockManager.end_step

    def broken(self: BlockManager) -> None:
        end_step(self)
        for block_id in list(self.device._draining):
            del self.device._draining[block_id]
            self.device._put_back(block_id)
        self.device._num_copies.clear()

    monkeypatch.setattr(BlockManager, "end_step", broken)


def go_out_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: BlockManager, most: int) -> list[tuple[Sequence, list[BlockCopy]]]:
        for seq in self._outgoing.values():
            first = len(seq.host_block_ids) - len(seq.out_block_ids)
            copies = list(map(BlockCopy, seq.out_block_ids[:most], seq.host_block_ids[first:]))
            del seq.out_block_ids[:most]
            self._outgoing_now += [copy.source for copy in copies]
            return [(seq, copies)]
        return []

    monkeypatch.setattr(BlockManager, "take_outgoing", broken)


def forget_what_the_host_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = BlockManager.settle

    def broken(self: BlockManager, seq: Sequence) -> None:
        settle(self, seq)
        seq.out_block_ids = []

    monkeypatch.setattr(BlockManager, "settle", broken)


def come_in_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: BlockManager, seq: Sequence) -> bool:
        missing = self.target_blocks(seq) - len(seq.block_ids) + self.watermark
        return self.num_to_restore(seq) > 0 and missing <= min(self.room, self.device.num_free)

    monkeypatch.setattr(BlockManager, "can_prefetch", broken)


@pytest.mark.parametrize(
    ("mutate", "complaint"),
    [
        (copy_all_at_once, "a step copies"),
        (reuse_before_the_copy, "P5"),
        (go_out_from_the_beginning, "turned round|corrupt"),
        (forget_what_the_host_lacks, "corrupt"),
        (come_in_too_soon, "I3|being filled|corrupt"),
    ],
)
def test_a_broken_rule_of_paced_swaps_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swaps that take many steps, one rule of theirs broken; with the rules in force the same run passes."""
    paced_run()
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=complaint):
        paced_run()


def paused_run() -> None:
    """A decode of a low class, one of a tier with a TPOT target, and prefills of a high class that fill every step."""

    class Watched(FakeRunner):
        def __init__(self, config: SchedulerConfig) -> None:
            super().__init__(config)
            self.pauses = Pauses(config)

        def execute(self, plan: StepPlan) -> StepOutcome:
            self.pauses.planned(plan, engine.scheduler)
            return super().execute(plan)

    tiers = {"paced": TierPolicy(name="paced", tpot=1.0)}
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "num_blocks": 400, "prefix_caching": False}
    engine = Engine(Watched, **limits, max_pauses=3, tiers=tiers)
    requests = [make_request("low", max_tokens=30), make_request("paced", prompt=2, lane="paced", max_tokens=30)]
    requests += [make_request(f"high{i}", prompt=60, priority_class=1, max_tokens=9) for i in range(3)]
    for request in requests:
        engine.runner.pauses.added(Entry(request, (), []))
        engine.add(request)
        engine.step()
    engine.run()


def pause_on_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: planner.Planner, seq: Sequence, for_class: int) -> bool:
        return seq.priority_class < for_class and not self._config.has_tpot(seq.request.lane)

    monkeypatch.setattr(planner.Planner, "_pauses", broken)


def pause_against_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = planner.Planner._pauses

    def broken(self: planner.Planner, seq: Sequence, for_class: int) -> bool:
        return (seq.request.lane == "paced" and for_class > 0) or pauses(self, seq, for_class)

    monkeypatch.setattr(planner.Planner, "_pauses", broken)


def pause_for_an_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = planner.Planner._pauses
    monkeypatch.setattr(planner.Planner, "_pauses", lambda self, seq, for_class: pauses(self, seq, for_class + 1))


@pytest.mark.parametrize(
    ("mutate", "complaint"),
    [
        (pause_on_and_on, "S8: low of class 0 pauses 4 steps in a row"),
        (pause_against_a_target, "S8: paced of class 0 pauses and has a TPOT target"),
        (pause_for_an_equal, r"S8: high0 of class 1 pauses beside prefills of \[1\]"),
    ],
)
def test_a_broken_rule_of_pauses_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes pause too long, against their target, or for an equal; with the rules in force the same run passes."""
    paused_run()
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=complaint):
        paused_run()
