"""What carries a client's calls: reply topics, one reader, one producer, cancels. Knows Kafka; the client does not."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, TopicAuthorizationFailedError

from schemas.codec import DEFAULT_LIMITS, ContentType
from schemas.connection import KafkaConnection
from schemas.errors import RequestError
from schemas.headers import write_request_headers
from schemas.reasons import ErrorCode
from schemas.topics import DEFAULT_LANE_PREFIX, LANES, control_topic, dlq_topic, reply_topic
from service.cancels import CancelPublisher
from service.errors import LaneMissing, NotAuthorized, PublishFailed, StreamClosed
from service.kafka import TopicAdmin, start_producer, stop_producer
from service.reply_reader import ReplyFeed, ReplyReader
from service.reply_topics import ReplyTopicPool
from service.tracing import CallTrace

log = structlog.get_logger(__name__)

_HEADERS_BYTES = 64 * 1024


@dataclass(eq=False, slots=True)
class Call:
    """One request on its way, and what has come back of it."""

    lane: str  # topic
    value: bytes
    content_type: ContentType
    trace: CallTrace
    key: bytes | None = None
    tenant: str | None = None
    priority: int | None = None
    deadline: float | None = None  # seconds after its start
    topic: str | None = None  # of the reply, once leased
    correlation_id: str | None = None
    started_at: float | None = None  # time.monotonic()
    published: bool = False  # or may have been
    left: bool = False
    feed: ReplyFeed = field(default_factory=ReplyFeed)

    @property
    def ttft(self) -> float | None:
        """Seconds from the start of publishing to the first tokens."""
        first = self.feed.first_token_at
        return None if self.started_at is None or first is None else first - self.started_at


class Exchange:
    """Opens calls and takes leave of them. Start and close it once."""

    def __init__(
        self,
        connection: KafkaConnection,
        *,
        lane_prefix: str,
        reply_prefix: str,
        reply_topics: int,
        content_type: ContentType,
    ) -> None:
        self._connection = connection
        self._lane_prefix = lane_prefix
        self._control_topic = control_topic(lane_prefix)
        self._reply_prefix = reply_prefix
        self._reply_template = reply_topic("{correlation_id}", reply_prefix)
        self._content_type = content_type
        self._admin = TopicAdmin(connection)
        self._reader = ReplyReader(connection, self._admin.list)
        self._pool = ReplyTopicPool(
            self._admin,
            prefix=reply_prefix,
            ready=reply_topics,
            watch=self._reader.watch,
            unwatch=self._reader.unwatch,
        )
        self.loop: asyncio.AbstractEventLoop  # this and the next two from the start on
        self._producer: AIOKafkaProducer
        self._cancels: CancelPublisher
        self._lanes: set[str] = set()  # those known to exist
        self._lanes_lock = asyncio.Lock()
        self._calls: set[Call] = set()  # opened and not left
        self._closed = False
        self._resources = AsyncExitStack()

    async def start(self) -> None:
        """Connects and creates the first reply topics. Raises BrokerUnavailable, NotAuthorized and TopicsFailed."""
        self.loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            await self._admin.start()
            stack.push_async_callback(self._admin.close)
            self._producer = await start_producer(
                self._connection,
                linger_ms=0,
                retry_backoff_ms=20,
                max_request_size=DEFAULT_LIMITS.max_value_bytes + _HEADERS_BYTES,
            )
            stack.push_async_callback(stop_producer, self._producer)
            await self._reader.start()
            stack.push_async_callback(self._pool.close)
            stack.push_async_callback(self._reader.close)
            await self._pool.start()
            self._cancels = CancelPublisher(self._producer, self._control_topic, self._content_type)
            stack.push_async_callback(self._cancels.close)
            self._resources = stack.pop_all()

    async def close(self) -> None:
        """Cancels what is open and deletes all reply topics. Streams that wait fail with StreamClosed."""
        self._closed = True
        for call in list(self._calls):
            call.feed.fail(StreamClosed("the client has been closed"))
            self.leave(call)
        await self._resources.aclose()

    async def open(self, call: Call) -> None:
        """Publishes the request, its reply topic being read already. Whatever happens, the caller leaves it later.

        Raises LaneMissing, NotAuthorized, TopicsFailed, BrokerUnavailable, PublishFailed, StreamBroken, StreamClosed,
        and RequestError for a record that is too large.
        """
        if self._closed:
            raise StreamClosed("the client has been closed")
        call.started_at = time.monotonic()
        call.trace.begin()
        self._calls.add(call)
        if call.lane not in self._lanes:
            await self._find_lane(call.lane)
        topic = await self._pool.lease()
        if call.left:  # the client was closed meanwhile
            self._pool.retire(topic, ended=True)
            raise StreamClosed("the client has been closed")
        call.topic = topic
        call.correlation_id = topic.removeprefix(self._reply_prefix)
        self._reader.open(topic, call.feed)
        call.published = True
        try:
            with call.trace.sending(call.lane, call.correlation_id) as sending:
                headers = self._headers(call, topic, sending.headers)
                sending.acknowledged(
                    await self._producer.send_and_wait(call.lane, call.value, key=call.key, headers=headers)
                )
            call.trace.receive(self._reply_template, call.correlation_id)
        except TopicAuthorizationFailedError as error:
            raise NotAuthorized(f"this user may not write to {call.lane}") from error
        except MessageSizeTooLargeError as error:
            size = f"the request has {len(call.value):,} bytes, more than {call.lane} takes (its max.message.bytes)"
            raise RequestError(ErrorCode.INVALID_REQUEST, size) from error
        except KafkaError as error:
            if call.left:
                raise StreamClosed("the client has been closed") from error
            raise PublishFailed(f"the request was not acknowledged by {call.lane}: {error!r}") from error

    def _headers(self, call: Call, topic: str, trace: Mapping[str, str]) -> list[tuple[str, bytes]]:
        assert call.correlation_id is not None
        return write_request_headers(
            correlation_id=call.correlation_id,
            reply_to=topic,
            content_type=call.content_type,
            tenant=call.tenant,
            priority=call.priority,
            deadline_ms=None if call.deadline is None else round((time.time() + call.deadline) * 1000),
            trace=trace.items(),
        )

    def leave(self, call: Call) -> None:
        """Ends a call, opened or not: cancels the request unless it has ended, retires its reply topic. Idempotent."""
        if call.left:
            return
        call.left = True
        self._calls.discard(call)
        call.trace.finish(call.feed.log, call.ttft)
        if call.topic is None or call.correlation_id is None:
            return
        self._reader.release(call.topic)
        unended = call.published and not call.feed.log.ended
        self._pool.retire(call.topic, ended=not unended)
        if unended:
            self._cancels.cancel(call.correlation_id)

    async def _find_lane(self, lane: str) -> None:
        """Raises LaneMissing. Without this, a send would wait for its time-out, or create a lane of the wrong shape."""
        async with self._lanes_lock:
            if lane in self._lanes:
                return
            topics = await self._admin.list()
            if lane not in topics:
                raise LaneMissing(lane_missing(lane, self._lane_prefix, topics))
            self._lanes.add(lane)


def lane_missing(lane: str, prefix: str, topics: Iterable[str]) -> str:
    """What to do about a lane that is not among `topics`: which there are, and what makes another."""
    tier = lane.removeprefix(prefix)
    others = {control_topic(prefix), dlq_topic(prefix)}
    known = sorted(t.removeprefix(prefix) for t in topics if t.startswith(prefix) and t not in others)
    command = "carousel topics create"
    if tier not in LANES:
        command += f" --tier {tier}"
    if prefix != DEFAULT_LANE_PREFIX:
        command += f" --lane-prefix {prefix}"
    served = "" if tier in LANES else f", and a worker with a table [tiers.{tier}] in its --config serves it"
    return (
        f"no lane {tier} (topic {lane}), or none that this user may see. There "
        f"{'are: ' + ', '.join(known) if known else 'is none with this prefix'}. `{command}` makes it{served}"
    )
