"""Reply logs on Kafka (a ReplySink): append, read back, and tell whether their topic exists."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog
from aiokafka import TopicPartition
from aiokafka.errors import (
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
)
from aiokafka.partitioner import murmur2

from schemas.dead_letters import CUT_HEADERS, CUT_KEY, CUT_VALUE
from schemas.headers import ReplyAddress, write_reply_headers
from schemas.log_consumer import LogConsumer
from schemas.null_value import NULL
from schemas.records import LogRecord, decode_reply, encode_reply, event_of
from schemas.reply_log import ReplyLog
from worker.transport.kafka_connections import KafkaConnections, has_died
from worker.transport.protocols import Headers, RecordTooLarge, ReplyTopicGone, ReplyUnauthorised

SHOW_S = 2.0  # a topic created a moment ago may take this long to show on every broker (protocol.md 5.10)
SHOW_POLL_S = 0.1
READ_POLL_MS = 100
EXISTS_EVERY_S = 1.0  # a consumer of a deleted topic is silent for ever, so a reader that gets nothing asks
MAX_READERS = 8
RETRY_S = 0.5
OWN_HEADERS = 16  # that a dead letter has at least when its headers are cut: all of ours
PENDING_S = 2.0  # a send that takes longer is asked about

log = structlog.get_logger(__name__)


class KafkaReplies:
    """Writes and reads reply logs. Start and stop it as an async context manager."""

    def __init__(self, connections: KafkaConnections, max_record_bytes: int) -> None:
        self._connections = connections
        self._max_record_bytes = max_record_bytes
        # In flight, also those that nobody waits for any more: the topic, and since when (event loop time).
        self._sends: dict[asyncio.Task[int | None], tuple[str, float]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._gone: set[str] = set()  # topics with sends that are to end
        self._num_sends: Counter[str] = Counter()  # of them, by topic
        self._ended: set[str] = set()  # topics to forget when nothing is in flight to them
        self._failing: set[str] = set()  # what fails now, and was logged
        self._started: set[LogConsumer] = set()
        self._readers: asyncio.Queue[LogConsumer | None] = asyncio.Queue()
        for _ in range(MAX_READERS):
            self._readers.put_nowait(None)  # started on first use

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(reader.stop() for reader in self._started))

    async def locate(self, address: ReplyAddress) -> ReplyAddress | None:
        loop = asyncio.get_running_loop()
        missing_since = None
        while True:
            try:
                count = await self._connections.partitions_of(address.topic)
                self._failing.discard("topic_query")
                if count > (address.partition or 0):
                    return replace(address, partition=_partition(address, count))
                missing_since = missing_since or loop.time()
                if loop.time() - missing_since >= SHOW_S:
                    return None
            except TopicAuthorizationFailedError as e:
                raise ReplyUnauthorised(address.topic) from e
            except KafkaError as e:
                missing_since = None
                self._log_once("topic_query", address.topic, e)
            await asyncio.sleep(SHOW_POLL_S)

    async def send(self, address: ReplyAddress, record: LogRecord, trace: str | None = None) -> int | None:
        value = encode_reply(record, address.content_type)
        headers = write_reply_headers(address, event_of(record), trace)
        if _size(address.correlation_id, value, headers) > self._max_record_bytes:
            raise RecordTooLarge(f"a record of {len(value)} bytes")
        # A task of its own: whoever waits for it may be cancelled, and the record is on its way all the same.
        sending = self._append(address.topic, address.partition, address.correlation_id, value, headers)
        task = asyncio.create_task(sending, name=f"send to {address.topic}")
        self._sends[task] = address.topic, asyncio.get_running_loop().time()
        task.add_done_callback(self._sent)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._give_up_what_is_gone(), name="pending sends")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by our watch
                raise ReplyTopicGone(address.topic) from None
            raise

    def _sent(self, task: asyncio.Task[int | None]) -> None:
        self._sends.pop(task, None)
        if not task.cancelled():
            task.exception()  # perhaps nobody waits for it any more

    async def _give_up_what_is_gone(self) -> None:
        """Ends sends to topics that were deleted meanwhile: the producer finds out only after its time-out, and holds a
        seat until then. One task for all sends, as most of them take no time."""
        loop = asyncio.get_running_loop()
        while self._sends:
            await asyncio.sleep(PENDING_S / 2)
            late = [(t, topic) for t, (topic, since) in self._sends.items() if loop.time() - since >= PENDING_S]
            for topic in dict.fromkeys(topic for _, topic in late):
                if topic not in self._gone and not await self._still_exists(topic):
                    self._gone.add(topic)
                    self._connections.abandon_topic(topic)
            await asyncio.sleep(PENDING_S / 2)
            for task, topic in late:
                if topic in self._gone:
                    task.cancel()  # nothing, where it has ended by itself

    async def publish(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> bool:
        if _size(None, b"", headers) > self._max_record_bytes:
            num_bytes = sum(len(name.encode()) + len(value or b"") for name, value in headers)
            headers = [*_cut(headers, self._max_record_bytes // 2), _cut_from(CUT_HEADERS, num_bytes)]
        if key is not None and _size(key, b"", headers) > self._max_record_bytes:
            headers, key = [*headers, _cut_from(CUT_KEY, len(key))], None
        room = self._max_record_bytes - _size(key, b"", headers)
        if value is not None and len(value) > room:
            headers = [*headers, _cut_from(CUT_VALUE, len(value))]
            value = value[: max(0, room - 64)]
        try:
            return await self._append(topic, None, key, value, headers) is not None
        except RecordTooLarge as e:  # this topic's limit is below ours: an operator may lift it
            log.warning("replies.publish_too_large", topic=topic, error=str(e))
            return False
        except ReplyUnauthorised as e:
            log.warning("replies.publish_unauthorised", topic=topic, error=str(e))
            return False

    async def _append(
        self, topic: str, partition: int | None, key: bytes | None, value: bytes | None, headers: Headers
    ) -> int | None:
        producer = self._connections.producer
        self._connections.remember_topic(topic)
        self._num_sends[topic] += 1
        self._ended.discard(topic)
        try:
            acknowledged = await producer.send_and_wait(
                topic, NULL if value is None else value, key=key, partition=partition, headers=list(headers)
            )
        except TopicAuthorizationFailedError as e:
            raise ReplyUnauthorised(topic) from e
        except KafkaError as e:
            if topic in self._gone:
                raise ReplyTopicGone(topic) from e
            log.info("replies.send_failed", topic=topic, error=repr(e))
            if isinstance(e, MessageSizeTooLargeError | RecordListTooLargeError):
                # Its caller has made the topic, with a limit of its own. The gap that is left in the producer's
                # sequence shows with the next record, if there is one.
                raise RecordTooLarge(f"a record of {len(value or b'')} bytes was refused") from e
            # After a record that the broker refused for good, an idempotent producer has a gap in its sequence and
            # can write nothing more to that partition.
            if isinstance(e, OutOfOrderSequenceNumber) or has_died(producer):
                await self._connections.replace_producer(producer)
            return None
        finally:
            self._num_sends[topic] -= 1
            if not self._num_sends[topic]:
                del self._num_sends[topic]
                self._gone.discard(topic)
                if topic in self._ended:
                    self._forget(topic)
        offset: int = acknowledged.offset
        return offset

    async def _still_exists(self, topic: str) -> bool:
        try:
            return await self._connections.partitions_of(topic) > 0
        except KafkaError:
            return True  # nobody knows: the broker is away, and the send waits for it

    def forget(self, address: ReplyAddress) -> None:
        if not address.per_request:
            return
        if address.topic in self._num_sends:
            self._ended.add(address.topic)
        else:
            self._forget(address.topic)

    def _forget(self, topic: str) -> None:
        self._ended.discard(topic)
        self._connections.forget_topic(topic)

    async def read(self, address: ReplyAddress, start: int, until: int | None) -> ReplyLog:
        while True:
            try:
                seen = await self._read_once(address, start, until)
            except TopicAuthorizationFailedError as e:
                raise ReplyUnauthorised(address.topic) from e
            except KafkaError as e:  # passes with time; a missing topic does not, and is told apart
                self._log_once("read", address.topic, e)
                await asyncio.sleep(RETRY_S)
            else:
                self._failing.discard("read")
                return seen

    def _log_once(self, what: str, topic: str, error: KafkaError) -> None:
        """A broker that is away fails everything that is tried, many times a second."""
        if what not in self._failing:
            log.warning(f"replies.{what}_failed", topic=topic, error=repr(error))
        self._failing.add(what)

    async def _read_once(self, address: ReplyAddress, start: int, until: int | None) -> ReplyLog:
        partition = TopicPartition(address.topic, address.partition)
        if not await self._connections.partitions_of(address.topic):
            raise ReplyTopicGone(address.topic)
        async with self._reader() as reader:
            if until is None:
                until = (await reader.end_offsets([partition]))[partition] - 1
            if until < start:
                return ReplyLog()
            reader.assign([partition])
            reader.seek(partition, start)
            try:
                return await self._read(reader, address, until)
            finally:
                reader.pause(partition)  # or it goes on asking for a topic that may have been deleted

    async def _read(self, reader: LogConsumer, address: ReplyAddress, until: int) -> ReplyLog:
        seen, loop = ReplyLog(), asyncio.get_running_loop()
        asked = loop.time()
        while True:
            batch = await reader.getmany(timeout_ms=READ_POLL_MS)
            if reader.has_died:
                raise KafkaConnectionError("the reader has died")
            for record in (r for records in batch.values() for r in records):
                if record.offset > until:
                    return seen
                if dict(record.headers).get("correlation_id") == address.correlation_id:
                    reply = decode_reply(record.headers, record.value)
                    if reply is not None:
                        seen.feed(record.offset, reply, record.headers)
                if record.offset == until:
                    return seen
            if not batch and loop.time() - asked >= EXISTS_EVERY_S:
                if not await self._connections.partitions_of(address.topic):
                    raise ReplyTopicGone(address.topic)
                asked = loop.time()

    @asynccontextmanager
    async def _reader(self) -> AsyncIterator[LogConsumer]:
        reader = await self._readers.get()
        try:
            if reader is None:
                reader = await self._start_reader()
            yield reader
        except KafkaError:
            failed, reader = reader, None
            await self._discard(failed)
            raise
        finally:
            # No unassign: the next reader assigns its own partition, and nothing is polled until then.
            self._readers.put_nowait(reader)

    async def _start_reader(self) -> LogConsumer:
        reader = self._connections.consumer(fetch_max_wait_ms=20, check_crcs=False)
        self._started.add(reader)
        try:
            await reader.start()
        except BaseException:
            await self._discard(reader)
            raise
        return reader

    async def _discard(self, reader: LogConsumer | None) -> None:
        if reader is not None:
            self._started.discard(reader)
            await reader.stop()


def _cut(headers: Headers, num_bytes: int) -> list[tuple[str, bytes]]:
    """The last ones, which we added ourselves, with names and values cut so that all fit into `num_bytes`."""
    kept = list(headers[-OWN_HEADERS:])
    each = num_bytes // (8 * len(kept))  # a character of a name has up to four bytes
    return [(name[:each], value and value[:each]) for name, value in kept]


def _cut_from(name: str, num_bytes: int) -> tuple[str, bytes]:
    return name, str(num_bytes).encode()


def _size(key: bytes | None, value: bytes, headers: Headers) -> int:
    """Bytes of a record, and a little more, as the broker counts them."""
    return len(key or b"") + len(value) + sum(len(n.encode()) + len(v or b"") + 8 for n, v in headers) + 128


def _partition(address: ReplyAddress, count: int) -> int:
    """As named, else by key as every Kafka client does it (protocol.md 2)."""
    if address.partition is not None:
        return address.partition
    hashed: int = murmur2(address.correlation_id)
    return (hashed & 0x7FFFFFFF) % count
