"""The callers of the fault campaign: requests of many kinds, always so many in flight, each answer read as it comes.

Requests are written and answers read with plain Kafka clients and the independent reader of ../shared/checks: nothing
here believes the product. A few calls also go through the product's client.
"""

import asyncio
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgpack
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from schemas.connection import KafkaConnection
from schemas.topics import REPLY_TOPIC_CONFIG
from service.kafka import TopicAdmin, TopicSpec, start_producer, stop_producer

LANES = ("interactive", "standard", "batch")
NUM_KINDS = 48
CANCEL_TTL_S = 600
_POLL_MS = 50


@dataclass(frozen=True, slots=True)
class Kind:
    """A request of which an undisturbed run tells the answer."""

    number: int
    body: dict[str, Any]
    shared: bool = False  # answered on a reply topic that many share
    twice: bool = False  # published twice, as a caller's retry does

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream", True))

    @property
    def repeatable(self) -> bool:
        """Whether another run gives the same tokens: without a seed one is drawn."""
        return self.body.get("temperature") == 0 or "seed" in self.body


def kinds(seed: int, number_of_kinds: int = NUM_KINDS, *, shared: bool = False) -> list[Kind]:
    """Greedy and sampled, long and short, one choice and several, streamed and not, on their own and shared topics.

    shared: all on shared topics, each published once.
    """
    rng = random.Random(seed)
    made = []
    for number in range(number_of_kinds):
        body: dict[str, Any] = {
            "prompt": f"Tale {number} " + "word " * rng.randint(0, 30),
            "max_tokens": rng.randint(20, 240),
            "temperature": 0,
            "ignore_eos": True,
        }
        options: dict[str, Any] = {}
        match number % 12:
            case 1:
                body |= {"temperature": 1.0, "seed": number, "top_p": 0.9}
            case 2:
                body |= {"temperature": 0.8, "seed": number, "n": 3, "max_tokens": 60}
            case 3:
                body |= {"logprobs": 2, "max_tokens": 80}
            case 4:
                body |= {"stream": False}
            case 5:
                body |= {"temperature": 1.0}  # the first attempt draws its seed
            case 6:
                options = {"shared": True}
            case 7:
                body |= {"stream": False}
                options = {"shared": True}
            case 8:
                options = {"twice": True}
            case 9:
                body |= {"prompt": "long " * rng.randint(100, 300)}
            case 10:
                body |= {"stop": ["the", "a", "\n"], "ignore_eos": False}
            case 11:
                body |= {"max_token": 3}  # misspelt: an error
        if shared:
            options = {"shared": True}
        made.append(Kind(number, body, **options))
    return made


@dataclass(eq=False, slots=True)
class Sent:
    """One request that was published, and what has been read of its answer."""

    kind: Kind
    lane: str
    topic: str
    correlation_id: bytes
    stream: Any  # reader.Stream, of the live reading
    sent_at: float = 0.0  # Unix time
    deadline: float | None = None  # Unix time
    cancelled_at: float | None = None  # Unix time
    tokens_at: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=4096))  # monotonic, attempt
    fault: str = ""  # what the live reader could not accept

    @property
    def worker(self) -> str | None:
        """Who serves it, as its last `begin` says."""
        return self.stream.begin["worker"] if self.stream.begin else None

    @property
    def over(self) -> bool:
        return self.stream.end is not None or bool(self.fault)


