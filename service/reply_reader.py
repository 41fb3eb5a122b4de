"""One consumer for all reply logs of a client, and what each stream has received from it.

A consumer per request would cost three times as much on Kafka; one that is assigned every topic of the pool ahead of
need costs a stream nothing at its start. Topics without a stream are paused, so that an idle client fetches nothing.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import Any

import structlog
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError, TopicAuthorizationFailedError

from schemas.connection import KafkaConnection
from schemas.errors import ProtocolError
from schemas.log_consumer import LogConsumer
from schemas.records import ReplyRecord, Tokens, decode_reply
from schemas.reply_log import ReplyLog
from service.errors import ReplyTopicDeleted, ServiceError, StreamBroken
from service.kafka import connect

log = structlog.get_logger(__name__)

_POLL_MS = 100  # how long a poll that finds nothing waits, and so how long closing waits for it
_RETRY_S = 0.1
_DELETED_S = 1.0  # how often topics are looked for that the consumer no longer finds
# Kafka answers a fetch when there is something, the embedded broker only when this time is over. A fetch that waits
# also holds up the first one after a change of the assignment.
_FETCH_MAX_WAIT_MS = 20


class ReplyFeed:
    """One stream's reply log as far as it has been read, and the accepted records that nobody has taken yet.

    Records that wait are coalesced when they are taken: adjacent token records of an attempt become one per choice. So
    a slow consumer holds up nobody, and what waits is never more than the answer, which the log keeps anyway.
    """

    def __init__(self) -> None:
        self.log = ReplyLog()
        self.first_token_at: float | None = None  # time.monotonic()
        self.last_token_at: float | None = None
        self._waiting: deque[ReplyRecord] = deque()
        self._failure: ServiceError | None = None
        self._news = asyncio.Event()

    def accept(self, record: ConsumerRecord) -> None:
        """Applies the reader rule to a record. Raises ProtocolError."""
        decoded = decode_reply(record.headers, record.value)
        accepted = None if decoded is None else self.log.feed(record.offset, decoded, record.headers)
        if accepted is None:
            return
        if isinstance(accepted, Tokens):
            self.last_token_at = time.monotonic()
            self.first_token_at = self.first_token_at or self.last_token_at
        self._waiting.append(accepted)
        self._news.set()

    def fail(self, failure: ServiceError) -> None:
        """No further records come; those that wait can still be taken. The first failure counts."""
        self._failure = self._failure or failure
        self._news.set()

    async def take(self) -> ReplyRecord:
        """The next record, coalesced; when none is left, raises the failure. Nothing comes after the end."""
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        if len(self._waiting) > 1 and isinstance(self._waiting[0], Tokens):
            self._coalesce()
        return self._waiting.popleft()

    def _coalesce(self) -> None:
        by_choice: dict[int, list[Tokens]] = {}
        while self._waiting and isinstance(record := self._waiting[0], Tokens):
            by_choice.setdefault(record.choice, []).append(record)
            self._waiting.popleft()
        self._waiting.extendleft(_joined(records) for records in reversed(by_choice.values()))


def _joined(records: Sequence[Tokens]) -> Tokens:
    first = records[0]
    return Tokens(
        attempt=first.attempt,
        choice=first.choice,
        position=first.position,
        token_ids=tuple(token_id for record in records for token_id in record.token_ids),
        text="".join(record.text for record in records),
        logprobs=None
        if first.logprobs is None
        else tuple(logprob for record in records for logprob in record.logprobs or ()),
    )


class ReplyReader:
    """Reads partition 0 of every watched topic and feeds the stream that has it open.

    `list_topics` names all topics that exist.
    """

    def __init__(self, connection: KafkaConnection, list_topics: Callable[[], Awaitable[Container[str]]]) -> None:
        self._connection = connection
        self._list_topics = list_topics
        self._consumer: Any = None
        self._offsets: dict[str, int] = {}  # watched topic -> next offset; changing the assignment loses the consumer's
        self._feeds: dict[str, ReplyFeed] = {}  # open topic -> its stream
        self._failure: ServiceError | None = None
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._noticing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connects. Raises BrokerUnavailable."""
        self._consumer = LogConsumer(
            **self._connection.client_options(),
            enable_auto_commit=False,
            auto_offset_reset="none",  # a log that no longer has the next record is an error, not a new beginning
            fetch_max_wait_ms=_FETCH_MAX_WAIT_MS,
        )
        try:
            await connect(self._consumer, self._connection)
        except BaseException:
            await self._consumer.stop()
            raise

    async def close(self) -> None:
        """Stops reading; open streams fail with StreamBroken unless they have ended or failed before."""
        self._closing = True
        if self._noticing is not None:
            self._noticing.cancel()
            await asyncio.wait([self._noticing])
        if self._task is not None:
            await self._task
        if self._consumer is not None:
            await self._consumer.stop()

    def watch(self, topics: Sequence[str]) -> None:
        """Reads these new topics from offset 0, once they are opened."""
        self._offsets.update(dict.fromkeys(topics, 0))
        self._assign()
        if self._task is None:  # a poll without an assignment would never return
            self._task = asyncio.create_task(self._run(), name="reply reader")
            self._noticing = asyncio.create_task(self._notice_deletions(), name="reply topics: deleted by others")

    def unwatch(self, topics: Sequence[str]) -> None:
        """Forgets topics, which are to be deleted."""
        for topic in topics:
            self._offsets.pop(topic, None)
        if self._offsets:  # without any, a client asks for the metadata of all topics; so the last ones stay, paused
            self._assign()

    def open(self, topic: str, feed: ReplyFeed) -> None:
        """Feeds a watched topic's records to `feed` from now on. Raises StreamBroken when the reader has died."""
        if self._failure is not None:
            raise self._failure
        assert topic in self._offsets, f"{topic} is not watched"
        self._feeds[topic] = feed
        self._consumer.resume(TopicPartition(topic, 0))

    def release(self, topic: str) -> None:
        """Reads an open topic no further."""
        if self._feeds.pop(topic, None) is not None and topic in self._offsets:
            self._consumer.pause(TopicPartition(topic, 0))

    def _assign(self) -> None:
        # All of it before the consumer's own tasks run again: they find positions and pauses in place.
        partitions = [TopicPartition(topic, 0) for topic in self._offsets]
        self._consumer.assign(partitions)
        for partition in partitions:
            self._consumer.seek(partition, self._offsets[partition.topic])
        self._consumer.pause(*(partition for partition in partitions if partition.topic not in self._feeds))

    async def _run(self) -> None:
        """Polls until closing. A poll is never cancelled: aiokafka may lose what it has fetched."""
        try:
            while not self._closing:
                for partition, records in (await self._poll()).items():
                    self._deliver(partition.topic, records)
                if self._consumer.has_died:
                    break
        except Exception as error:
            self._fail(StreamBroken(f"the reply reader has died: {error!r}"))
            log.exception("reply_reader_died")
        else:
            self._fail(StreamBroken("the reply reader has stopped"))

    def _fail(self, failure: ServiceError) -> None:
        self._failure = failure
        for feed in self._feeds.values():
            feed.fail(failure)

    async def _notice_deletions(self) -> None:
        """A consumer of a topic that somebody else has deleted is silent for ever: tell who waits for it."""
        suspects: set[str] = set()
        while True:
            await asyncio.sleep(_DELETED_S)
            unknown = {topic for topic in self._feeds if self._consumer.partitions_for_topic(topic) is None}
            if unknown & suspects:
                try:
                    existing = await self._list_topics()
                except ServiceError:
                    continue  # the cluster is away, which says nothing
                for topic in sorted(unknown & suspects):
                    if topic not in existing:
                        self._break(topic, "somebody else has deleted it", ReplyTopicDeleted)
                        self.unwatch([topic])
            suspects = unknown

    async def _poll(self) -> dict[TopicPartition, list[ConsumerRecord]]:
        try:
            batches: dict[TopicPartition, list[ConsumerRecord]] = await self._consumer.getmany(timeout_ms=_POLL_MS)
        except OffsetOutOfRangeError as error:
            for partition in error.args[0]:
                self._break(partition.topic, "its log has been truncated or created again")
        except TopicAuthorizationFailedError as error:
            self._break(str(error.args[0]), "not authorised to read it")
        except KafkaError as error:
            if not error.retriable:
                raise
            await asyncio.sleep(_RETRY_S)
        else:
            return batches
        return {}

    def _deliver(self, topic: str, records: Sequence[ConsumerRecord]) -> None:
        if topic not in self._offsets:  # no longer watched
            return
        self._offsets[topic] = records[-1].offset + 1
        feed = self._feeds.get(topic)
        if feed is None:
            return
        try:
            for record in records:
                feed.accept(record)
        except ProtocolError as error:
            self._break(topic, str(error))

    def _break(self, topic: str, reason: str, failure: type[StreamBroken] = StreamBroken) -> None:
        feed = self._feeds.get(topic)
        self.release(topic)
        if feed is not None:
            feed.fail(failure(f"reply topic {topic}: {reason}"))
