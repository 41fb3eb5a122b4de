"""The fake runner refuses unsound plans, so that a test which passes with it proves something."""

import pytest

from tests.engine.builders import make_config
from worker.engine.fakes import FakeRunner, VirtualClock
from worker.engine.outputs import NewSequence, SamplingParams, ScheduledSequence, StepPlan


def new(seq_id: int, num_tokens: int = 4, choice: int = 0) -> NewSequence:
    return NewSequence(seq_id, tuple(range(num_tokens)), num_tokens, choice, SamplingParams())


def part(seq_id: int, start: int, num_tokens: int, *block_ids: int, samples: bool = True) -> ScheduledSequence:
    return ScheduledSequence(seq_id, start, num_tokens, block_ids, samples)


def plan(step: int, *scheduled: ScheduledSequence, opens: tuple = (), removed: tuple = ()) -> StepPlan:
    return StepPlan(step, removed, opens, scheduled)


UNSOUND = {
    "after step": plan(1, part(0, 4, 1, 1)),
    "empty step": plan(2),
    "not new": plan(2, part(0, 4, 1, 1), opens=(new(0),)),
    "scheduled twice": plan(2, part(0, 4, 1, 1), part(0, 5, 1)),
    "more rows than seats": plan(2, part(0, 4, 1, 1), opens=tuple(new(i) for i in range(1, 5))),
    "above its budget": plan(2, part(1, 0, 17, 1, 2, 3, 4, 5), opens=(new(1, 17),)),
    "no block 64": plan(2, part(0, 4, 1, 64)),
    "in 2 tables and written": plan(2, part(1, 0, 4, 0), opens=(new(1),)),
    "twice in the table": plan(2, part(0, 4, 1, 0)),
    "1 blocks, needs 2": plan(2, part(0, 4, 1)),
    "3 blocks, needs 2": plan(2, part(0, 4, 1, 1, 2)),
    "goes on at 5": plan(2, part(0, 5, 1, 1)),
    "has no part": plan(2, part(0, 4, 0)),
    "nobody knows": plan(2, part(0, 4, 2, 1)),
    "samples at the wrong time": plan(2, part(0, 4, 1, 1, samples=False)),
}


@pytest.mark.parametrize("complaint", UNSOUND)
def test_an_unsound_plan_is_refused(complaint: str) -> None:
    """Each way to break the contract has an assertion of its own."""
    runner = FakeRunner(make_config())
    runner.execute(plan(1, part(0, 0, 4, 0), opens=(new(0),)))
    with pytest.raises(AssertionError, match=complaint):
        runner.execute(UNSOUND[complaint])


def test_an_overwritten_block_shows() -> None:
    """A token is sampled from what the KV cache holds, and that must be what was computed."""
    runner = FakeRunner(make_config())
    runner.execute(plan(1, part(0, 0, 4, 0), opens=(new(0),)))
    runner._kv[2] = 99
    with pytest.raises(AssertionError, match="corrupt"):
        runner.execute(plan(2, part(0, 4, 1, 1)))


def test_tokens_depend_on_history_and_choice_only() -> None:
    """The same tokens so far and the same choice give the same token, in whatever blocks; another choice another."""
    first, second = FakeRunner(make_config()), FakeRunner(make_config())
    one = first.execute(plan(1, part(0, 0, 4, 0), part(1, 0, 4, 1), opens=(new(0), new(1, choice=1)))).tokens
    two = second.execute(plan(1, part(7, 0, 4, 9), opens=(new(7),))).tokens
    assert one[0] == two[7]
    assert one[0] != one[1]


def test_virtual_clock() -> None:
    """It moves when told to, and never back."""
    clock = VirtualClock(5.0)
    clock.advance(1.5)
    assert clock.now() == 6.5
    with pytest.raises(AssertionError):
        clock.advance(-1.0)
