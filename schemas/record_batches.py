"""Reads Kafka's record batches (message format v2), whatever is in them, within a bound.

Brokers check the frames of what they take, but not that a header's name is text: aiokafka 0.14 refuses such a record,
and all that stand behind it in its batch. Nor do they bound what a batch is when it is decompressed: a few kilobytes
can be gigabytes. Pure: bytes in, records out. Format: kafka.apache.org/documentation/#recordbatch
"""

import mmap
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cramjam

from schemas.codec import DEFAULT_LIMITS

MAX_BATCH_BYTES = DEFAULT_LIMITS.max_value_bytes + 2**20  # of one batch, decompressed: the largest value, and headers

_PREFIX = struct.Struct(">qi")  # base offset, length of what follows
_HEADER = struct.Struct(">ibIhiqqqhii")  # from the leader's epoch to the number of records
_START = _PREFIX.size + _HEADER.size
_ATTRIBUTES = struct.Struct(">h")
_ATTRIBUTES_AT = _PREFIX.size + struct.calcsize(">ibI")
_MAGIC = 2
_CODEC, _APPEND_TIME, _TRANSACTIONAL, _CONTROL = 0x07, 0x08, 0x10, 0x20  # bits of a batch's attributes
_USUAL_RATIO = 20
_GZIP = 31  # zlib's word for gzip with its header
_XERIAL = b"\x82SNAPPY\x00"  # snappy in blocks, as Java writes it
_XERIAL_START = len(_XERIAL) + 8  # two versions follow


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record as it lies in the log. What is no UTF-8 in a header's name is replaced.

    One that cannot be read has nothing but its place: no key, no value, no headers.
    """

    offset: int
    timestamp: int  # ms
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, Any], ...] = ()  # values: bytes or None
    timestamp_type: int = 0  # 1: the broker's clock
    checksum: None = None


class BadBatch(ValueError):
    """A batch makes no sense, or is larger than the bound."""


def frames(data: bytes) -> Iterator[bytes]:
    """The batches of what a fetch has returned; it may end within one."""
    position = 0
    while position + _PREFIX.size <= len(data):
        end = position + _PREFIX.size + max(0, _PREFIX.unpack_from(data, position)[1])
        if end > len(data):
            return
        yield data[position:end]
        position = end


class Batch:
    """One batch. `next_offset` is the first offset behind it."""

    def __init__(self, frame: bytes) -> None:
        base, _ = _PREFIX.unpack_from(frame)
        fields = _HEADER.unpack_from(frame.ljust(_START, b"\0"), _PREFIX.size)  # older formats are shorter
        _, self._magic, _, attributes, last_delta, self._first_at, self._last_at, producer_id, _, _, number = fields
        self.producer_id: int = producer_id
        self._frame = frame
        self._attributes = attributes
        self._num_records = number
        self.base_offset: int = base
        self.next_offset: int = base + (max(0, last_delta) if self._magic == _MAGIC else 0) + 1
        self.is_control_batch = bool(attributes & _CONTROL) and self._magic == _MAGIC
        self.is_transactional = bool(attributes & _TRANSACTIONAL) and self._magic == _MAGIC

    def decompressed(self) -> bytes:
        """The same batch without compression, its checksum not adapted. Raises BadBatch."""
        if self._magic != _MAGIC:
            raise BadBatch(f"format {self._magic}: only 2 is read")
        codec = self._attributes & _CODEC
        if not codec:
            return self._frame
        if codec not in _CODECS:
            raise BadBatch(f"codec {codec}")
        try:
            payload = _CODECS[codec](self._frame[_START:])
        except BadBatch:
            raise
        except Exception as e:  # each codec has exceptions of its own
            raise BadBatch(f"cannot be decompressed, or not within {MAX_BATCH_BYTES} bytes: {e!r}") from e
        frame = bytearray(self._frame[:_START]) + payload
        _PREFIX.pack_into(frame, 0, self.base_offset, len(frame) - _PREFIX.size)
        _ATTRIBUTES.pack_into(frame, _ATTRIBUTES_AT, self._attributes & ~_CODEC)
        return bytes(frame)

    def records(self, frame: bytes, start: int) -> Iterator[RawRecord]:
        """The records of `frame`, which `decompressed` has returned, from offset `start` on. Raises BadBatch."""
        fields = _Fields(frame, _START)
        by_broker = bool(self._attributes & _APPEND_TIME)
        for _ in range(self._num_records):
            fields.varint()  # its length
            fields.take(1)  # its attributes: none are defined
            created_at = self._first_at + fields.varint()
            offset = self.base_offset + fields.varint()
            key, value = fields.nullable(), fields.nullable()
            headers = tuple(
                ((fields.nullable() or b"").decode("utf-8", "replace"), fields.nullable())
                for _ in range(fields.varint())
            )
            if offset >= start:
                timestamp = self._last_at if by_broker else created_at
                yield RawRecord(offset, timestamp, key, value, headers, int(by_broker))

    def unreadable(self, start: int) -> Iterator[RawRecord]:
        """What stands for its records from offset `start` on when they cannot be read."""
        for offset in range(max(start, self.base_offset), self.next_offset):
            yield RawRecord(offset, max(0, self._last_at))


class _Fields:
    """Reads the fields of records one after the other. Raises BadBatch at the end of the data."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position

    def take(self, number: int) -> bytes:
        end = self._position + number
        if number < 0 or end > len(self._data):
            raise BadBatch(f"{number} bytes at {self._position} of {len(self._data)}")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def varint(self) -> int:
        """Zigzag, seven bits a byte, the lowest first."""
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return (value >> 1) ^ -(value & 1)
            if shift > 63:
                raise BadBatch("an endless number")

    def nullable(self) -> bytes | None:
        length = self.varint()
        return None if length < 0 else self.take(length)


