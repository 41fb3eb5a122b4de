"""Reply logs on Kafka (a ReplySink): append, read back, and tell whether their topic exists."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.partitioner import murmur2

from schemas.headers import ReplyAddress, write_reply_headers
from schemas.records import ReplyRecord, decode_reply, encode_reply, event_of
from schemas.reply_log import ReplyLog
from worker.transport.kafka_connections import KafkaConnections
from worker.transport.protocols import Headers, ReplyTopicGone

SHOW_S = 2.0  # a topic created a moment ago may take this long to show on every broker (protocol.md 5.10)
SHOW_POLL_S = 0.1
READ_POLL_MS = 100
EXISTS_EVERY_S = 1.0  # a consumer of a deleted topic is silent for ever, so a reader that gets nothing asks
MAX_READERS = 8
RETRY_S = 0.5

log = structlog.get_logger(__name__)


class KafkaReplies:
    """Writes and reads reply logs. Start and stop it as an async context manager."""

    def __init__(self, connections: KafkaConnections) -> None:
        self._connections = connections
        self._readers: asyncio.Queue[AIOKafkaConsumer | None] = asyncio.Queue()
        for _ in range(MAX_READERS):
            self._readers.put_nowait(None)  # started on first use

    async def close(self) -> None:
        while not self._readers.empty():
            reader = self._readers.get_nowait()
            if reader is not None:
                await reader.stop()

    async def locate(self, address: ReplyAddress) -> ReplyAddress | None:
        loop = asyncio.get_running_loop()
        missing_since = None
        while True:
            try:
                count = await self._connections.partitions_of(address.topic)
                if count > (address.partition or 0):
                    return replace(address, partition=_partition(address, count))
                missing_since = missing_since or loop.time()
                if loop.time() - missing_since >= SHOW_S:
                    return None
            except KafkaError as e:
                missing_since = None
                log.warning("replies.topic_query_failed", error=repr(e))
            await asyncio.sleep(SHOW_POLL_S)

    async def send(self, address: ReplyAddress, record: ReplyRecord, trace: str | None = None) -> int | None:
        return await self._append(
            address.topic,
            address.partition,
            address.correlation_id,
            encode_reply(record, address.content_type),
            write_reply_headers(address, event_of(record), trace),
        )

    async def publish(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> bool:
        return await self._append(topic, None, key, value, headers) is not None

    async def _append(
        self, topic: str, partition: int | None, key: bytes | None, value: bytes | None, headers: Headers
    ) -> int | None:
        try:
            acknowledged = await self._connections.producer.send_and_wait(
                topic, value, key=key, partition=partition, headers=list(headers)
            )
        except KafkaError as e:
            log.info("replies.send_failed", topic=topic, error=repr(e))
            return None
        offset: int = acknowledged.offset
        return offset

    def forget(self, address: ReplyAddress) -> None:
        if address.per_request:
            self._connections.forget_topic(address.topic)

    async def read(self, address: ReplyAddress, start: int, until: int | None) -> ReplyLog:
        while True:
            try:
                return await self._read_once(address, start, until)
            except KafkaError as e:  # passes with time; a missing topic does not, and is told apart
                log.warning("replies.read_failed", topic=address.topic, error=repr(e))
                await asyncio.sleep(RETRY_S)

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
            return await self._read(reader, address, until)

    async def _read(self, reader: AIOKafkaConsumer, address: ReplyAddress, until: int) -> ReplyLog:
        seen, loop = ReplyLog(), asyncio.get_running_loop()
        asked = loop.time()
        while True:
            batch = await reader.getmany(timeout_ms=READ_POLL_MS)
            for record in (r for records in batch.values() for r in records):
                if record.offset > until:
                    return seen
                if dict(record.headers).get("correlation_id") == address.correlation_id:
                    reply = decode_reply(record.headers, record.value)
                    if reply is not None:
                        seen.feed(record.offset, reply)
                if record.offset == until:
                    return seen
            if not batch and loop.time() - asked >= EXISTS_EVERY_S:
                if not await self._connections.partitions_of(address.topic):
                    raise ReplyTopicGone(address.topic)
                asked = loop.time()

    @asynccontextmanager
    async def _reader(self) -> AsyncIterator[AIOKafkaConsumer]:
        reader = await self._readers.get()
        try:
            if reader is None:
                reader = self._connections.consumer(fetch_max_wait_ms=20, check_crcs=False)
                await reader.start()
            yield reader
        finally:
            # No unassign: the next reader assigns its own partition, and nothing is polled until then.
            self._readers.put_nowait(reader)


def _partition(address: ReplyAddress, count: int) -> int:
    """As named, else by key as every Kafka client does it (protocol.md 2)."""
    if address.partition is not None:
        return address.partition
    hashed: int = murmur2(address.correlation_id)
    return (hashed & 0x7FFFFFFF) % count
