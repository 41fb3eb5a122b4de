"""The writer rule, case by case, and in every interleaving of the protocol's model checker."""

import copy
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from schemas.reasons import FinishReason
from schemas.records import End, InputRef
from schemas.reply_log import ReplyLog
from worker.transport.attempt import Attempt, Verdict

OLDER, OURS, YOUNGER = (InputRef("prompts.standard", 0, offset, timestamp_ms=offset) for offset in (1, 2, 3))
AN_END = End(attempt=0, finish_reason=FinishReason.STOP)


def writing(per_request: bool = True, number: int = 0) -> Attempt:
    """An attempt whose `begin` landed at `number`."""
    attempt = Attempt(OURS, per_request)
    attempt.begins()
    verdict = attempt.acknowledged(number)
    if verdict is Verdict.READ:
        verdict = attempt.read(ReplyLog(attempt=number, oldest_input=OURS))
    assert verdict is Verdict.GO_ON
    return attempt


def written(attempt: Attempt, offset: int | None) -> Verdict:
    """What follows when a `tokens` record landed at `offset`."""
    attempt.writes()
    return attempt.acknowledged(offset)


def test_a_begin_at_offset_0_was_the_first():
    """Nobody was here before: no log is read."""
    attempt = Attempt(OURS, per_request=True)
    attempt.begins()
    assert attempt.acknowledged(0) is Verdict.GO_ON
    assert attempt.number == 0


def test_a_later_begin_reads_the_log_up_to_itself():
    """Offset above 0: an earlier attempt left tokens to go on from, or an end."""
    for log, expected in (
        (ReplyLog(attempt=7, oldest_input=OURS), Verdict.GO_ON),
        (ReplyLog(attempt=0, oldest_input=OURS, end=AN_END), Verdict.DONE),
        (ReplyLog(attempt=7, oldest_input=OLDER), Verdict.WAIT),
        (ReplyLog(attempt=7, oldest_input=YOUNGER), Verdict.GO_ON),
    ):
        attempt = Attempt(OURS, per_request=True)
        attempt.begins()
        assert attempt.acknowledged(7) is Verdict.READ
        assert attempt.read_until == 7
        assert attempt.read(log) is expected


def test_contiguous_acknowledgements_need_no_reading():
    """begin at o, then o+1, o+2: nobody else has written; the end that follows is accepted."""
    attempt = writing(number=4)
    assert written(attempt, 5) is Verdict.GO_ON
    assert written(attempt, 6) is Verdict.GO_ON
    attempt.ends()
    assert attempt.acknowledged(7) is Verdict.DONE


def test_after_a_gap_the_log_tells():
    """A doubled record or a zombie's late one: go on. Another begin: again, or wait for an older record's."""
    for log, expected in (
        (ReplyLog(attempt=0, oldest_input=OURS), Verdict.GO_ON),
        (ReplyLog(attempt=1, oldest_input=OURS), Verdict.AGAIN),
        (ReplyLog(attempt=1, oldest_input=OLDER), Verdict.WAIT),
        (ReplyLog(attempt=1, oldest_input=OURS, end=AN_END), Verdict.DONE),
    ):
        attempt = writing()
        assert written(attempt, 2) is Verdict.READ
        assert attempt.read(log) is expected


def test_after_a_gap_the_next_offset_is_expected():
    """Going on after a doubled record, the acknowledged offset plus one is no gap."""
    attempt = writing()
    written(attempt, 2)
    attempt.read(ReplyLog(attempt=0, oldest_input=OURS))
    assert written(attempt, 3) is Verdict.GO_ON


@pytest.mark.parametrize("offset", [None, -1])
def test_a_failed_send_is_like_being_fenced(offset: int | None):
    """A failed send, or an acknowledgement without an offset: begin again."""
    for attempt in (writing(), writing(per_request=False)):
        assert written(attempt, offset) is Verdict.AGAIN
    ending = writing()
    ending.ends()
    assert ending.acknowledged(offset) is Verdict.AGAIN


