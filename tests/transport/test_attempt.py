"""The writer rule, case by case, and in every interleaving of the protocol's model checker."""

import dataclasses
import importlib
from collections.abc import Iterator
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
    assert attempt.acknowledged(5) is Verdict.GO_ON
    assert attempt.acknowledged(6) is Verdict.GO_ON
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
        assert attempt.acknowledged(2) is Verdict.READ
        assert attempt.read(log) is expected


def test_after_a_gap_the_next_offset_is_expected():
    """Going on after a doubled record, the acknowledged offset plus one is no gap."""
    attempt = writing()
    attempt.acknowledged(2)
    attempt.read(ReplyLog(attempt=0, oldest_input=OURS))
    assert attempt.acknowledged(3) is Verdict.GO_ON


@pytest.mark.parametrize("offset", [None, -1])
def test_a_failed_send_is_like_being_fenced(offset: int | None):
    """A failed send, or an acknowledgement without an offset: begin again."""
    for attempt in (writing(), writing(per_request=False)):
        assert attempt.acknowledged(offset) is Verdict.AGAIN
    ending = writing()
    ending.ends()
    assert ending.acknowledged(offset) is Verdict.AGAIN


def test_on_a_shared_log_offsets_tell_nothing_and_the_end_is_read_back():
    """Records of others lie between ours; whether our end counts is read from our begin on (rule 6)."""
    attempt = writing(per_request=False, number=50)
    assert attempt.acknowledged(90) is Verdict.GO_ON
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
    """An acknowledgement without a send, and a second life, are refused."""
    with pytest.raises(AssertionError):
        Attempt(OURS, per_request=True).acknowledged(0)
    over = writing()
    over.acknowledged(None)
    with pytest.raises(AssertionError):
        over.acknowledged(1)


# In every interleaving: the model checker of the contract with our class in place of its writer.


@pytest.fixture
def model(checks: Path) -> Iterator[ModuleType]:
    module = importlib.import_module("protocol_model")
    original = module.acknowledged
    yield module
    module.acknowledged = original


def use_attempt(model: ModuleType, attempt_class: type[Attempt]) -> None:
    """Lets `attempt_class` decide what the model's workers make of their acknowledgements."""

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
            yield model.leave(s, i, "wait")
        elif verdict is Verdict.AGAIN:
            yield from model.begin_again(s, i)
        elif worker.phase == "begin":
            tokens = ((),) * case.choices if case.shared else ack.tokens
            begun = s.workers[i]._replace(phase="write", attempt=ack.attempt, tokens=tokens)
            yield model.with_workers(s, model.changed(s.workers, i, begun))
        else:
            yield model.with_workers(s, s.workers)

    model.acknowledged = acknowledged


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
