"""Seeded worlds around the engine, every checker on; and that the checkers see what they are there for."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.reasons import ErrorCode, FinishReason
from tests.engine.builders import make_config, make_request
from worker.engine.block_manager import BlockManager
from worker.engine.outputs import (
    FinishEvent,
    NewSequence,
    Preemption,
    SampledToken,
    SamplingParams,
    ScheduledSequence,
    StepPlan,
    StepRecord,
    TokenEvent,
)
from worker.engine.planner import Planner
from worker.engine.policies.turns import ClaimedTurns
from worker.engine.preemption import VictimChooser
from worker.engine.quota import _Buckets
from worker.engine.request import Sequence
from worker.engine.scheduler import Scheduler
from worker.engine.tiers import TierPolicy
from worker.sim import fuzz
from worker.sim.checkers import Checker, Delivered, Endings, Entry, Idle, Limits, Pauses, PingPong, Progress, Tokens
from worker.sim.fuzz import finished_seeds, replay, run_seed
from worker.sim.oracle import Undisturbed
from worker.sim.world import World

NUM_STEPS = 5000
CHOICE = Undisturbed((7, 8), "ab", FinishReason.LENGTH)


@pytest.mark.parametrize("seed", range(20))
def test_a_seed(seed: int):
    """Nothing that must always hold is broken in 5,000 steps of a small world full of faults."""
    result = run_seed(seed, NUM_STEPS)
    assert result.failure is None, result.failure
    assert result.num_steps >= NUM_STEPS


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_soak():
    """10^7 steps over 200 seeds; interrupted, it goes on where it was (the file is kept in the working directory)."""
    file = Path("fuzz-soak.jsonl")
    arguments = ["--soak", str(file), "--seeds", "200", "--steps", "50000", "--jobs", "2"]
    assert fuzz.main(arguments) == 0
    assert sum(finished_seeds(file, 50_000).values()) >= 10**7


def test_the_same_seed_is_the_same_world():
    """A replay goes through the same steps and requests: that is what makes a failure reproducible."""
    first, second = run_seed(3, 300), run_seed(3, 300)
    assert (first.num_steps, first.num_requests) == (second.num_steps, second.num_requests)


def test_worlds_have_every_kind_of_trouble(monkeypatch: pytest.MonkeyPatch):
    """Seeds have preemption by swap and by recompute, swaps on their way out and in between two steps, failed copies,
    cached prefixes, pauses, claimed turns, requests held back by a quota, and every way to end."""
    ends: set[tuple[FinishReason, ErrorCode | None]] = set()
    totals = dict.fromkeys(("total_swaps", "total_recomputes", "total_failed_copies", "total_cached_tokens"), 0)
    others: Counter[str] = Counter()

    class Recorder(Checker):
        def planned(self, plan: StepPlan, scheduler: Scheduler) -> None:
            blocks = scheduler._blocks
            others["out"] += any(seq.out_block_ids for seq in blocks._outgoing.values())
            others["in ahead"] += any(map(blocks.num_to_restore, blocks.prefetched.values()))
            others["in"] += any(map(blocks.num_to_restore, scheduler.seated))

        def event(self, entry: Entry, event: TokenEvent | FinishEvent, now: float) -> None:
            if isinstance(event, FinishEvent):
                ends.add((event.reason, event.error))

    def count(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def counted(self: object, *arguments: object) -> object:
            result = method(self, *arguments)
            others[name] += bool(result)
            return result

        monkeypatch.setattr(kind, name, counted)

    count(Planner, "_pauses")
    count(ClaimedTurns, "take")
    count(World, "_hold_back")
    for seed in range(12):
        world = World(seed)
        world.checkers.append(Recorder())
        world.run(500)
        for name in totals:
            totals[name] += getattr(world.scheduler.stats(), name)
    assert all(totals.values()), totals
    errors = {(FinishReason.ERROR, ErrorCode.INTERNAL), (FinishReason.ERROR, ErrorCode.EXCEEDS_KV_CAPACITY)}
    assert ends == errors | {(reason, None) for reason in FinishReason if reason is not FinishReason.ERROR}
    kinds = ("_pauses", "take", "_hold_back", "out", "in ahead", "in")
    assert min(others[name] for name in kinds) > 0, others


def equal_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting sequence displaces one of its own class."""
    monkeypatch.setattr(VictimChooser, "_is_lower", lambda _, victim, seq: victim.priority_class <= seq.priority_class)


def wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sixth token of an answer arrives as another one."""
    append = Sequence.append

    def broken(self: Sequence, token_id: int) -> tuple[str, FinishReason | None]:
        return append(self, token_id ^ (len(self.output) == 5))

    monkeypatch.setattr(Sequence, "append", broken)


def early_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests expire five seconds before their time."""
    expire = Scheduler._expire
    monkeypatch.setattr(Scheduler, "_expire", lambda self, now: expire(self, now + 5.0))


