"""Lanes of a test's own on the embedded broker, for the operators' commands."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgpack
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.structs import OffsetAndMetadata
from click.testing import Result
from typer.testing import CliRunner

from schemas.codec import ContentType
from schemas.connection import KafkaConnection
from schemas.null_value import NULL, serialised
from schemas.reasons import FinishReason
from schemas.records import Begin, End, InputRef, ReplyRecord, UsageRecord, encode_reply, encode_usage, event_of
from service.cli import app
from service.kafka import TopicAdmin, TopicSpec
from service.topic_reader import TopicReader
from service.topics import create_topics

SOURCE = InputRef("prompts.standard", 2, 7, 1000)


class Cluster:
    """Lanes of a test's own, and records as workers and callers write them. Methods run a loop each."""

    def __init__(self, bootstrap: str) -> None:
        self.connection = KafkaConnection(bootstrap=bootstrap)
        self.name = uuid.uuid4().hex[:8]
        self.lane_prefix = f"l{self.name}."
        self.reply_prefix = f"r{self.name}."
        asyncio.run(self._create())

    async def _create(self) -> None:
        await create_topics(self.connection, lane_prefix=self.lane_prefix, partitions=2)

    def carousel(self, *arguments: str, replies: bool = False) -> Result:
        """Runs the command in this process."""
        where = ["--bootstrap", self.connection.bootstrap, "--lane-prefix", self.lane_prefix]
        if replies:
            where += ["--reply-prefix", self.reply_prefix]
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, *where])

    def create(self, *topics: str, partitions: int = 1) -> None:
        async def main() -> None:
            async with TopicAdmin(self.connection) as admin:
                await admin.create([TopicSpec(topic, partitions) for topic in topics])

        asyncio.run(main())

    def topics(self) -> set[str]:
        async def main() -> set[str]:
            async with TopicAdmin(self.connection) as admin:
                return set(await admin.list())

        return asyncio.run(main())

    def send(self, topic: str, *records: dict[str, Any]) -> None:
        async def main() -> None:
            async with self._producer() as producer:
                for record in records:
                    value = NULL if record["value"] is None else record["value"]
                    await producer.send_and_wait(topic, **record | {"value": value})

        asyncio.run(main())

    def send_batch(self, topic: str, *records: dict[str, Any]) -> None:
        """All in one batch of partition 0: the embedded broker tells its first offset + 1 as the partition's end."""

        async def main() -> None:
            options = {"bootstrap_servers": self.connection.bootstrap, "linger_ms": 500}
            async with AIOKafkaProducer(**options, value_serializer=serialised) as producer:
                sent = [await producer.send(topic, **record, partition=0) for record in records]
                for future in sent:
                    await future

        asyncio.run(main())

    def commit(self, topic: str, partition: int, offset: int, metadata: str) -> None:
        """As a worker of the lane does."""
        asyncio.run(self.committing(topic, partition, offset, metadata))

    async def committing(self, topic: str, partition: int, offset: int, metadata: str) -> None:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.connection.bootstrap, group_id=f"carousel.{topic}", enable_auto_commit=False
        )
        await consumer.start()
        try:
            consumer.assign([TopicPartition(topic, partition)])
            await consumer.commit({TopicPartition(topic, partition): OffsetAndMetadata(offset, metadata)})
        finally:
            await consumer.stop()

    def write_log(self, request_id: str, *records: ReplyRecord, age: float = 0.0, topic: str | None = None) -> str:
        """Creates a reply topic with these records, `age` seconds old."""
        topic = topic or self.reply_prefix + request_id
        self.create(topic)
        at = round((time.time() - age) * 1000)
        self.send(topic, *(self.log_record(request_id, record) | {"timestamp_ms": at} for record in records))
        return topic

    def log_record(self, request_id: str, record: ReplyRecord) -> dict[str, Any]:
        """As a worker writes it into a reply topic."""
        return {
            "value": encode_reply(record, ContentType.MSGPACK),
            "headers": [
                ("correlation_id", request_id.encode()),
                ("event", event_of(record).encode()),
                ("content-type", ContentType.MSGPACK.encode()),
            ],
        }

    @contextlib.asynccontextmanager
    async def _producer(self) -> AsyncIterator[AIOKafkaProducer]:
        producer = AIOKafkaProducer(bootstrap_servers=self.connection.bootstrap, value_serializer=serialised)
        await producer.start()
        try:
            yield producer
        finally:
            await producer.stop()


def begin(worker: str = "w1") -> Begin:
    return Begin(False, worker, "tiny", 3, 7, 0.5, SOURCE)


def end(attempt: int = 0) -> End:
    return End(attempt, FinishReason.STOP)


def request(request_id: str, topic: str, **more: Any) -> dict[str, Any]:
    """A record of a lane, for Cluster.send."""
    pairs = [("correlation_id", request_id.encode()), ("reply_to", topic.encode())]
    return {"value": msgpack.packb({"prompt": "x"}), "headers": pairs} | more


def usage_of(source: InputRef) -> dict[str, Any]:
    """A record of the usage topic, for Cluster.send."""
    record = UsageRecord("acme", "standard", "tiny", b"x", source, FinishReason.STOP, 1, 1, 0, 0.0, 1.0, 1)
    return {"value": encode_usage(record), "headers": [("content-type", ContentType.MSGPACK.encode())]}


def read_lane(cluster: Cluster, topic: str) -> list[Any]:
    async def main() -> list[Any]:
        async with TopicReader(cluster.connection) as reader:
            bounds = await reader.bounds((await reader.topics())[topic])
            return [record async for record in reader.records(bounds)]

    return asyncio.run(main())
