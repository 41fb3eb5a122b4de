"""The writer rule (protocol.md 5) as a pure state machine: one worker's try at one request.

The position in the reply log is the fencing token. A worker tells what happened to its sends (an acknowledged
offset, or None when a send failed or was acknowledged without one) and what it read from the log; the attempt tells
what follows. It knows no Kafka, no clock and no tokens.
"""

from dataclasses import dataclass
from enum import Enum

from schemas.records import InputRef
from schemas.reply_log import ReplyLog


class Verdict(Enum):
    """What the worker does next."""

    GO_ON = "go on"  # the attempt is the current one: write
    READ = "read"  # read the reply log up to the acknowledged offset, then tell `read`
    AGAIN = "again"  # begin a new attempt, if the input record is still ours
    WAIT = "wait"  # an older record of the same request is served: wait for its end, then mark ours done
    DONE = "done"  # an `end` is accepted


class _Phase(Enum):
    NEW = "new"
    BEGINNING = "beginning"  # `begin` is on its way, or its log is being read
    WRITING = "writing"
    CLOSING = "closing"  # `end` is on its way, or its log is being read
    REFUSING = "refusing"  # an `end` without an attempt is on its way
    WAITING = "waiting"  # an older record of the same request is served: at most `left` is still to be written
    OVER = "over"


@dataclass(slots=True)
class Attempt:
    """One attempt. `number` is the offset of its `begin`, None until that is acknowledged.

    Args:
        source: the input record that is served; it decides between two records of one request.
        per_request: whether the reply log belongs to this request alone. Only then do offsets tell about others.
    """

    source: InputRef
    per_request: bool
    number: int | None = None
    read_until: int = -1  # with READ: the offset that must have been read
    _expected: int | None = None
    _phase: _Phase = _Phase.NEW
    _on_its_way: bool = False  # a record is: at most one (rule 3)
    _to_be_read: bool = False  # the log is, before anything else happens
    _begin_only: bool = True  # nothing else of it was sent, acknowledged or not

    def begins(self) -> None:
        """`begin` is sent."""
        self._send(_Phase.NEW, _Phase.BEGINNING)

    def refuses(self) -> None:
        """An `end` with attempt -1 is sent (rule 7)."""
        self._send(_Phase.NEW, _Phase.REFUSING)

    def writes(self) -> None:
        """`tokens` are sent."""
        self._send(_Phase.WRITING, _Phase.WRITING)
        self._begin_only = False

    def ends(self) -> None:
        """`end` is sent."""
        self._send(_Phase.WRITING, _Phase.CLOSING)
        self._begin_only = False

    @property
    def may_leave(self) -> bool:
        """Its `begin` is acknowledged, nothing else of it was sent, and no `end` is known: given up now, it has left
        nothing. On a shared log nobody counts attempts."""
        open_phases = (_Phase.BEGINNING, _Phase.WRITING, _Phase.WAITING)
        return self.per_request and self.number is not None and self._begin_only and self._phase in open_phases

    def leaves(self) -> None:
        """It is given up, and `left` is sent: the last record of it, of which nothing need be known any more."""
        assert self.may_leave, f"left after {self._phase.value}"
        self._phase, self._to_be_read = _Phase.OVER, False

    def acknowledged(self, offset: int | None) -> Verdict:
        """The record on its way landed at `offset`, or failed. Rules 2 to 4, 6 and 7."""
        assert self._on_its_way, "nothing is on its way"
        self._on_its_way = False
        if offset is None or offset < 0:
            return self._verdict(Verdict.AGAIN)
        expected, self._expected, self.read_until = self._expected, offset + 1, offset
        if self._phase is _Phase.BEGINNING:
            self.number = offset
            return self._verdict(Verdict.READ if self.per_request and offset > 0 else Verdict.GO_ON)
        if self._phase is _Phase.REFUSING:
            return self._verdict(Verdict.READ if self.per_request and offset > 0 else Verdict.DONE)
        if self._phase is _Phase.CLOSING:
            return self._verdict(Verdict.DONE if self.per_request and offset == expected else Verdict.READ)
        return self._verdict(Verdict.READ if self.per_request and offset != expected else Verdict.GO_ON)

    def read(self, log: ReplyLog) -> Verdict:
        """The log was read up to `read_until`: a per-request log from its start, a shared one from `number`."""
        assert self._to_be_read, "nothing is to be read"
        if log.ended:
            return self._verdict(Verdict.DONE)
        older = log.oldest_input is not None and log.oldest_input.age_key < self.source.age_key
        current = self.number is not None and log.attempt == self.number
        if current and self._phase is _Phase.WRITING:
            return self._verdict(Verdict.GO_ON)  # only a doubled record, or a late one of a former owner
        if older:
            return self._verdict(Verdict.WAIT)
        return self._verdict(Verdict.GO_ON if current and self._phase is _Phase.BEGINNING else Verdict.AGAIN)

    def _send(self, before: _Phase, after: _Phase) -> None:
        assert self._phase is before, f"{after.value} after {self._phase.value}"
        assert not self._on_its_way, "a record is on its way"
        assert not self._to_be_read, "the log is to be read"
        self._phase, self._on_its_way = after, True

    def _verdict(self, verdict: Verdict) -> Verdict:
        self._to_be_read = verdict is Verdict.READ
        if verdict is Verdict.GO_ON:
            self._phase = _Phase.WRITING
        elif verdict is not Verdict.READ:
            self._phase = _Phase.WAITING if verdict is Verdict.WAIT else _Phase.OVER
        return verdict
