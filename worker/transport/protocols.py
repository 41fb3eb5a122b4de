"""The seams between the worker and Kafka. `kafka_*` modules are the real side, memory.py the deterministic one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from schemas.headers import ReplyAddress
from schemas.records import InputRef, LogRecord
from schemas.reply_log import ReplyLog
from worker.transport.offset_tracker import OffsetTracker

Headers = Sequence[tuple[str, bytes]]


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """One request record, taken in from a lane and not done yet."""

    lane: str  # the tier's name
    source: InputRef
    key: bytes | None
    value: bytes | None
    headers: Headers
    tracker: OffsetTracker  # of the ownership under which it came


class RequestSource(Protocol):
    """Where request records come from, and where they are marked done."""

    def done(self, delivery: Delivery) -> None:
        """Marks a record done for good; it will be committed. Does nothing when its partition has moved on."""
        ...

    def owns(self, delivery: Delivery) -> bool:
        """Whether this worker still owns the record's partition, without an interruption since it took it in."""
        ...


class ReplyTopicGone(Exception):
    """The reply topic does not exist: its caller has gone."""


class ReplyUnauthorised(Exception):
    """This worker may not write, read or see the reply topic."""


class RecordTooLarge(Exception):
    """The broker, or this topic, takes no record of this size. Sending it again cannot help; nothing has landed."""


class ReplySink(Protocol):
    """Reply logs, and the other topics that a worker writes. What is about a reply log may raise ReplyUnauthorised."""

    async def locate(self, address: ReplyAddress) -> ReplyAddress | None:
        """The address with its partition, or None when the topic does not exist.

        Asks the broker, and never creates the topic. One created a moment ago gets up to 2 s to show.
        """
        ...

    async def send(self, address: ReplyAddress, record: LogRecord, trace: str | None = None) -> int | None:
        """Appends a record to a reply log; returns its acknowledged offset, or None when it may not be there.

        Raises RecordTooLarge, and ReplyTopicGone when the topic is deleted meanwhile.
        """
        ...

    async def read(self, address: ReplyAddress, start: int, until: int | None) -> ReplyLog:
        """Reads this request's records in the reply log, from `start` up to and with `until`, by the reader rule.

        `until` None: up to where the log ends now. Raises ReplyTopicGone, and ProtocolError when the log breaks the
        contract.
        """
        ...

    async def publish(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> bool:
        """Appends a record to a topic that is no reply log (DLQ, usage); False when it may not be there.

        What is too large for the broker loses its first headers, then its key, then the end of its value; a header for
        each (schemas.dead_letters) says how many bytes there were.
        """
        ...

    def forget(self, address: ReplyAddress) -> None:
        """Nothing more will be written to this log: keep no metadata of its topic."""
        ...
