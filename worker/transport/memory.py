"""The transport's seams in memory, deterministic: for tests, and for benchmarks without a broker."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from schemas.headers import ReplyAddress, write_reply_headers
from schemas.records import InputRef, LogRecord, decode_reply, encode_reply, event_of
from schemas.reply_log import ReplyLog
from worker.transport.offset_tracker import OffsetTracker, Seen
from worker.transport.protocols import Delivery, Headers, ReplyTopicGone


class Fate(Enum):
    """What becomes of a record that is sent."""

    LANDS = "lands"
    LOST = "lost"  # it does not land, and the sender is told that it may not have
    UNACKNOWLEDGED = "unacknowledged"  # it lands, but the sender is told that it may not have
    DOUBLED = "doubled"  # a producer's retry: it lands twice, the second is acknowledged


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(slots=True)
class MemoryBroker:
    """Topics as lists of records. `fate` decides about each send (topic, headers)."""

    topics: dict[str, list[list[MemoryRecord]]] = field(default_factory=dict)
    fate: Callable[[str, Headers], Fate] = lambda topic, headers: Fate.LANDS

    def create(self, topic: str, partitions: int = 1) -> None:
        self.topics.setdefault(topic, [[] for _ in range(partitions)])

    def append(self, topic: str, partition: int, record: MemoryRecord) -> int | None:
        """The acknowledged offset, or None."""
        if topic not in self.topics:
            return None
        fate, log = self.fate(topic, record.headers), self.topics[topic][partition]
        if fate is not Fate.LOST:
            log.extend([record] * (2 if fate is Fate.DOUBLED else 1))
        return None if fate in (Fate.LOST, Fate.UNACKNOWLEDGED) else len(log) - 1


class MemorySink:
    """A ReplySink on a MemoryBroker. Sends are acknowledged at once."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    async def locate(self, address: ReplyAddress) -> ReplyAddress | None:
        partitions = self._broker.topics.get(address.topic, [])
        partition = address.partition or 0
        return replace(address, partition=partition) if partition < len(partitions) else None

    async def send(self, address: ReplyAddress, record: LogRecord, trace: str | None = None) -> int | None:
        value = encode_reply(record, address.content_type)
        headers = write_reply_headers(address, event_of(record), trace)
        written = MemoryRecord(address.correlation_id, value, headers)
        return self._broker.append(address.topic, address.partition or 0, written)

    async def publish(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> bool:
        return self._broker.append(topic, 0, MemoryRecord(key, value, headers)) is not None

    async def read(self, address: ReplyAddress, start: int, until: int | None) -> ReplyLog:
        if address.topic not in self._broker.topics:
            raise ReplyTopicGone(address.topic)
        records = self._broker.topics[address.topic][address.partition or 0]
        seen = ReplyLog()
        for offset, record in enumerate(records[: None if until is None else until + 1]):
            if offset >= start and ("correlation_id", address.correlation_id) in record.headers:
                reply = decode_reply(record.headers, record.value)
                if reply is not None:
                    seen.feed(offset, reply, record.headers)
        return seen

    def forget(self, address: ReplyAddress) -> None:
        return


class MemorySource:
    """A RequestSource over one lane's partition on a MemoryBroker, with the tracker of the real one.

    Args:
        wall_ms: of records' timestamps, which are their offsets.
        max_outstanding: records that are taken in and not done.
    """

    partitions = (0,)

    def __init__(
        self,
        broker: MemoryBroker,
        tier: str,
        topic: str,
        wall_ms: Callable[[], float] = lambda: 0.0,
        max_outstanding: int | None = None,
    ) -> None:
        self._broker = broker
        self._tier = tier
        self._topic = topic
        self._wall_ms = wall_ms
        self._max_outstanding = max_outstanding
        self.tracker = OffsetTracker(0)

    def deliveries(self) -> list[Delivery]:
        """The records that have come since the last call."""
        new = []
        for offset, record in enumerate(self._broker.topics[self._topic][0]):
            if self.tracker.num_outstanding == self._max_outstanding:
                break
            seen = self.tracker.see(offset)
            if seen is not Seen.KNOWN:
                self.tracker.unread.read(offset, self._wall_ms())
            if seen is Seen.NEW:
                source = InputRef(self._topic, 0, offset, timestamp_ms=offset)
                new.append(Delivery(self._tier, source, record.key, record.value, record.headers, self.tracker))
        self.tracker.unread.looked(self._wall_ms(), self.lags()[0])
        return new

    def lags(self) -> dict[int, int]:
        """As KafkaLane's."""
        return {0: len(self._broker.topics[self._topic][0]) - self.tracker.expected}

    def gaps(self) -> dict[int, int]:
        """As KafkaLane's."""
        return {0: self.tracker.expected - self.tracker.position}

    def unread_ages(self) -> dict[int, float]:
        """As KafkaLane's."""
        return {0: self.tracker.unread.age_ms(self._wall_ms()) / 1000} if self.lags()[0] else {}

    def lose(self) -> None:
        """The partition goes elsewhere and comes back: what runs is no longer ours."""
        log_end = len(self._broker.topics[self._topic][0])
        self.tracker = OffsetTracker(self.tracker.position, self.tracker.metadata, log_end)

    def owns(self, delivery: Delivery) -> bool:
        return delivery.tracker is self.tracker

    def done(self, delivery: Delivery) -> None:
        delivery.tracker.done(delivery.source.offset)