def test_on_a_shared_log_offsets_tell_nothing_and_the_end_is_read_back():
    """Records of others lie between ours; whether our end counts is read from our begin on (rule 6)."""
    attempt = writing(per_request=False, number=50)
    assert written(attempt, 90) is Verdict.GO_ON
    attempt.ends()
    assert attempt.acknowledged(120) is Verdict.READ
    assert attempt.read(ReplyLog(attempt=50, oldest_input=OURS, end=AN_END)) is Verdict.DONE
    fenced = writing(per_request=False, number=50)
    fenced.ends()
    fenced.acknowledged(120)
    assert fenced.read(ReplyLog(attempt=60, oldest_input=OURS)) is Verdict.AGAIN


def test_an_end_without_an_attempt_counts_at_offset_0_only():
    """Later in the log it must be read whether it was accepted; if not, the worker begins (rule 7)."""
    first = Attempt(OURS, per_request=True)
    first.refuses()
    assert first.acknowledged(0) is Verdict.DONE
    begun, ended = ReplyLog(attempt=0, oldest_input=OURS), ReplyLog(end=AN_END)
    for log, expected in ((begun, Verdict.AGAIN), (ended, Verdict.DONE)):
        later = Attempt(OURS, per_request=True)
        later.refuses()
        assert later.acknowledged(3) is Verdict.READ
        assert later.read(log) is expected


def test_misuse_is_a_programmer_error():
    """An acknowledgement without a send, a second record on its way, one before the log was read, and a second life."""
    with pytest.raises(AssertionError):
        Attempt(OURS, per_request=True).acknowledged(0)
    with pytest.raises(AssertionError):
        writing().acknowledged(1)
    hasty, blind = writing(), writing()
    hasty.writes()
    written(blind, 7)
    over = writing()
    written(over, None)
    for attempt in (hasty, blind, over):
        for send in (attempt.writes, attempt.ends):
            with pytest.raises(AssertionError):
                send()


def test_an_attempt_that_has_only_begun_may_be_left():
    """Its `begin` is acknowledged, the log read or not, and nothing else of it was sent; also when an older record
    wins. Not on a shared log, where nobody counts."""
    begun = Attempt(OURS, per_request=True)
    assert not begun.may_leave
    begun.begins()
    assert not begun.may_leave
    begun.acknowledged(7)
    assert begun.may_leave
    for log, may_leave in (
        (ReplyLog(attempt=7, oldest_input=OURS), True),
        (ReplyLog(attempt=7, oldest_input=OLDER), True),
        (ReplyLog(attempt=0, oldest_input=OURS, end=AN_END), False),
    ):
        attempt = copy.copy(begun)
        attempt.read(log)
        assert attempt.may_leave is may_leave
    assert not writing(per_request=False).may_leave


@pytest.mark.parametrize("offset", [None, 1, 2])
def test_what_has_sent_a_token_is_not_left(offset: int | None):
    """It may be there, whatever the acknowledgement says; and so may an `end`."""
    for send in (Attempt.writes, Attempt.ends):
        attempt = writing()
        send(attempt)
        assert not attempt.may_leave
        attempt.acknowledged(offset)
        assert not attempt.may_leave


STEPS: dict[str, Callable[[Attempt], object]] = {
    "begins": Attempt.begins,
    "refuses": Attempt.refuses,
    "writes": Attempt.writes,
    "ends": Attempt.ends,
    "leaves": Attempt.leaves,
    "fails": lambda attempt: attempt.acknowledged(None),
    "lands next": lambda attempt: attempt.acknowledged(attempt.read_until + 1),
    "lands later": lambda attempt: attempt.acknowledged(attempt.read_until + 3),
    "is current": lambda attempt: attempt.read(ReplyLog(attempt=attempt.number, oldest_input=OURS)),
    "is fenced": lambda attempt: attempt.read(ReplyLog(attempt=10**6, oldest_input=OURS)),
    "is younger": lambda attempt: attempt.read(ReplyLog(attempt=10**6, oldest_input=OLDER)),
    "has ended": lambda attempt: attempt.read(ReplyLog(attempt=0, oldest_input=OURS, end=AN_END)),
}


def lives(attempt: Attempt, so_far: tuple[str, ...], most: int) -> Iterator[tuple[str, ...]]:
    """Every sequence of at most so many steps that the attempt lets happen."""
    yield so_far
    for name, step in STEPS.items() if len(so_far) < most else ():
        after = copy.copy(attempt)
        try:
            step(after)
        except AssertionError:
            continue
        yield from lives(after, (*so_far, name), most)