def no_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a sequence was displaced, it is displaced again."""
    monkeypatch.setattr(BlockManager, "is_pinned", lambda self, seq: False)


def lost_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed copy is taken for one that arrived."""
    monkeypatch.setattr(Scheduler, "_fall_back", lambda self, flight, failed: None)


def endless_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode pauses for a higher class as often as that likes."""
    monkeypatch.setattr(Planner, "_pauses", lambda self, seq, for_class: seq.priority_class < for_class)


def lost_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was cancelled in its seat keeps it."""
    monkeypatch.setattr(Scheduler, "_release_leaving", lambda self: ())


def late_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given back is not of use to those who wait for their quota."""
    monkeypatch.setattr(_Buckets, "untake_uncovered", lambda self, now: [])


@pytest.mark.parametrize(
    "break_rule",
    [equal_victim, wrong_token, early_deadline, no_pinning, lost_copy, endless_pause, late_delay, lost_sequence],
)
def test_a_broken_rule_is_found(break_rule: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    """The seeds of `make test` notice each of these within 1,000 steps, and say how to replay it."""
    break_rule(monkeypatch)
    failure = next((found for seed in range(20) if (found := run_seed(seed, 1000).failure) is not None), None)
    assert failure is not None
    assert "replay: python -m worker.sim.fuzz --seed" in failure


def entry(**fields: object) -> Entry:
    return Entry(make_request(prompt=3, max_tokens=2, **fields), (CHOICE,), [Delivered()])


def token(token_id: int, text: str = "") -> TokenEvent:
    return TokenEvent("r", 0, SampledToken(token_id), text)


def end(reason: FinishReason, error: ErrorCode | None = None, tail: str = "") -> FinishEvent:
    return FinishEvent("r", 0, reason, tail, error)


def record(**fields: object) -> StepRecord:
    counts = dict.fromkeys(("num_running", "num_waiting", "num_decode_tokens", "num_prefill_tokens"), 0)
    fixed = {"step": 1, "at": 0.0, "num_blocks_used": 0, "admitted": (), "finished": (), "seats_by_lane": {}}
    return StepRecord(**counts, **{**fixed, **fields})


def fails(number: str, check: Callable[[], None]) -> None:
    with pytest.raises(AssertionError, match=number):
        check()


def test_tokens_are_those_of_an_undisturbed_run():
    """S3: another token, one too many, one too few, or another text."""
    one, all_of_it = entry(), entry()
    one.delivered[0].tokens, one.delivered[0].texts = [7], ["a"]
    all_of_it.delivered[0].tokens, all_of_it.delivered[0].texts = [7, 8], ["a", "b"]
    Tokens().event(one, token(8), 0.0)
    fails("S3", lambda: Tokens().event(one, token(9), 0.0))
    fails("S3", lambda: Tokens().event(all_of_it, token(8), 0.0))
    fails("S3", lambda: Tokens().event(one, end(FinishReason.LENGTH), 0.0))
    Tokens().event(all_of_it, end(FinishReason.LENGTH), 0.0)
    fails("S3", lambda: Tokens().event(all_of_it, end(FinishReason.LENGTH, tail="c"), 0.0))


@pytest.mark.parametrize(
    ("event", "is_right"),
    [
        (end(FinishReason.LENGTH), True),
        (end(FinishReason.STOP), False),
        (end(FinishReason.CANCELLED), False),
        (end(FinishReason.DEADLINE), False),
        (end(FinishReason.ERROR, ErrorCode.INTERNAL), False),
        (end(FinishReason.ERROR, ErrorCode.EXCEEDS_KV_CAPACITY), False),
        (end(FinishReason.ERROR, ErrorCode.OVERLOADED), False),
    ],
)
def test_an_end_has_its_reason(event: FinishEvent, is_right: bool):
    """S4: nobody cancelled it, nothing failed, it fits, and its deadline is to come."""
    checker = Endings(num_blocks=2, block_size=4)
    if is_right:
        checker.event(entry(deadline=5.0), event, 4.0)
    else:
        fails("S4", lambda: checker.event(entry(deadline=5.0), event, 4.0))


def test_a_request_ends_once():
    """S4: nothing comes after the end, and nobody is forgotten."""
    checker, over = Endings(2, 4), entry()
    over.delivered[0].end = end(FinishReason.LENGTH)
    fails("S4", lambda: checker.event(over, end(FinishReason.LENGTH), 0.0))
    fails("S4", lambda: checker.event(over, token(7), 0.0))
    fails("S4", lambda: checker.idle(Scheduler(make_config()), [over, entry()]))


def test_the_wait_is_bounded_once_faults_stop():
    """S5: too many steps in a calm, or too many that compute nothing."""
    checker, empty = Progress(make_config()), StepPlan(1, (), (), ())
    checker.calm([])
    for _ in range(8):
        checker.stepped(record(), {})
        checker.planned(empty, Scheduler(make_config()))
    fails("S5", lambda: checker.stepped(record(), {}))
    fails("S5", lambda: checker.planned(empty, Scheduler(make_config())))


def test_nobody_plays_ping_pong():
    """S6: displaced by an equal for a seat, seated again in the same step, or displaced again and again."""
    low, equal, high = (entry(priority_class=c) for c in (0, 0, 1))
    entries = {"low": low, "equal": equal, "high": high}

    def displaced(by: str, **fields: object) -> StepRecord:
        return record(preempted=(Preemption("low", 0, "seat", "recompute", 1, by),), **fields)

    checker = PingPong(make_config())
    fails("S6", lambda: checker.stepped(displaced("equal"), entries))
    fails("S6", lambda: checker.stepped(displaced("high", admitted=("low",)), entries))
    for _ in range(3):
        checker.stepped(displaced("high"), entries)
    fails("S6", lambda: checker.stepped(displaced("high"), entries))
    checker.added(Entry(make_request("low"), low.expected, low.delivered))
    checker.stepped(displaced("high"), entries)


def test_a_decode_pauses_for_a_higher_class_and_not_too_long():
    """S8: beside no prefill of a higher class, against its target, or too long. One without a slot may wait."""
    slow = TierPolicy(name="standard")

    def steps(*others: int, num_tokens: int = 3, tier: TierPolicy = slow) -> None:
        """Sequence 0, of class 1 and with blocks of 4 slots, has sampled and gets nothing beside prefills of others."""
        scheduler = Scheduler(make_config(max_pauses=2, tiers={"standard": tier}))
        checker = Pauses(scheduler.config)
        for priority_class in (1, *others):
            checker.added(entry(priority_class=priority_class))
        checker.planned(plan(opened(0, num_tokens, samples=True)), scheduler)
        for number in range(1, len(others) + 1):
            checker.planned(plan(opened(number, 5, samples=False)), scheduler)

    def opened(seq_id: int, num_tokens: int, *, samples: bool) -> ScheduledSequence:
        return ScheduledSequence(seq_id, 0, num_tokens, tuple(range(-(-num_tokens // 4))), samples)

    def plan(part: ScheduledSequence) -> StepPlan:
        row = NewSequence(part.seq_id, (0,) * part.num_tokens, part.num_tokens, 0, SamplingParams(), ())
        return StepPlan(1, (), (row,), (part,))

    steps(2, 2)
    steps(1, 1, 0, num_tokens=4)
    fails("S8", lambda: steps(2, 2, 2))
    fails("S8", lambda: steps(1))
    fails("S8", lambda: steps(2, tier=TierPolicy(name="standard", tpot=1.0)))


def test_limits_and_idleness():
    """S2: a step above its budget. S7: an engine that holds a request is not idle."""
    scheduler = Scheduler(make_config(max_num_batched_tokens=4))
    scheduler.add(make_request(prompt=8))
    plan, _ = scheduler.schedule(0.0)
    tight = Scheduler(make_config(max_num_batched_tokens=3))
    Limits().planned(plan, scheduler)
    fails("S2", lambda: Limits().planned(plan, tight))
    Idle().idle(tight, [])
    fails("S7", lambda: Idle().idle(scheduler, []))


def test_a_failure_tells_how_to_replay_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The replay prints the traceback and its own command, and its status is 1; of a sound seed it is 0."""
    assert replay(0, 50) == 0
    wrong_token(monkeypatch)
    assert replay(0, 1000) == 1
    assert "S3" in (said := capsys.readouterr().err)
    assert "python -m worker.sim.fuzz --seed 0 --steps 1000" in said


def test_a_soak_goes_on_after_an_interruption(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Finished seeds do not run again, a torn line does not count, and more steps than before are run anew."""
    file = tmp_path / "soak.jsonl"
    line = {"seed": 0, "steps": 20, "num_steps": 21, "num_requests": 3}
    file.write_text(json.dumps(line) + "\n" + json.dumps(line | {"seed": 1})[:-9] + "\n")
    assert fuzz.main(["--soak", str(file), "--seeds", "3", "--steps", "20"]) == 0
    said = capsys.readouterr().out
    assert [f"seed {seed}:" in said for seed in range(3)] == [False, True, True]
    assert "3 seeds are finished" in said
    assert finished_seeds(file, 21) == {}


def test_a_failed_seed_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The soak goes on with the others, keeps the failed seed for the next time, and its status is 1."""
    file = tmp_path / "soak.jsonl"
    wrong_token(monkeypatch)  # the processes of the soak are forked and have it, too
    assert fuzz.main(["--soak", str(file), "--seeds", "2", "--steps", "1000"]) == 1
    assert finished_seeds(file, 1000) == {}