# Codecs: at most MAX_BATCH_BYTES come out, and no more is allocated.


def _gunzip(data: bytes) -> bytes:
    found = bytearray()
    while data:  # a stream may have several members
        member = zlib.decompressobj(_GZIP)
        found += member.decompress(data, MAX_BATCH_BYTES + 1 - len(found))
        if len(found) > MAX_BATCH_BYTES:
            raise BadBatch(f"more than {MAX_BATCH_BYTES} bytes")
        if not member.eof:
            raise BadBatch("cut off")
        data = member.unused_data
    return bytes(found)


def _unsnap(data: bytes) -> bytes:
    blocks = [data] if not data.startswith(_XERIAL) else _xerial_blocks(data)
    found = bytearray()
    for block in blocks:
        if len(found) + cramjam.snappy.decompress_raw_len(block) > MAX_BATCH_BYTES:
            raise BadBatch(f"more than {MAX_BATCH_BYTES} bytes")
        found += cramjam.snappy.decompress_raw(block)
    return bytes(found)


def _xerial_blocks(data: bytes) -> Iterator[bytes]:
    fields = _Fields(data, _XERIAL_START)
    position = _XERIAL_START
    while position < len(data):
        length = int.from_bytes(fields.take(4))
        yield fields.take(length)
        position += 4 + length


def _within(decompress_into: Callable[[bytes, bytearray | mmap.mmap], int]) -> Callable[[bytes], bytes]:
    def decompress(data: bytes) -> bytes:
        room = bytearray(min(_USUAL_RATIO * len(data), MAX_BATCH_BYTES))
        try:
            return bytes(memoryview(room)[: decompress_into(data, room)])
        except cramjam.DecompressionError:
            with mmap.mmap(-1, MAX_BATCH_BYTES) as most:  # pages that nobody writes to cost nothing
                return most[: decompress_into(data, most)]

    return decompress


_CODECS: dict[int, Callable[[bytes], bytes]] = {
    1: _gunzip,
    2: _unsnap,
    3: _within(cramjam.lz4.decompress_into),
    4: _within(cramjam.zstd.decompress_into),
}