@pytest.mark.parametrize("per_request", [True, False])
def test_left_is_the_last_record_of_an_attempt(per_request: bool):
    """In every life of up to twelve steps: `left` follows on a `begin` that landed and on no other record, and nothing
    comes after it. On a shared log there is none."""
    every = set(lives(Attempt(OURS, per_request), (), 12))
    assert len(every) > 300
    left = {
        ("begins", "lands next", "leaves"),
        ("begins", "lands later", "leaves"),
        ("begins", "lands later", "is current", "leaves"),
        ("begins", "lands later", "is younger", "leaves"),
    }
    assert {life for life in every if "leaves" in life} == (left if per_request else set())


# In every interleaving: the model checker of the contract with our class in place of its writer.


@pytest.fixture
def model(checks: Path) -> Iterator[ModuleType]:
    module = importlib.import_module("protocol_model")
    original = module.acknowledged, module.worker_steps
    yield module
    module.acknowledged, module.worker_steps = original


LEFT = ("left", 0)


def use_attempt(model: ModuleType, attempt_class: type[Attempt], *, leaving: bool = False) -> None:
    """Lets `attempt_class` decide what the model's workers make of their acknowledgements. leaving: those that hear
    that they lost the record give their attempt up, and say so where they may."""

    def source(number: int) -> InputRef:
        return InputRef("prompts", 0, number, timestamp_ms=number)

    def attempt_of(case: Any, worker: Any, is_end: bool) -> Attempt:
        attempt = attempt_class(source(worker.source), per_request=not case.shared)
        if worker.phase == "refuse":
            attempt.refuses()
            return attempt
        attempt.begins()
        if worker.phase != "begin":
            attempt.acknowledged(0)
            if is_end:
                attempt.ends()
            else:
                attempt.writes()
        return attempt

    def acknowledged(case: Any, s: Any, i: int) -> Iterator[Any]:
        worker = s.workers[i]
        record, ack = worker.outbox[0]
        attempt = attempt_of(case, worker, "end" in record[:2])
        s = s._replace(workers=model.changed(s.workers, i, worker._replace(outbox=worker.outbox[1:], tail=ack.tail)))
        # The model has no offsets: 1 follows the begin at 0, 9 comes after a gap. A begin is never known to be first.
        verdict = attempt.acknowledged(1 if ack.expected else 9)
        if verdict is Verdict.READ:
            if s.log.gone:
                yield from model.begin_again(s, i)
                return
            mine = ack.attempt if worker.phase == "begin" else worker.attempt
            number = attempt.number if ack.attempt == mine and worker.phase != "refuse" else 10**6
            verdict = attempt.read(
                ReplyLog(
                    attempt=number if ack.attempt else None,
                    end=AN_END if ack.ended else None,
                    oldest_input=source(ack.first),
                )
            )
        if verdict is Verdict.DONE:
            yield model.leave(s, i, "mark")
        elif verdict is Verdict.WAIT:
            waits = model.leave(s, i, "wait")
            yield waits
            if leaving and attempt.may_leave:
                yield on_its_way(waits)
        elif verdict is Verdict.AGAIN:
            yield from model.begin_again(s, i)
        elif worker.phase == "begin":
            tokens = ((),) * case.choices if case.shared else ack.tokens
            begun = s.workers[i]._replace(phase="write", attempt=ack.attempt, tokens=tokens)
            yield model.with_workers(s, model.changed(s.workers, i, begun))
        else:
            yield model.with_workers(s, s.workers)

    def on_its_way(s: Any) -> Any:
        return s._replace(loose=tuple(sorted([*s.loose, LEFT])[:3]))

    def left_by(case: Any, worker: Any) -> bool:
        """Whether the worker of a lost record writes `left`, now that it has heard."""
        attempt = attempt_class(source(worker.source), per_request=not case.shared)
        is_acknowledged = worker.phase == "write" and not worker.outbox
        if not is_acknowledged and not (worker.phase == "begin" and worker.outbox and worker.outbox[0][1]):
            return False  # it waits for an acknowledgement, or has begun nothing
        attempt.begins()
        attempt.acknowledged(0)
        # Of an attempt that can never count again the model forgets what it wrote: then it may have been nothing.
        if any(worker.attempt in known for known in worker.tokens) and worker.attempt:
            attempt.writes()
            attempt.acknowledged(1)
        return attempt.may_leave

    def worker_steps(case: Any, s: Any, i: int) -> Iterator[Any]:
        yield from original_steps(case, s, i)
        if i >= len(s.done) and left_by(case, s.workers[i]):
            yield "gives up, and sends", i, LEFT, False, on_its_way(model.leave(s, i, "stopped"))

    original_steps = model.worker_steps
    model.acknowledged = acknowledged
    if leaving:
        model.worker_steps = worker_steps


