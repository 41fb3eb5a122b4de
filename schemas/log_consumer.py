"""aiokafka's consumer, made to read whatever lies in a log. Knows the internals of aiokafka 0.14.

As it is, one record that it cannot read stops a consumer for good, takes the records of other partitions with it that
the same poll would have returned, and decompresses without a bound. Anybody who may write to a topic can write such a
record. Here it is a record without key, value and headers, and everything else is read (schemas.record_batches).

It also knows where a log ends on the embedded broker, which says so wrongly when it is asked the usual way.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.consumer import fetcher
from aiokafka.errors import KafkaTimeoutError, OffsetOutOfRangeError, UnknownTopicOrPartitionError, for_code
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.default_records import DefaultRecordBatch

from schemas.record_batches import BadBatch, Batch, frames

MAX_POLL_RECORDS = 32  # a poll holds at most so many records, and with them at most so many batches' worth of bytes
# What the embedded broker is asked with: it leaves out of its answer what it did not come to in the first time.
_END_WAITS_MS = (50, 200, 1000)

log = structlog.get_logger(__name__)


class _Batch(Batch):
    """What aiokafka makes records of."""

    _intact = True

    def validate_crc(self) -> bool:
        self._intact = DefaultRecordBatch(self._frame).validate_crc()
        return True  # else aiokafka would raise, and read no further

    def decompressed(self) -> bytes:
        if not self._intact:
            raise BadBatch("the checksum is wrong")
        return super().decompressed()

    def __iter__(self) -> Iterator[Any]:
        offset = self.base_offset
        try:
            frame = self.decompressed()
            try:
                for record in DefaultRecordBatch(frame):
                    yield record
                    offset = record.offset + 1
            except Exception:  # ours is slower, and reads more
                for record in self.records(frame, offset):
                    yield record
                    offset = record.offset + 1
        except BadBatch as e:
            log.warning("kafka.unreadable_records", first=offset, last=self.next_offset - 1, error=str(e))
            yield from self.unreadable(offset)


class _Records:
    """In place of aiokafka's MemoryRecords."""

    def __init__(self, data: bytes) -> None:
        self._size = len(data)
        self._frames = frames(data)
        self._next = next(self._frames, None)

    def size_in_bytes(self) -> int:
        return self._size

    def has_next(self) -> bool:
        return self._next is not None

    def next_batch(self) -> _Batch:
        assert self._next is not None
        frame, self._next = self._next, next(self._frames, None)
        return _Batch(frame)


_original = fetcher.Fetcher._proc_fetch_request
_proc_fetch_request = FunctionType(
    _original.__code__, vars(fetcher) | {"MemoryRecords": _Records}, closure=_original.__closure__
)


class LogConsumer(AIOKafkaConsumer):  # type: ignore[misc]  # aiokafka is untyped
    """An AIOKafkaConsumer whose polls never fail because of what is in a record."""

    def __init__(self, *topics: str, **options: Any) -> None:
        self._own_fetcher: Any = None
        super().__init__(*topics, **({"max_poll_records": MAX_POLL_RECORDS} | options))

    @property
    def _fetcher(self) -> Any:
        return self._own_fetcher

    @_fetcher.setter
    def _fetcher(self, new: Any) -> None:
        if new is not None:
            new._proc_fetch_request = MethodType(_proc_fetch_request, new)
        self._own_fetcher = new

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """partition -> the offset that its next record will get.

        The embedded broker tells the first offset of the last batch + 1 instead, and its timestamp. Kafka tells no
        timestamp with an end, so that nothing more is asked of it.
        """
        latest = dict.fromkeys(partitions, fetcher.OffsetResetStrategy.LATEST)
        told = await self._fetcher._retrieve_offsets(latest, self._request_timeout_ms)
        ends = {partition: offset for partition, (offset, _) in told.items()}
        short = {p: ends[p] for p, (_, timestamp) in told.items() if timestamp is not None and timestamp >= 0}
        return ends | await self._high_watermarks(short) if short else ends

    async def _high_watermarks(self, ends: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        """As fetches of the last batches tell. The consumer's own assignment stays out of it."""
        found: dict[TopicPartition, int] = {}
        for wait_ms in _END_WAITS_MS:
            by_node: dict[int, dict[str, list[tuple[int, int, int]]]] = defaultdict(lambda: defaultdict(list))
            for partition in ends.keys() - found.keys():
                node = self._client.cluster.leader_for_partition(partition)
                by_node[node][partition.topic].append((partition.partition, max(0, ends[partition] - 1), 1))
            for node, topics in by_node.items():
                request = FetchRequest(wait_ms, 0, 2**20, 0, list(topics.items()))
                response = await self._client.send(node, request)
                for topic, answers in response.topics:
                    for number, error, high_watermark, *_ in answers:
                        partition = TopicPartition(topic, number)
                        found[partition] = _end(partition, error, high_watermark, ends[partition])
            if found.keys() >= ends.keys():
                return found
        raise KafkaTimeoutError(f"the broker does not tell where these end: {sorted(ends.keys() - found.keys())}")

    @property
    def has_died(self) -> bool:
        """Whether a task has ended that it cannot work without. aiokafka tells nobody: polls go on, finding nothing."""
        if self._fetcher is None:
            return False
        coordination = getattr(self._coordinator, "_coordination_task", None)  # without a group there is none
        return bool(self._fetcher._fetch_task.done() or (coordination is not None and coordination.done()))


def _end(partition: TopicPartition, error: int, high_watermark: int, told: int) -> int:
    if error in (OffsetOutOfRangeError.errno, UnknownTopicOrPartitionError.errno):
        return told  # its last batch, or all of it, has been deleted since
    if error:
        raise for_code(error)(partition)
    return max(high_watermark, told)
