"""Our reader of record batches agrees with aiokafka's wherever that one can read, and reads on where it cannot."""

import contextlib

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.transport.record_batches import BadBatch, RawRecord, read_batches

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


def as_aiokafka(data: bytes) -> list[RawRecord]:
    read, memory = [], MemoryRecords(data)
    while memory.has_next():
        read += [RawRecord(r.offset, r.timestamp, r.key, r.value, tuple(r.headers)) for r in memory.next_batch()]
    return read


@settings(max_examples=40, deadline=None)
@given(_records, st.integers(0, 4), st.integers(0, 2**40))
def test_agrees_with_aiokafka(records: list[tuple], codec: int, base: int):
    """Any records, any codec, any place in the log, two batches in one fetch."""
    data = batch(records, codec, base) + batch(records, 0, base + len(records))
    assert list(read_batches(data, 0)) == as_aiokafka(data)


def test_begins_where_it_is_told():
    """A fetch returns whole batches: records before the wanted offset are left out; a cut batch at the end, too."""
    data = batch([(1, b"k", b"v", [])] * 5, base=10) + batch([(1, b"k", b"v", [])] * 5, base=15)[:-1]
    assert [r.offset for r in read_batches(data, 12)] == [12, 13, 14]


def test_append_time_counts_for_the_batch():
    """A topic that stamps records itself: all have the batch's time."""
    data = batch([(1, None, b"a", []), (2, None, b"b", [])], append_time=77)
    assert [r.timestamp for r in read_batches(data, 0)] == [77, 77]
    assert list(read_batches(data, 0)) == as_aiokafka(data)


def test_a_header_name_need_not_be_text():
    """What aiokafka cannot read, and what stands behind it in the batch, is read: the name's bytes are replaced."""
    data = batch([(1, b"k", b"a", [("good", b"1")]), (1, b"k", b"b", [("zz", None)]), (1, None, b"c", [])])
    data = data.replace(b"zz", b"\xff\xfe")
    with pytest.raises(UnicodeDecodeError):
        as_aiokafka(data)
    assert [(r.value, r.headers) for r in read_batches(data, 0)] == [
        (b"a", (("good", b"1"),)),
        (b"b", (("\ufffd\ufffd", None),)),
        (b"c", ()),
    ]


def test_what_comes_before_a_bad_frame_is_read():
    """A frame that makes no sense: the records before it come first, then the error."""
    data = batch([(1, b"k", b"a", []), (1, b"k", b"b" * 30, [])])
    cut = bytearray(data[:-20])
    cut[8:12] = (len(cut) - 12).to_bytes(4)
    found = []
    with pytest.raises(BadBatch):
        found.extend(read_batches(bytes(cut), 0))
    assert [r.value for r in found] == [b"a"]


@given(st.binary(max_size=200), st.integers(0, 4))
def test_noise_is_a_bad_batch_or_nothing(noise: bytes, codec: int):
    """Whatever the bytes, nothing but BadBatch is raised."""
    header = bytearray(batch([(1, b"k", b"v", [])], codec))[:61]
    data = header[:8] + (len(header) - 12 + len(noise)).to_bytes(4) + header[12:] + noise
    with contextlib.suppress(BadBatch):
        list(read_batches(bytes(data), 0))