CASES = {
    "one former owner": {"tokens": 2},
    "greedy": {"faults": 2, "sampled": False},
    "two choices": {"choices": 2, "faults": 1},
    "everything in the end": {"workers": 3, "faults": 0, "stream": False},
    "a caller who leaves": {"leaves": True, "faults": 1},
    "a refusal": {"refusals": 1, "faults": 1},
    "a prompt published twice": {"records": 2, "faults": 1},
    "shared reply topic": {"shared": True, "faults": 1},
}


@pytest.mark.shared
@pytest.mark.parametrize("bounds", CASES.values(), ids=CASES)
def test_every_interleaving_keeps_every_token_once(model: ModuleType, bounds: dict[str, Any]):
    """No violation in any reachable state, and from each the owners can finish."""
    use_attempt(model, Attempt)
    assert model.explore(model.Case(**bounds)) > 100


LEFT_CASES = {
    "a former owner": {"tokens": 2, "faults": 1},
    "two former owners": {"workers": 3, "faults": 0},
    "a caller who leaves": {"leaves": True, "faults": 0},
    "a prompt published twice": {"records": 2, "faults": 0},
}


@pytest.mark.shared
@pytest.mark.parametrize("bounds", LEFT_CASES.values(), ids=LEFT_CASES)
def test_left_changes_nothing_in_any_interleaving(model: ModuleType, bounds: dict[str, Any]):
    """It lands before, between and behind the records of the next owner, or never: that one goes on, or finds what else
    there is. Readers that do not know it are right."""
    use_attempt(model, Attempt)
    without = model.explore(model.Case(**bounds))
    use_attempt(model, Attempt, leaving=True)
    assert model.explore(model.Case(**bounds)) > 1.1 * without


class IgnoresGaps(Attempt):
    def acknowledged(self, offset: int | None) -> Verdict:
        verdict = super().acknowledged(offset)
        gap = verdict is Verdict.READ and self.number is not None and self.number != offset
        return self._verdict(Verdict.GO_ON) if gap else verdict


class TrustsItsEnd(Attempt):
    def acknowledged(self, offset: int | None) -> Verdict:
        verdict = super().acknowledged(offset)
        return self._verdict(Verdict.DONE) if "closing" in str(self._phase.value) else verdict


class NeverWaits(Attempt):
    def read(self, log: ReplyLog) -> Verdict:
        return super().read(dataclasses.replace(log, oldest_input=None))


class OverlooksTheEnd(Attempt):
    def read(self, log: ReplyLog) -> Verdict:
        return super().read(dataclasses.replace(log, end=None))


MUTANTS = [
    (IgnoresGaps, {}),
    (TrustsItsEnd, {}),
    (TrustsItsEnd, {"shared": True, "faults": 0}),
    (NeverWaits, {"records": 2, "faults": 0}),
    (OverlooksTheEnd, {"faults": 1}),
]


@pytest.mark.shared
@pytest.mark.parametrize(("mutant", "bounds"), MUTANTS, ids=lambda v: getattr(v, "__name__", ""))
def test_broken_rules_are_caught(model: ModuleType, mutant: type[Attempt], bounds: dict[str, Any]):
    """Each rule that is broken on purpose shows as a violation: the exploration can fail."""
    use_attempt(model, mutant)
    with pytest.raises(model.Violation):
        model.explore(model.Case(**bounds))
