"""The dead-letter topic for operators: what is on it, one record in full, and back to its lane."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError

from schemas.codec import ContentType, decode_map
from schemas.connection import KafkaConnection
from schemas.dead_letters import CUT_HEADERS, CUT_KEY, CUT_VALUE, DEAD_LETTER_HEADERS
from schemas.errors import DecodeError
from schemas.headers import CORRELATION_ID_NAMES
from schemas.null_value import NULL, serialised
from schemas.topics import control_topic, dlq_topic
from service.errors import LaneMissing, PublishFailed, ServiceError
from service.kafka import start_producer, stop_producer
from service.topic_reader import TopicReader

MAX_LETTERS = 100_000  # of a partition that are looked through, the last ones
_PARTS = {CUT_VALUE: "value", CUT_KEY: "key", CUT_HEADERS: "headers"}


class NoSuchDeadLetter(ServiceError):
    """There is no record at that position of the dead-letter topic, any more or yet."""


class NotRedrivable(ServiceError):
    """The record cannot go back to where it came from. The message says why."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where a dead letter is: PARTITION:OFFSET."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> "Position":
        """Reads PARTITION:OFFSET, or OFFSET in partition 0. Raises ValueError that says so."""
        partition, colon, offset = text.rpartition(":")
        if not (offset.isdecimal() and (partition.isdecimal() if colon else not partition)):
            raise ValueError(f"{text!r} is no position: give PARTITION:OFFSET, for example 0:17")
        return cls(int(partition or 0), int(offset))


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record of the dead-letter topic. `headers`: all of them; a worker's own come last."""

    position: Position
    at_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]

    def header(self, name: str) -> bytes | None:
        return dict(self.headers).get(name)

    def text(self, name: str) -> str:
        return (self.header(name) or b"").decode(errors="replace")

    @property
    def source(self) -> str:
        """Where it came from, TOPIC/PARTITION:OFFSET."""
        partition, offset = (_number(self.header(f"kafka_dlt-original-{name}")) for name in ("partition", "offset"))
        return f"{self.text('kafka_dlt-original-topic')}/{partition}:{offset}"

    @property
    def correlation_id(self) -> str:
        """As the caller gave it, under whatever name; "" when it gave none."""
        return next((self.text(name) for name in CORRELATION_ID_NAMES if self.header(name) is not None), "")

    @property
    def original_headers(self) -> list[tuple[str, bytes | None]]:
        """What the producer wrote: everything before the worker's headers."""
        return list(self.headers[: self._num_original])

    @property
    def cut(self) -> dict[str, str]:
        """What of the record did not fit, and is not all here: part -> how many bytes it had."""
        ours = self.headers[self._num_original :]
        return {_PARTS[name]: (value or b"").decode(errors="replace") for name, value in ours if name in _PARTS}

    @property
    def _num_original(self) -> int:
        names = [name for name, _ in self.headers]
        begins = DEAD_LETTER_HEADERS[0]  # the last one: the producer may have written what is called so, too
        return len(names) - names[::-1].index(begins) - 1 if begins in names else len(names)

    def to_fields(self) -> dict[str, Any]:
        return {
            "position": str(self.position),
            "at_ms": self.at_ms,
            "reason": self.text("dlq_reason"),
            "message": self.text("dlq_message"),
            "source": self.source,
            "correlation_id": self.correlation_id,
            "bytes": len(self.value or b""),
        }

    def body(self) -> dict[str, object] | None:
        """The value's map, or None when it cannot be decoded."""
        for content_type in (self.text("content-type"), *ContentType):
            try:
                return decode_map(self.value, ContentType(content_type))
            except (DecodeError, ValueError):
                continue
        return None


async def list_dead_letters(
    connection: KafkaConnection, *, lane_prefix: str, limit: int, reason: str | None = None
) -> list[DeadLetter]:
    """The newest ones, or the newest with `reason`; newest last. Raises LaneMissing, BrokerUnavailable, ..."""
    depth = limit if reason is None else MAX_LETTERS
    newest: dict[int, deque[DeadLetter]] = defaultdict(lambda: deque(maxlen=limit))
    async with TopicReader(connection) as reader:
        bounds = await _bounds(reader, connection, lane_prefix)
        ranges = {partition: (max(begin, end - depth), end) for partition, (begin, end) in bounds.items()}
        async for record in reader.records(ranges):
            letter = _dead_letter(record)
            if reason is None or letter.text("dlq_reason") == reason:
                newest[record.partition].append(letter)
    found = [letter for letters in newest.values() for letter in letters]
    return sorted(found, key=lambda each: (each.at_ms, each.position))[-limit:]