class Traffic:
    """Keeps `in_flight` requests open until `finish`. `new_stream` makes a reader.Stream, `decode` is reader.decode."""

    def __init__(
        self,
        connection: KafkaConnection,
        the_kinds: Sequence[Kind],
        rng: random.Random,
        *,
        new_stream: Callable[[], Any],
        decode: Callable[[Any], Any],
        shared_topics: Sequence[str],
    ) -> None:
        self._connection = connection
        self._kinds = the_kinds
        self._rng = rng
        self._new_stream = new_stream
        self._decode = decode
        self._shared_topics = list(shared_topics)
        self._admin = TopicAdmin(connection, patience=600.0)
        self._producer: AIOKafkaProducer
        self._consumer: Any = None
        self._positions: dict[TopicPartition, int] = {}  # of what is read
        self._by_id: dict[bytes, Sent] = {}
        self._changed = False
        self._reading: asyncio.Task[None] | None = None
        self._closing = False
        self._news = asyncio.Event()
        self.sent: list[Sent] = []
        self.ended_at: dict[bytes, float] = {}  # Unix time, when the accepted end was written
        self.served_until: dict[bytes, float] = {}  # Unix time, when the last accepted tokens were written

    @property
    def open(self) -> list[Sent]:
        return [s for s in self.sent if not s.over]

    async def __aenter__(self) -> Self:
        await self._admin.start()
        self._producer = await start_producer(self._connection, linger_ms=0)
        await self._admin.create([TopicSpec(topic) for topic in self._shared_topics])
        self._positions = {TopicPartition(topic, 0): 0 for topic in self._shared_topics}
        self._consumer = AIOKafkaConsumer(
            **self._connection.client_options(),
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=20,
        )
        await self._consumer.start()
        self._assign()
        self._reading = asyncio.create_task(self._read(), name="live reader")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        if self._reading is not None:
            await self._reading
        await self._consumer.stop()
        await stop_producer(self._producer)
        await self._admin.close()

    # What goes out

    async def publish(self, some: Sequence[Kind], lane: str | None = None, deadline: float | None = None) -> list[Sent]:
        """Publishes requests. `deadline`: seconds from now."""
        batch = []
        for kind in some:
            request_id = uuid.UUID(int=self._rng.getrandbits(128)).hex
            topic = self._rng.choice(self._shared_topics) if kind.shared else f"replies.{request_id}"
            sent = Sent(kind, lane or self._rng.choice(LANES), topic, request_id.encode(), self._new_stream())
            sent.deadline = None if deadline is None else time.time() + deadline
            batch.append(sent)
        new = [s.topic for s in batch if not s.kind.shared]
        if new:
            await self._admin.create([TopicSpec(topic, config=REPLY_TOPIC_CONFIG) for topic in new])
            self._positions |= {TopicPartition(topic, 0): 0 for topic in new}
            self._changed = True
        self._by_id |= {s.correlation_id: s for s in batch}
        await asyncio.gather(*(self._publish(s) for s in batch))
        self.sent += batch
        return batch

    async def _publish(self, sent: Sent, partition: int | None = None) -> None:
        headers = [("correlation_id", sent.correlation_id), ("reply_to", sent.topic.encode())]
        if sent.deadline is not None:
            headers.append(("deadline_ms", str(round(sent.deadline * 1000)).encode()))
        value = msgpack.packb(sent.kind.body)
        sent.sent_at = time.time()
        for _ in range(1 + sent.kind.twice):
            await self._producer.send_and_wait(f"prompts.{sent.lane}", value, partition=partition, headers=headers)

    async def probe(self, partitions: int) -> list[Sent]:
        """A tiny request on every partition of every lane: whoever owns it makes a step."""
        kind = Kind(-1, {"prompt": "x", "max_tokens": 2, "temperature": 0, "ignore_eos": True})
        batch = []
        for lane in LANES:
            for partition in range(partitions):
                request_id = uuid.uuid4().hex
                sent = Sent(kind, lane, f"replies.{request_id}", request_id.encode(), self._new_stream())
                batch.append((sent, partition))
        await self._admin.create([TopicSpec(s.topic, config=REPLY_TOPIC_CONFIG) for s, _ in batch])
        self._positions |= {TopicPartition(s.topic, 0): 0 for s, _ in batch}
        self._changed = True
        self._by_id |= {s.correlation_id: s for s, _ in batch}
        for sent, partition in batch:
            await self._publish(sent, partition)
        return [sent for sent, _ in batch]

    async def cancel(self, sent: Sent) -> None:
        value = msgpack.packb({"op": "cancel", "correlation_id": sent.correlation_id.decode()})
        await self._producer.send_and_wait("prompts.control", value)
        sent.cancelled_at = time.time()

    async def keep(self, in_flight: int, until: asyncio.Event) -> None:
        """Publishes whenever one has ended."""
        while not until.is_set():
            missing = in_flight - len(self.open)
            if missing > 0:
                await self.publish([self._rng.choice(self._kinds) for _ in range(missing)])
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), 0.5)
            except TimeoutError:
                continue
            await asyncio.sleep(0.2)  # so that several are created in one call

    async def until_served(self) -> None:
        """Returns when the cluster creates topics and tells their leaders. Raises BrokerUnavailable."""
        names = [f"served-{uuid.uuid4().hex}"]
        await self._admin.create([TopicSpec(name) for name in names])
        await self._admin.wait_for_leaders(names)
        await self._admin.delete(names)

    async def delete_topics(self) -> None:
        """As a careful caller does at the end."""
        await self._admin.delete([*self._shared_topics, *(s.topic for s in self._by_id.values() if not s.kind.shared)])

    # What comes back

    def _assign(self) -> None:
        self._changed = False
        self._consumer.assign(list(self._positions))
        for partition, offset in self._positions.items():
            self._consumer.seek(partition, offset)

    async def _read(self) -> None:
        while not self._closing:
            if self._changed:
                self._assign()
            try:
                batch = await self._consumer.getmany(timeout_ms=_POLL_MS)
            except KafkaError:
                await asyncio.sleep(0.1)
                continue
            for partition, records in batch.items():
                for record in records:
                    self._feed(record)
                if partition in self._positions:
                    self._positions[partition] = records[-1].offset + 1

    def _feed(self, record: Any) -> None:
        try:
            event, value, headers = self._decode(record)
            sent = self._by_id.get(headers.get("correlation_id"))
            if sent is None or sent.over:
                return
            sent.stream.feed(record.offset, event, value, headers)
        except Exception as error:
            sent = self._by_id.get(dict(record.headers).get("correlation_id", b""))
            if sent is not None:
                sent.fault = repr(error)
            return
        if event == "tokens" and value["attempt"] == sent.stream.attempt:
            sent.tokens_at.append((time.monotonic(), sent.stream.attempt))
            self.served_until[sent.correlation_id] = record.timestamp / 1000
        if sent.over:
            self._news.set()
            self.ended_at[sent.correlation_id] = record.timestamp / 1000
            if not sent.kind.shared and self._positions.pop(TopicPartition(sent.topic, 0), None) is not None:
                self._changed = True
