"""aiokafka's consumer, made to read whatever lies in a log. Knows the internals of aiokafka 0.14.

As it is, one record that it cannot read stops a consumer for good, takes the records of other partitions with it that
the same poll would have returned, and decompresses without a bound. Anybody who may write to a topic can write such a
record. Here it is a record without key, value and headers, and everything else is read (schemas.record_batches).
"""

from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka.consumer import fetcher
from aiokafka.record.default_records import DefaultRecordBatch

from schemas.record_batches import BadBatch, Batch, frames

MAX_POLL_RECORDS = 32  # a poll holds at most so many records, and with them at most so many batches' worth of bytes

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

    @property
    def has_died(self) -> bool:
        """Whether a task has ended that it cannot work without. aiokafka tells nobody: polls go on, finding nothing."""
        if self._fetcher is None:
            return False
        coordination = getattr(self._coordinator, "_coordination_task", None)  # without a group there is none
        return bool(self._fetcher._fetch_task.done() or (coordination is not None and coordination.done()))