async def read_dead_letters(
    connection: KafkaConnection, positions: Sequence[Position], *, lane_prefix: str
) -> list[DeadLetter]:
    """The records at these positions. Raises NoSuchDeadLetter, LaneMissing, BrokerUnavailable, NotAuthorized."""
    async with TopicReader(connection) as reader:
        bounds = await _bounds(reader, connection, lane_prefix)
        found: list[DeadLetter] = []
        for position in positions:
            partition = TopicPartition(dlq_topic(lane_prefix), position.partition)
            begin, end = bounds.get(partition, (0, 0))
            ranges = {partition: (position.offset, position.offset + 1)} if begin <= position.offset < end else {}
            records = [record async for record in reader.records(ranges)]
            if not records:
                raise NoSuchDeadLetter(
                    f"nothing at {position} of {partition.topic}; partition {position.partition} has {begin} to "
                    f"{end - 1}. `carousel dlq list` shows what is there"
                    if begin < end
                    else f"nothing at {position} of {partition.topic}: that partition is empty"
                )
            found += map(_dead_letter, records)
    return found


async def redrive(
    connection: KafkaConnection,
    letters: Sequence[DeadLetter],
    *,
    lane_prefix: str,
    dry: bool = False,
    skip: bool = False,
) -> dict[Position, NotRedrivable]:
    """Publishes records again where they came from, with the key, value and headers that they had, byte for byte.

    Raises NotRedrivable, before anything is published, and PublishFailed, BrokerUnavailable, NotAuthorized.

    Args:
        dry: only see whether it could.
        skip: what cannot go back stays, is in the result with the reason, and does not hold up the others.
    """
    async with TopicReader(connection) as reader:
        topics = set(await reader.topics())
    skipped: dict[Position, NotRedrivable] = {}
    for letter in letters:
        try:
            _check_redrivable(letter, topics, lane_prefix)
        except NotRedrivable as why:
            if not skip:
                raise
            skipped[letter.position] = why
    going = [letter for letter in letters if letter.position not in skipped]
    if dry or not going:
        return skipped
    options = {"linger_ms": 0, "max_request_size": 16 * 2**20, "request_timeout_ms": 10_000}
    producer = await start_producer(connection, value_serializer=serialised, **options)
    try:
        for letter in going:
            await _publish(producer, letter)
    finally:
        await stop_producer(producer)
    return skipped


def _check_redrivable(letter: DeadLetter, topics: set[str], lane_prefix: str) -> None:
    topic = letter.text("kafka_dlt-original-topic")
    others = {control_topic(lane_prefix), dlq_topic(lane_prefix)}
    if not topic.startswith(lane_prefix) or topic in others:
        raise NotRedrivable(f"{letter.position} did not come from a lane {lane_prefix}*, but from {topic or 'nowhere'}")
    if topic not in topics:
        raise NotRedrivable(f"{letter.position} came from {topic}, which does not exist any more")
    if letter.cut:
        parts = ", ".join(f"its {part} had {num_bytes} bytes" for part, num_bytes in letter.cut.items())
        raise NotRedrivable(f"{letter.position} did not fit on the dead-letter topic, and is not all there: {parts}")
    if letter.key is None and letter.value is None and not letter.original_headers:
        raise NotRedrivable(f"{letter.position} holds nothing: the record was empty, or could not even be read")


async def _publish(producer: AIOKafkaProducer, letter: DeadLetter) -> None:
    topic = letter.text("kafka_dlt-original-topic")
    try:
        value = NULL if letter.value is None else letter.value
        await producer.send_and_wait(topic, value, key=letter.key, headers=letter.original_headers)
    except KafkaError as error:
        raise PublishFailed(f"{topic} did not take {letter.position}: {error!r}") from error


async def _bounds(
    reader: TopicReader, connection: KafkaConnection, lane_prefix: str
) -> dict[TopicPartition, tuple[int, int]]:
    topic = dlq_topic(lane_prefix)
    topics = await reader.topics()
    if topic not in topics:
        raise LaneMissing(f"no topic {topic} at {connection.bootstrap}; --lane-prefix, or `carousel topics create`")
    return await reader.bounds(topics[topic])


def _dead_letter(record: ConsumerRecord[bytes | None, bytes | None]) -> DeadLetter:
    headers = tuple((name, value) for name, value in record.headers)
    return DeadLetter(Position(record.partition, record.offset), record.timestamp, record.key, record.value, headers)


def _number(raw: bytes | None) -> str:
    return "?" if raw is None else str(int.from_bytes(raw, signed=True))
