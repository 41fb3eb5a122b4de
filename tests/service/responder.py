"""Answers requests by protocol.md without a model, so that the client is tested without the worker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from schemas.codec import ContentType, decode_map
from schemas.connection import KafkaConnection
from schemas.headers import read_request_headers
from schemas.records import (
    Begin,
    Cancel,
    End,
    FinishReason,
    InputRef,
    ReplyRecord,
    Timing,
    Tokens,
    Usage,
    decode_control,
    encode_reply,
    event_of,
)
from schemas.topics import LANES
from service.topics import create_topics


@dataclass
class Reply:
    """One request, and the writer's side of its reply log."""

    producer: AIOKafkaProducer
    fields: dict[str, Any]
    headers: dict[str, bytes]
    key: bytes | None
    input: InputRef
    content_type: ContentType
    raw_headers: tuple[tuple[str, bytes], ...] = ()
    trace: str | None = None  # `traceparent` of what is written from now on
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def topic(self) -> str:
        return self.headers["reply_to"].decode()

    async def write(self, record: ReplyRecord) -> int:
        """The offset that the record got."""
        headers = [
            ("correlation_id", self.headers["correlation_id"]),
            ("event", event_of(record).encode()),
            ("content-type", self.content_type.encode()),
            *([] if self.trace is None else [("traceparent", self.trace.encode())]),
        ]
        value = encode_reply(record, self.content_type)
        metadata = await self.producer.send_and_wait(self.topic, value, partition=0, headers=headers)
        return metadata.offset

    async def begin(self, *, restart: bool = False) -> int:
        return await self.write(Begin(restart, "fake", "echo", 3, 7, 0.5, self.input))

    async def tokens(self, attempt: int, position: int, token_ids: list[int], choice: int = 0) -> None:
        text = "".join(chr(token_id) for token_id in token_ids)
        await self.write(Tokens(attempt, choice, position, tuple(token_ids), text))

    async def end(self, attempt: int, num_tokens: int = 0, reason: FinishReason = FinishReason.STOP) -> None:
        await self.write(End(attempt, reason, usage=Usage(3, num_tokens), timing=Timing(0.5, 1.0, 2.0)))
        self.forget()

    def forget(self) -> None:
        """As a worker must: a producer that asks for a deleted topic makes the embedded broker create it again."""
        self.producer.client._topics.discard(self.topic)


Script = Callable[[Reply], Awaitable[None]]


async def echo(reply: Reply) -> None:
    """The prompt's characters as token ids, one record each."""
    attempt = await reply.begin()
    prompt = reply.fields["prompt"]
    for position, character in enumerate(prompt):
        await reply.tokens(attempt, position, [ord(character)])
    await reply.end(attempt, len(prompt))


class Responder:
    """Runs `script` for every request on the lanes of `lane_prefix`; remembers requests and cancels."""

    def __init__(self, connection: KafkaConnection, lane_prefix: str, *, num_partitions: int = 2) -> None:
        self.connection = connection
        self.lane_prefix = lane_prefix
        self.num_partitions = num_partitions
        self.script: Script = echo
        self.replies: list[Reply] = []
        self.cancels: list[bytes] = []
        self._stopping = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Responder"]:
        await create_topics(self.connection, lane_prefix=self.lane_prefix, partitions=self.num_partitions)
        options = self.connection.client_options()
        self._producer = AIOKafkaProducer(**options, retry_backoff_ms=20)
        self._consumer = AIOKafkaConsumer(**options, enable_auto_commit=False, fetch_max_wait_ms=20)
        partitions = [
            TopicPartition(self.lane_prefix + lane, part) for lane in LANES for part in range(self.num_partitions)
        ]
        partitions.append(TopicPartition(self.lane_prefix + "control", 0))
        async with asyncio.TaskGroup() as tasks:
            await self._producer.start()
            await self._consumer.start()
            self._consumer.assign(partitions)
            for partition in partitions:
                self._consumer.seek(partition, 0)
            polling = tasks.create_task(self._poll(tasks))
            try:
                yield self
            finally:
                self._stopping = True
                await polling
                for reply in self.replies:
                    reply.cancelled.set()
        await self._consumer.stop()
        await self._producer.stop()

    async def _poll(self, tasks: asyncio.TaskGroup) -> None:
        while not self._stopping:
            for partition, records in (await self._consumer.getmany(timeout_ms=50)).items():
                for record in records:
                    if partition.topic.endswith("control"):
                        self._cancel(decode_control(record.headers, record.value))
                    else:
                        self._request(record, tasks)

    def _cancel(self, cancel: Cancel | None) -> None:
        assert cancel is not None
        self.cancels.append(cancel.correlation_id)
        for reply in self.replies:
            if reply.headers["correlation_id"] == cancel.correlation_id:
                reply.cancelled.set()

    def _request(self, record: Any, tasks: asyncio.TaskGroup) -> None:
        content_type = read_request_headers(record.headers).content_type
        source = InputRef(record.topic, record.partition, record.offset, record.timestamp)
        fields = decode_map(record.value, content_type)
        reply = Reply(self._producer, fields, dict(record.headers), record.key, source, content_type, record.headers)
        self.replies.append(reply)
        tasks.create_task(self.script(reply))
