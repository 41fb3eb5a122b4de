"""Reads Kafka's record batches (message format v2) where aiokafka cannot: a header's name need not be UTF-8 here.

Brokers check the frames of what they take, but not that names are text. aiokafka 0.14 refuses such a record, and with
it all that stand behind it in its batch. Pure: bytes in, records out.
Format: kafka.apache.org/documentation/#recordbatch
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from aiokafka.codec import gzip_decode, lz4_decode, snappy_decode, zstd_decode

_PREFIX = struct.Struct(">qi")  # base offset, length of what follows
_HEADER = struct.Struct(">ibIhiqqqhii")  # from the leader's epoch to the number of records
_MAGIC = 2
_CODECS: dict[int, Callable[[bytes], bytes]] = {
    0: bytes,
    1: gzip_decode,
    2: snappy_decode,
    3: lz4_decode,
    4: zstd_decode,
}
_CODEC, _APPEND_TIME, _CONTROL = 0x07, 0x08, 0x20  # bits of a batch's attributes


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record as it lies in the log. What is no UTF-8 in a header's name is replaced."""

    offset: int
    timestamp: int  # ms
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, Any], ...]  # values: bytes or None


class BadBatch(ValueError):
    """The frame of a batch makes no sense."""


def read_batches(data: bytes, start: int) -> Iterator[RawRecord]:
    """The records from offset `start` on in what a fetch has returned; it may end within a batch. Raises BadBatch."""
    position = 0
    while position + _PREFIX.size + _HEADER.size <= len(data):
        base, length = _PREFIX.unpack_from(data, position)
        end = position + _PREFIX.size + length
        if end > len(data):
            return
        for record in _read_batch(base, data[position + _PREFIX.size : end]):
            if record.offset >= start:
                yield record
        position = end


def _read_batch(base: int, batch: bytes) -> Iterator[RawRecord]:
    _, magic, _, attributes, _, first_at, last_at, _, _, _, number = _HEADER.unpack_from(batch)
    if magic != _MAGIC or attributes & _CODEC not in _CODECS:
        raise BadBatch(f"format {magic}, attributes {attributes:#x}")
    if attributes & _CONTROL:
        return
    try:
        fields = _Fields(_CODECS[attributes & _CODEC](batch[_HEADER.size :]))
    except Exception as e:  # each codec has exceptions of its own
        raise BadBatch(f"cannot be decompressed: {e!r}") from e
    for _ in range(number):
        fields.varint()  # its length
        fields.take(1)  # its attributes: none are defined
        created_at = first_at + fields.varint()
        offset = base + fields.varint()
        key, value = fields.nullable(), fields.nullable()
        headers = tuple(
            ((fields.nullable() or b"").decode("utf-8", "replace"), fields.nullable()) for _ in range(fields.varint())
        )
        yield RawRecord(offset, last_at if attributes & _APPEND_TIME else created_at, key, value, headers)


class _Fields:
    """Reads the fields of records one after the other. Raises BadBatch at the end of the data."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

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
