"""Reply topics, created ahead of need: one per request, each used once, all calls to the cluster coalesced.

A creation costs a round of the controller whatever its size (28 ms on a stock cluster, 90 ms for a thousand topics in
one call), so what is wanted while a call is on its way goes into the next. Deletions wait for a grace period, in which
a worker that still writes comes to its end, and are coalesced as well.
"""

import asyncio
import heapq
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from schemas.topics import REPLY_TOPIC_CONFIG
from service.errors import ServiceError, StreamClosed, TopicsFailed
from service.kafka import TopicAdmin, TopicSpec

log = structlog.get_logger(__name__)

MAX_READY = 64  # demand makes the pool grow up to here; a rate of 500 requests/s needs about this many
_MAX_CREATED_AT_ONCE = 500
_MAX_DELETED_AT_ONCE = 100  # a call takes the embedded broker 4 ms a topic, and creations wait behind it
_UNWATCHED_S = 0.1  # the reader's last metadata request may name a topic, and create it again where that is allowed


class ReplyTopicPool:
    """Hands out reply topics that exist, have a leader and are being read.

    `ready` topics are kept; whenever none is left that number doubles, up to MAX_READY. `watch` is called with new
    topics before they are handed out, `unwatch` before they are deleted. `grace` and `unended_grace` are seconds.
    """

    def __init__(
        self,
        admin: TopicAdmin,
        *,
        prefix: str,
        ready: int,
        watch: Callable[[Sequence[str]], None],
        unwatch: Callable[[Sequence[str]], None],
        grace: float = 2.0,
        unended_grace: float = 10.0,
    ) -> None:
        assert ready >= 1
        self._admin = admin
        self._prefix = prefix
        self._target = ready
        self._watch = watch
        self._unwatch = unwatch
        self._grace = grace
        self._unended_grace = unended_grace
        self._ready: deque[str] = deque()
        self._waiters: deque[asyncio.Future[str]] = deque()
        self._retired: list[tuple[float, str]] = []  # heap of (when it may be deleted, topic)
        self._existing: set[str] = set()  # created, or about to be, and not yet deleted
        self._wanted = asyncio.Event()
        self._retiring = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    async def start(self) -> None:
        """Creates the first topics. Raises NotAuthorized, TopicsFailed and BrokerUnavailable."""
        await self._create(self._target)
        self._tasks = [
            asyncio.create_task(self._keep_ready(), name="reply topics: create"),
            asyncio.create_task(self._delete_retired(), name="reply topics: delete"),
        ]
        self._tasks[0].add_done_callback(lambda _: self._fail_waiters(StreamClosed("no more reply topics")))

    async def lease(self) -> str:
        """A topic for one request. Raises, as `start` does, when none can be created."""
        if any(task.done() for task in self._tasks):
            raise StreamClosed("the client has been closed, or its reply topics are no longer kept")
        if self._ready:
            topic = self._ready.popleft()
            if self._missing():
                self._wanted.set()
            return topic
        self._target = max(self._target, min(2 * self._target, MAX_READY))
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wanted.set()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._ready.appendleft(waiter.result())  # it came in the very moment of the cancellation
            raise

    def retire(self, topic: str, *, ended: bool) -> None:
        """Gives a leased topic back: it is deleted after a grace period, never used again.

        `ended` False: a worker may not have heard of the cancel yet, and has more to write.
        """
        due = time.monotonic() + (self._grace if ended else self._unended_grace)
        heapq.heappush(self._retired, (due, topic))
        self._retiring.set()

    async def close(self, *, patience: float = 3.0) -> None:
        """Deletes every topic, without grace; a call may take `patience` s. The reader must have stopped."""
        self._fail_waiters(StreamClosed("the client has been closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._delete(sorted(self._existing), patience=patience)
        except (ServiceError, TimeoutError) as error:
            log.warning("reply_topics_left", num_topics=len(self._existing), reason=str(error) or "time-out")

    def _missing(self) -> int:
        """How many topics to create now; none while more than half of the target is left and nobody waits."""
        num_waiting = sum(not waiter.done() for waiter in self._waiters)
        if not num_waiting and len(self._ready) > self._target // 2:
            return 0
        return min(num_waiting + self._target - len(self._ready), _MAX_CREATED_AT_ONCE)

    async def _keep_ready(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while (num_missing := self._missing()) > 0:
                try:
                    await self._create(num_missing)
                except Exception as error:  # the next lease tries again
                    self._fail_waiters(error if isinstance(error, ServiceError) else TopicsFailed(repr(error)))
                    log.warning("reply_topics_not_created", reason=repr(error))
                    break

    async def _create(self, num_topics: int) -> None:
        topics = [self._prefix + uuid.uuid4().hex for _ in range(num_topics)]
        self._existing.update(topics)
        try:
            await self._admin.create([TopicSpec(topic, config=REPLY_TOPIC_CONFIG) for topic in topics])
            await self._admin.wait_for_leaders(topics)
        except BaseException:
            for topic in topics:
                self.retire(topic, ended=True)
            raise
        self._watch(topics)
        for topic in topics:
            while self._waiters and self._waiters[0].done():
                self._waiters.popleft()
            if self._waiters:
                self._waiters.popleft().set_result(topic)
            else:
                self._ready.append(topic)

    async def _delete_retired(self) -> None:
        while True:
            self._retiring.clear()
            if not self._retired:
                await self._retiring.wait()
            await asyncio.sleep(self._grace / 2)  # so that more are deleted in the same call
            now = time.monotonic()
            due: list[str] = []
            while self._retired and self._retired[0][0] <= now:
                due.append(heapq.heappop(self._retired)[1])
            if not due:
                continue
            self._unwatch(due)
            await asyncio.sleep(_UNWATCHED_S)
            try:
                await self._delete(due)
            except Exception as error:  # closing tries again
                log.warning("reply_topics_not_deleted", num_topics=len(due), reason=repr(error))

    async def _delete(self, topics: Sequence[str], *, patience: float | None = None) -> None:
        for start in range(0, len(topics), _MAX_DELETED_AT_ONCE):
            batch = topics[start : start + _MAX_DELETED_AT_ONCE]
            async with asyncio.timeout(patience):
                await self._admin.delete(batch)
            self._existing.difference_update(batch)

    def _fail_waiters(self, error: ServiceError) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)
