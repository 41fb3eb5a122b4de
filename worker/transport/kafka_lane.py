"""One lane: a topic, a consumer and a group of its own (design.md 5), so that a full lane never holds up another.

aiokafka 0.14 has traps that lose requests or stop the group (protocol.md 6); what is done about each stands beside
the code. Reading ahead is bounded per partition: what does not fit is not taken, and fetched again later.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import structlog
from aiokafka import ConsumerRebalanceListener, ConsumerRecord, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata

from schemas.log_consumer import LogConsumer
from schemas.records import InputRef
from worker.transport.kafka_connections import KafkaUnavailable
from worker.transport.offset_tracker import OffsetTracker, Seen
from worker.transport.protocols import Delivery

POLL_MS = 200  # getmany is never cancelled (its fetch count would leak): it ends by itself, and we look at `_stopping`
RETRY_S = 0.5
RESUME_SHARE = 0.75  # a paused partition is read on when this much of its room, or less, is taken

CommittedOffsets = Callable[[str, list[TopicPartition]], Awaitable[dict[TopicPartition, OffsetAndMetadata]]]
log = structlog.get_logger(__name__)


class KafkaLane(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """Takes request records in from one lane and commits what is done (a RequestSource).

    Args:
        tier: the lane's name.
        consumer: started by `run`; with a group, auto-commit off, reset to the earliest offset.
        deliver: called with each new record, on the event loop; must not block.
        lost: called with the tier after partitions went elsewhere.
        shared: called after every re-balance: `partitions` and `num_partitions` may be others.
        committed: the group's offsets with their metadata (`KafkaConnections.committed`).
        partitions_of: how many partitions a topic has (`KafkaConnections.partitions_of`).
        num_partitions: how many the lane has now.
        max_outstanding: records per partition that are taken in and not done.
        max_outstanding_bytes: of such records' values, in all partitions.
        joined: called with (group, member id) at every assignment.
        wall_ms: milliseconds, as in the records' timestamps.
    """

    def __init__(
        self,
        tier: str,
        topic: str,
        consumer: LogConsumer,
        *,
        deliver: Callable[[Delivery], None],
        lost: Callable[[str], None],
        shared: Callable[[], None],
        committed: CommittedOffsets,
        partitions_of: Callable[[str], Awaitable[int]],
        num_partitions: int,
        max_outstanding: int,
        max_outstanding_bytes: int,
        commit_interval: float,
        joined: Callable[[str, str], None] = lambda group, member: None,
        wall_ms: Callable[[], float] = lambda: time.time() * 1000,
    ) -> None:
        self.tier = tier
        self.topic = topic
        self._consumer = consumer
        self._deliver = deliver
        self._lost = lost
        self._shared = shared
        self._committed_offsets = committed
        self._partitions_of = partitions_of
        self.num_partitions = num_partitions  # of the topic, as it was at the last re-balance
        self._max_outstanding = max_outstanding
        self._max_outstanding_bytes = max_outstanding_bytes
        self._commit_interval = commit_interval
        self._joined = joined
        self._wall_ms = wall_ms
        self._trackers: dict[TopicPartition, OffsetTracker] = {}
        self._last_commit: dict[TopicPartition, OffsetAndMetadata] = {}
        self._ends: dict[TopicPartition, int] = {}  # where partitions ended when somebody looked
        # Held from revocation to assignment: a commit in between is answered IllegalGeneration, aiokafka then drops
        # its member id, and the group re-balances for ever (research: a trial never settled again).
        self._assignment_gate = asyncio.Lock()
        self._rebalancing = False
        self._assigned = asyncio.Event()
        self._stopping = asyncio.Event()
        self._draining = False
        self._member_id = ""  # under which the partitions were assigned
        self._failure: Exception | None = None  # of an assignment: aiokafka would only log it
        self.polled_at = 0.0  # event loop time of the last poll, whatever came of it

    @property
    def num_outstanding(self) -> int:
        return sum(t.num_outstanding for t in self._trackers.values())

    @property
    def partitions(self) -> list[int]:
        """Those that are assigned here."""
        return [p.partition for p in self._trackers]

    def lags(self) -> dict[int, int]:
        """Records in each partition here that are not taken in, as far as is known. For any thread."""
        return {p.partition: self._lag(p, tracker) for p, tracker in list(self._trackers.items())}

    def unread_ages(self) -> dict[int, float]:
        """Seconds that the next record may have waited, of each partition here that has a lag: at least its age, and at
        most the pause before it more (`Unread`). For any thread."""
        now_ms, trackers = self._wall_ms(), list(self._trackers.items())
        return {p.partition: tracker.unread.age_ms(now_ms) / 1000 for p, tracker in trackers if self._lag(p, tracker)}

    def _lag(self, partition: TopicPartition, tracker: OffsetTracker) -> int:
        try:
            fetched = self._consumer.highwater(partition)
        except (AssertionError, AttributeError, KeyError):  # it went elsewhere just now
            fetched = None
        return max(0, max(fetched or 0, self._ends.get(partition, 0)) - tracker.expected)

    def gaps(self) -> dict[int, int]:
        """Offsets of each partition between what is to be committed and what is expected next. For any thread."""
        return {p.partition: max(0, t.expected - t.position) for p, t in list(self._trackers.items())}

    async def look_for_ends(self) -> None:
        """Asks where the partitions end: one that is paused is not fetched from, so nothing else tells."""
        partitions, asked_ms = list(self._trackers), self._wall_ms()
        if partitions and self._assigned.is_set() and not self._stopping.is_set():
            with contextlib.suppress(KafkaError):
                self._ends = await self._consumer.end_offsets(partitions)
                self._note_lags(asked_ms, {p: t for p, t in self._trackers.items() if p in self._ends})

    def _note_lags(self, asked_ms: float, trackers: dict[TopicPartition, OffsetTracker]) -> None:
        for partition, tracker in trackers.items():
            tracker.unread.looked(asked_ms, self._lag(partition, tracker))

    @property
    def draining(self) -> bool:
        """Whether it was told to end: it takes nothing more in."""
        return self._draining

    @property
    def broken(self) -> bool:
        """Whether nothing will come any more, although nobody has stopped it."""
        return not self._stopping.is_set() and self._consumer.has_died

    @property
    def assigned(self) -> asyncio.Event:
        """Set while partitions are assigned (possibly none)."""
        return self._assigned

    # RequestSource

    def owns(self, delivery: Delivery) -> bool:
        return self._trackers.get(_partition(delivery)) is delivery.tracker

    def done(self, delivery: Delivery) -> None:
        delivery.tracker.done(delivery.source.offset)

    # The consumer's life

    async def run(self) -> None:
        """Consumes until `stop`; leaves the group at the end. Raises KafkaUnavailable when consuming is impossible."""
        self._consumer.subscribe([self.topic], listener=self)
        committer = asyncio.create_task(self._commit_regularly(), name=f"commit {self.topic}")
        committer.add_done_callback(lambda _: self._stopping.set())  # should it fail, nothing is committed any more
        try:
            await self._start()
            await self._poll()
        finally:
            self._stopping.set()
            await committer
            await self._consumer.stop()

    def drain(self) -> None:
        """Takes nothing more in. The group's heartbeats and commits go on until all that was taken in is done; then
        `run` ends, so that another worker has the lane at once."""
        self._draining = True

    def stop(self) -> None:
        """Ends `run` after a last commit."""
        self._draining = True
        self._stopping.set()

    async def discard(self) -> None:
        """Closes the connections of a consumer that could not stop. `run` has ended or been cancelled."""
        await self._consumer._client.close()

    async def _start(self) -> None:
        """Returns when the group has assigned partitions. Raises KafkaUnavailable."""
        try:
            await self._consumer.start()
        except KafkaError as e:
            raise KafkaUnavailable(f"lane {self.tier} cannot be consumed: {e!r}") from e

    async def _poll(self) -> None:
        failing = False
        while not self._stopping.is_set():
            self.polled_at = asyncio.get_running_loop().time()
            if self._failure is not None:  # it would be silent for ever
                raise KafkaUnavailable(f"lane {self.tier} was assigned in vain: {self._failure!r}") from self._failure
            try:
                # Also while everything is paused: without polls the consumer leaves its group.
                batch = await self._consumer.getmany(timeout_ms=POLL_MS)
            except KafkaError as e:
                if not e.retriable:
                    raise KafkaUnavailable(f"lane {self.tier} cannot be consumed any more: {e!r}") from e
                if not failing:
                    log.warning("lane.poll_failed", lane=self.tier, error=repr(e))
                failing = True
                await asyncio.sleep(RETRY_S)
                continue
            failing = False
            # Records of a new assignment can arrive before on_partitions_assigned has ended; they belong to trackers
            # that do not exist yet. Dropping them would look like a hole in the log.
            if not self._assigned.is_set():
                await _first_of(self._assigned, self._stopping)
            for partition, records in batch.items():
                self._take(partition, records)
            self._apply_back_pressure()
            if self._draining and not self.num_outstanding:
                return

    def _take(self, partition: TopicPartition, records: Iterable[ConsumerRecord[Any, Any]]) -> None:
        tracker = self._trackers.get(partition)
        if tracker is None:
            return  # lost in a re-balance; its new owner reads it from the committed offset
        for record in records:
            if self._draining or self._is_full(tracker):
                self._seek(partition, tracker.expected)
                return
            seen = tracker.see(record.offset, _num_bytes(record))
            if seen is Seen.HOLE:
                self._seek(partition, tracker.expected)
                return
            if seen is not Seen.KNOWN:
                tracker.unread.read(record.timestamp, self._wall_ms())
            if seen is Seen.NEW:
                source = InputRef(partition.topic, partition.partition, record.offset, record.timestamp)
                self._deliver(Delivery(self.tier, source, record.key, record.value, record.headers, tracker))

    def _is_full(self, tracker: OffsetTracker, share: float = 1.0) -> bool:
        """Whether `share` of what may be outstanding is."""
        return (
            tracker.num_outstanding >= self._max_outstanding * share
            or sum(t.num_bytes for t in self._trackers.values()) >= self._max_outstanding_bytes * share
            or tracker.is_full
        )

    def _apply_back_pressure(self) -> None:
        """Pauses partitions that are full, and resumes those with a quarter of their room free again."""
        paused = self._consumer.paused()
        for partition, tracker in self._trackers.items():
            if partition not in paused and (self._draining or self._is_full(tracker)):
                self._consumer.pause(partition)
            elif partition in paused and not self._draining and not self._is_full(tracker, RESUME_SHARE):
                self._consumer.resume(partition)

    def _seek(self, partition: TopicPartition, offset: int) -> None:
        try:
            self._consumer.seek(partition, offset)
        except IllegalStateError:
            log.debug("lane.seek_after_revocation", lane=self.tier, partition=partition.partition)

    # Re-balancing. Every re-balance of aiokafka is eager: all partitions are revoked, then assigned anew.

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        self._assigned.clear()
        if not self._rebalancing:  # a join that failed is prepared again
            self._rebalancing = True
            await self._assignment_gate.acquire()  # waits for a commit in flight

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        assigned = sorted(assigned)
        self._joined(self._consumer._group_id, self._consumer._coordinator.member_id)
        try:
            lost = await self._assign(assigned)
        except Exception as e:
            log.exception("lane.not_assigned", lane=self.tier)
            self._failure, lost = e, []
        self._assigned.set()
        self._rebalancing = False
        self._assignment_gate.release()
        if lost:
            self._lost(self.tier)
        self._shared()

    async def _assign(self, assigned: list[TopicPartition]) -> list[TopicPartition]:
        """Partitions that come back keep their tracker, and with it what runs here; others start from the commit. After
        an eviction (another member id) somebody else may have owned them meanwhile. Returns what was lost."""
        member_id = self._consumer._coordinator.member_id
        stayed = member_id == self._member_id
        self._member_id = member_id
        kept = {p: self._trackers[p] for p in assigned if stayed and p in self._trackers}
        new = [p for p in assigned if p not in kept]
        lost = [p for p in self._trackers if p not in kept]
        self._last_commit = {p: c for p, c in self._last_commit.items() if p in kept}
        self._trackers = kept | await self._new_trackers(new)
        await self._count_partitions()
        for partition, tracker in self._trackers.items():
            self._seek(partition, tracker.expected)
        self._apply_back_pressure()  # pauses are lost at every re-balance
        log.info("lane.assigned", lane=self.tier, partitions=len(assigned), new=len(new), lost=len(lost))
        return lost

    async def _count_partitions(self) -> None:
        """Partitions may have been added. Unknown, it is what it was: limits are shared by it, nothing else."""
        try:
            count = await self._partitions_of(self.topic)
        except KafkaError as e:
            log.warning("lane.partitions_unknown", lane=self.tier, error=repr(e))
        else:
            self.num_partitions = max(count, len(self._trackers))

    async def _new_trackers(self, partitions: list[TopicPartition]) -> dict[TopicPartition, OffsetTracker]:
        while partitions and not self._stopping.is_set():
            asked_ms = self._wall_ms()
            try:
                committed = await self._committed_offsets(self._consumer._group_id, partitions)
                begins = await self._consumer.beginning_offsets(partitions)
                ends = await self._consumer.end_offsets(partitions)
            except (KafkaError, OSError) as e:
                # Without the committed offset the partition must not be read: finished requests would run again.
                log.warning("lane.committed_offsets_unknown", lane=self.tier, error=repr(e))
                await _first_of(self._stopping, timeout=RETRY_S)
                continue
            trackers = {p: _tracker(committed.get(p), begins[p], ends[p]) for p in partitions}
            self._last_commit |= {p: OffsetAndMetadata(t.position, t.metadata) for p, t in trackers.items()}
            self._ends = dict(ends)
            self._note_lags(asked_ms, trackers)
            return trackers
        return {}

    # Commits

    async def _commit_regularly(self) -> None:
        while not self._stopping.is_set():
            await _first_of(self._stopping, timeout=self._commit_interval)
            if not self._rebalancing:
                await self._commit()
        if not self._rebalancing:
            await self._commit()  # what was done while the last one was on its way

    async def _commit(self) -> None:
        """Commits the done prefix of each partition and its done map, where they changed."""
        async with self._assignment_gate:
            commits = {}
            for partition, tracker in self._trackers.items():
                commit = OffsetAndMetadata(tracker.position, tracker.metadata)
                if self._last_commit.get(partition) != commit:
                    commits[partition] = commit
            if not commits:
                return
            try:
                await self._consumer.commit(commits)
                self._last_commit |= commits
            except (CommitFailedError, IllegalStateError) as e:
                log.info("lane.commit_after_loss", lane=self.tier, error=repr(e))  # the next owner has them now
            except KafkaError as e:
                log.warning("lane.commit_failed", lane=self.tier, error=repr(e))  # tried again at the next interval


async def _first_of(*events: asyncio.Event, timeout: float | None = None) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _num_bytes(record: ConsumerRecord[Any, Any]) -> int:
    """What a record holds in memory: anything of it may be what is large."""
    headers = sum(len(name) + len(value or b"") for name, value in record.headers)
    return len(record.key or b"") + len(record.value or b"") + headers


def _partition(delivery: Delivery) -> TopicPartition:
    return TopicPartition(delivery.source.topic, delivery.source.partition)


def _tracker(committed: OffsetAndMetadata | None, begin: int, end: int) -> OffsetTracker:
    if committed is None or committed.offset < 0:
        return OffsetTracker(begin, log_end=end)
    return OffsetTracker(max(committed.offset, begin), committed.metadata if committed.offset >= begin else "", end)
