"""Reads the control topic: every worker reads all of it, from `cancel_ttl` ago on (protocol.md 1 and 7)."""

import asyncio
import time
from collections.abc import Callable

import structlog
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError, KafkaError

from schemas.errors import RequestError
from schemas.log_consumer import LogConsumer
from schemas.records import Cancel, decode_control
from schemas.topics import CANCEL_TTL_MS
from worker.transport.kafka_connections import FETCH_MAX_WAIT_MS, KafkaConnections

POLL_MS = 200
RETRY_S = 0.5
log = structlog.get_logger(__name__)


class KafkaControl:
    """Hands each cancel to `cancelled`, also those that were published before this worker started."""

    def __init__(self, connections: KafkaConnections, topic: str, cancelled: Callable[[Cancel], None]) -> None:
        self._connections = connections
        self._topic = topic
        self._cancelled = cancelled
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    async def run(self) -> None:
        """Reads until `stop`. Whatever goes wrong, it begins again: a cancel that is read twice does no harm."""
        while not self._stopping:
            try:
                await self._read()
            except KafkaError as e:
                log.warning("control.interrupted", error=repr(e))
                await asyncio.sleep(RETRY_S)

    async def _read(self) -> None:
        consumer = self._connections.consumer(fetch_max_wait_ms=FETCH_MAX_WAIT_MS)
        try:
            await consumer.start()
            count = await self._connections.partitions_of(self._topic)
            partitions = [TopicPartition(self._topic, p) for p in range(count)]
            consumer.assign(partitions)
            await self._seek_to_start(consumer, partitions)
            while not self._stopping:
                await self._poll(consumer)
                if consumer.has_died:
                    raise KafkaConnectionError("the consumer of the control topic has died")
        finally:
            await consumer.stop()

    async def _seek_to_start(self, consumer: LogConsumer, partitions: list[TopicPartition]) -> None:
        since = int(time.time() * 1000) - CANCEL_TTL_MS
        starts = await consumer.offsets_for_times(dict.fromkeys(partitions, since))
        ends = await consumer.end_offsets(partitions)
        for partition in partitions:
            start = starts.get(partition)
            consumer.seek(partition, ends[partition] if start is None else start.offset)

    async def _poll(self, consumer: LogConsumer) -> None:
        batch = await consumer.getmany(timeout_ms=POLL_MS)
        for record in (r for records in batch.values() for r in records):
            if record.timestamp + CANCEL_TTL_MS < time.time() * 1000:
                continue
            try:
                cancel = decode_control(record.headers, record.value)
            except RequestError as e:
                log.warning("control.undecodable", offset=record.offset, error=str(e))
                continue
            if cancel is not None:
                self._cancelled(cancel)
