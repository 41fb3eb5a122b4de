"""Our reader of record batches agrees with aiokafka's wherever that one can read, and reads on where it cannot."""

import contextlib
import gzip
import tracemalloc
from collections.abc import Callable

import cramjam
import pytest
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.record_batches import MAX_BATCH_BYTES, BadBatch, Batch, RawRecord, frames

CODECS = {1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}

_bytes = st.none() | st.binary(max_size=40)
_headers = st.lists(st.tuples(st.text(max_size=5), _bytes), max_size=3)
_records = st.lists(st.tuples(st.integers(0, 2**41), _bytes, _bytes, _headers), min_size=1, max_size=6)


def batch(records: list[tuple], codec: int = 0, base: int = 0, append_time: int | None = None) -> bytes:
    """As aiokafka's producer builds it and a broker stores it."""
    builder = DefaultRecordBatchBuilder(2, codec, 0, -1, -1, 0, 10**6)
    for number, (timestamp, key, value, headers) in enumerate(records):
        assert builder.append(number, timestamp, key, value, headers) is not None
    data = bytearray(builder.build())
    data[:8] = base.to_bytes(8)
    if append_time is not None:
        data[22] |= 0x08  # of the attributes
        data[35:43] = append_time.to_bytes(8)
    return bytes(data)


def with_payload(codec: int, payload: bytes) -> bytes:
    """A batch of one record that says it is compressed, and what it is compressed to."""
    head = bytearray(batch([(1, None, b"v", [])])[:61])
    head[22] |= codec
    return bytes(head[:8]) + (len(head) - 12 + len(payload)).to_bytes(4) + bytes(head[12:]) + payload


def as_aiokafka(frame: bytes) -> list[RawRecord]:
    return [
        RawRecord(r.offset, r.timestamp, r.key, r.value, tuple(r.headers), r.timestamp_type)
        for r in DefaultRecordBatch(frame)
    ]


def read(frame: bytes, start: int = 0) -> list[RawRecord]:
    found = Batch(frame)
    return list(found.records(found.decompressed(), start))


@settings(max_examples=40, deadline=None)
@given(_records, st.integers(0, 4), st.integers(0, 2**40))
def test_agrees_with_aiokafka(records: list[tuple], codec: int, base: int):
    """Any records, any codec, any place in the log, two batches in one fetch."""
    data = batch(records, codec, base) + batch(records, 0, base + len(records))
    found = list(frames(data))
    assert b"".join(found) == data
    for frame in found:
        assert read(frame) == as_aiokafka(frame)
        ours, theirs = Batch(frame), DefaultRecordBatch(frame)
        for name in ("base_offset", "next_offset", "producer_id", "is_control_batch", "is_transactional"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert as_aiokafka(ours.decompressed()) == as_aiokafka(frame)


def test_begins_where_it_is_told():
    """Records before the wanted offset are left out; a batch that is cut off at the end of a fetch, too."""
    data = batch([(1, b"k", b"v", [])] * 5, base=10) + batch([(1, b"k", b"v", [])] * 5, base=15)[:-1]
    assert [r.offset for frame in frames(data) for r in read(frame, 12)] == [12, 13, 14]


def test_append_time_counts_for_the_batch():
    """A topic that stamps records itself: all have the batch's time."""
    data = batch([(1, None, b"a", []), (2, None, b"b", [])], append_time=77)
    assert [(r.timestamp, r.timestamp_type) for r in read(data)] == [(77, 1)] * 2
    assert read(data) == as_aiokafka(data)


def test_a_header_name_need_not_be_text():
    """What aiokafka cannot read, and what stands behind it in the batch, is read: the name's bytes are replaced."""
    data = batch([(1, b"k", b"a", [("good", b"1")]), (1, b"k", b"b", [("zz", None)]), (1, None, b"c", [])])
    data = data.replace(b"zz", b"\xff\xfe")
    with pytest.raises(UnicodeDecodeError):
        as_aiokafka(data)
    assert [(r.value, r.headers) for r in read(data)] == [
        (b"a", (("good", b"1"),)),
        (b"b", (("\ufffd\ufffd", None),)),
        (b"c", ()),
    ]


@pytest.mark.parametrize("codec", CODECS)
def test_what_blows_up_is_refused_and_never_held(codec: int):
    """A little that would be much: no more than the bound is allocated. At the bound they are read."""
    compress: dict[int, Callable[[bytes], bytes]] = {
        1: gzip.compress,
        2: cramjam.snappy.compress_raw,
        3: cramjam.lz4.compress,
        4: cramjam.zstd.compress,
    }
    bomb = with_payload(codec, bytes(compress[codec](bytes(60 * 2**20))))
    assert len(bomb) < 20 * 2**20
    tracemalloc.start()
    try:
        with pytest.raises(BadBatch):
            Batch(bomb).decompressed()
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_BATCH_BYTES + len(bomb)
    finally:
        tracemalloc.stop()
    largest = with_payload(codec, bytes(compress[codec](bytes(MAX_BATCH_BYTES))))
    assert len(Batch(largest).decompressed()) == 61 + MAX_BATCH_BYTES


def test_snappy_in_blocks_is_bounded_as_a_whole():
    """As Java writes it: many small blocks that are large together."""
    block = bytes(cramjam.snappy.compress_raw(bytes(2**20)))
    payload = b"\x82SNAPPY\x00" + b"\0\0\0\1" * 2 + (len(block).to_bytes(4) + block) * 10
    with pytest.raises(BadBatch):
        Batch(with_payload(2, payload)).decompressed()


def test_an_unreadable_batch_keeps_its_places():
    """Somebody must answer for each of its records, so each has an offset and nothing else; an old format has one."""
    data = batch([(9, b"k", b"v", [("h", b"x")])] * 3, base=40)
    assert list(Batch(data).unreadable(41)) == [RawRecord(41, 9), RawRecord(42, 9)]
    old = bytearray(data)
    old[16] = 1
    with pytest.raises(BadBatch):
        Batch(bytes(old)).decompressed()
    assert [r.offset for r in Batch(bytes(old)).unreadable(0)] == [40]
    assert [r.offset for r in Batch(bytes(old[:30])).unreadable(0)] == [40]


@given(st.binary(max_size=200), st.integers(0, 7))
def test_noise_is_a_bad_batch_or_nothing(noise: bytes, codec: int):
    """Whatever the bytes, nothing but BadBatch is raised."""
    with contextlib.suppress(BadBatch):
        read(with_payload(codec, noise))
