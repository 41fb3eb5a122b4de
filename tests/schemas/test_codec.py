"""Values on the wire: round trips, refusals, and limits that hold while decoding."""

import json
import math
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.codec import DEFAULT_LIMITS, ContentType, Limits, decode_map, encode_map
from schemas.errors import DecodeError
from schemas.reasons import ErrorCode

BOTH = pytest.mark.parametrize("content_type", list(ContentType))
FUZZ = settings(max_examples=100, deadline=None, database=None)

TEXT = st.text('ab"\\[,é\U0001f600', max_size=5)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | TEXT | st.floats(allow_nan=False, width=32)
LISTS = st.builds(lambda part, times: part * times, st.lists(st.integers(-40, 70_000), max_size=3), st.integers(0, 800))
VALUES = st.recursive(
    SCALARS.filter(lambda value: value not in (math.inf, -math.inf)) | LISTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MAPS = st.dictionaries(TEXT, VALUES, max_size=4)


def refusal(value: bytes | None, content_type: ContentType, limits: Limits = DEFAULT_LIMITS) -> str:
    with pytest.raises(DecodeError) as caught:
        decode_map(value, content_type, limits)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    return caught.value.message


def parts_of(value: object) -> list[Any] | None:
    """The elements of a container; None for anything else."""
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None


def depth_of(value: object) -> int:
    parts = parts_of(value)
    return 0 if parts is None else 1 + max(map(depth_of, parts), default=0)


def items_of(value: object) -> int:
    parts = parts_of(value)
    return 0 if parts is None else max(1, len(parts)) + sum(map(items_of, parts))


def longest_of(value: object, content_type: ContentType) -> int:
    """Bytes of the longest string, as encoded."""
    if isinstance(value, str):
        quoted = json.dumps(value, ensure_ascii=False)[1:-1] if content_type is ContentType.JSON else value
        return len(quoted.encode())
    texts = [*(parts_of(value) or ()), *(value if isinstance(value, dict) else ())]
    return max((longest_of(each, content_type) for each in texts), default=0)


@BOTH
@FUZZ
@given(MAPS)
def test_a_map_comes_back_as_it_went(content_type: ContentType, value: dict[str, Any]) -> None:
    """What is encoded decodes to an equal map, in either type."""
    assert decode_map(encode_map(value, content_type), content_type) == value


@BOTH
@FUZZ
@given(value=MAPS, max_depth=st.integers(1, 4), max_items=st.integers(1, 50), max_str_bytes=st.integers(1, 60))
def test_limits_are_exact(
    content_type: ContentType, value: dict[str, Any], max_depth: int, max_items: int, max_str_bytes: int
) -> None:
    """A value passes if, and only if, it is within every limit."""
    limits = Limits(max_depth=max_depth, max_items=max_items, max_str_bytes=max_str_bytes)
    encoded = encode_map(value, content_type)
    is_within = (
        depth_of(value) <= max_depth
        and items_of(value) <= max_items
        and longest_of(value, content_type) <= max_str_bytes
    )
    if is_within:
        assert decode_map(encoded, content_type, limits) == value
    else:
        refusal(encoded, content_type, limits)


@BOTH
@FUZZ
@given(st.binary(max_size=300))
def test_random_bytes_decode_or_are_refused(content_type: ContentType, value: bytes) -> None:
    """Nothing but DecodeError comes out, and what passes is a map with string keys."""
    try:
        decoded = decode_map(value, content_type)
    except DecodeError:
        return
    assert all(isinstance(key, str) for key in decoded)


@FUZZ
@given(MAPS, st.data())
def test_damaged_values_decode_or_are_refused(value: dict[str, Any], data: st.DataObject) -> None:
    """One changed, missing or extra byte never brings anything but DecodeError, whichever limits are on."""
    encoded = bytearray(encode_map(value, ContentType.MSGPACK))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position : position + data.draw(st.integers(0, 1))] = data.draw(st.binary(max_size=2))
    outcomes = []
    for limits in (DEFAULT_LIMITS, Limits(max_items=len(encoded))):
        try:
            outcomes.append(repr(decode_map(bytes(encoded), ContentType.MSGPACK, limits)))
        except DecodeError:
            outcomes.append("refused")
    assert outcomes[0] == outcomes[1]  # the second walks the bytes, the first need not


@pytest.mark.parametrize(
    "value",
    [None, b"", b"\xc1\xff\x00", b"\x93\x01\x02\x03", b"\x01", b"\xa1x", b"\x81\xa1a", b"\x80\x80", b"\x81\x01\x01"],
)
def test_what_is_not_one_msgpack_map_is_refused(value: bytes | None) -> None:
    """A missing value, a broken one, another type, trailing bytes and integer keys at the top are refused."""
    refusal(value, ContentType.MSGPACK)


@pytest.mark.parametrize(
    "value",
    [b"\x81\xc4\x01a\x01", b"\x82\xa1a\x01\xa1a\x02", b"\x81\xa1a\xd6\xff\x00\x00\x00\x00", b"\x81\xa1a\xd4\x05\x00",
     b"\x81\xa1a\xc7\x00\x05", b"\x81\xa1a\xa2\xff\xfe", b"\x81\xa1a\x81\x91\x01\x01", b"\x81\xa1a\x81\xc3\x01"],
    ids=["bin key", "key twice", "timestamp", "extension", "empty extension", "not UTF-8", "list key", "bool key"],
)  # fmt: skip
def test_msgpack_beyond_the_contract_is_refused(value: bytes) -> None:
    """What JSON could not say, or says twice, is refused."""
    refusal(value, ContentType.MSGPACK)


def test_nested_maps_may_have_integer_keys() -> None:
    """A logit_bias may come with token ids as msgpack integers."""
    value = msgpack.packb({"logit_bias": {5: 1.0}, "id": b"\xff"})
    assert decode_map(value, ContentType.MSGPACK) == {"logit_bias": {5: 1.0}, "id": b"\xff"}


@pytest.mark.parametrize(
    "value",
    [b"[]", b"1", b'"x"', b"null", b"{", b'{"a":1}x', b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e999}',
     b'{"a":1,"a":2}', b'{"a":"\\ud800"}', b'{"a":"\xff"}', b"\xef\xbb\xbf{}",
     '{"a":1}'.encode("utf-16"), b'{"a":' + b"1" * 5000 + b"}"],
)  # fmt: skip
def test_json_beyond_the_contract_is_refused(value: bytes) -> None:
    """Another type, broken JSON, NaN, infinities, keys twice, half a surrogate pair and other encodings are refused."""
    refusal(value, ContentType.JSON)


def test_a_whole_surrogate_pair_is_text() -> None:
    """An escaped character beyond the basic plane decodes."""
    assert decode_map(b'{"a":"\\ud83d\\ude00"}', ContentType.JSON) == {"a": "\U0001f600"}


@pytest.mark.parametrize("depth", [17, 500, 100_000])
def test_deep_nesting_is_refused_in_both_types(depth: int) -> None:
    """Depth is counted before anything recurses: no RecursionError, no crash."""
    message = "nested deeper than 16 levels"
    assert message in refusal(b'{"a":' + b"[" * depth + b"]" * depth + b"}", ContentType.JSON)
    assert message in refusal(b"\x81\xa1a" + b"\x91" * depth + b"\x90", ContentType.MSGPACK)
    assert message in refusal(b"\x81\xa1a" * depth + b"\x80", ContentType.MSGPACK)


@BOTH
def test_the_deepest_allowed_value_passes(content_type: ContentType) -> None:
    """16 levels, the map itself the first, are allowed."""
    value: dict[str, Any] = {}
    for _ in range(15):
        value = {"a": value}
    assert decode_map(encode_map(value, content_type), content_type) == value


@pytest.mark.parametrize(
    "head", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_a_declared_size_allocates_nothing(head: bytes) -> None:
    """Ten bytes that declare four billion elements are refused without the memory for them."""
    for value in (b"\x81\xa1a" + head, b"\x81\xa1a" + head + b"\x90" * 2000):
        tracemalloc.start()
        refusal(value, ContentType.MSGPACK)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000


def test_nested_declarations_do_not_add_up() -> None:
    """Each of 16 levels declaring the most that is allowed is refused by the count of all."""
    value = b"\x81\xa1a" + (b"\xdd" + (600_000).to_bytes(4)) * 15 + b"\x01" * 1_100_000
    assert "more than 1000000 elements" in refusal(value, ContentType.MSGPACK)


@BOTH
def test_counts_and_sizes_are_limited(content_type: ContentType) -> None:
    """Too many elements, too long a string and too large a value are refused, each with the limit named."""
    assert "more than 1000000 elements" in refusal(encode_map({"a": [0] * 1_000_001}, content_type), content_type)
    assert "longer than 4194304 bytes" in refusal(encode_map({"a": "x" * (4 * 2**20 + 1)}, content_type), content_type)
    assert "larger than 8388608 bytes" in refusal(bytes(8 * 2**20 + 1), content_type)
    decode_map(encode_map({"a": "x" * (4 * 2**20)}, content_type), content_type)
    decode_map(encode_map({"a": [0] * 990_000}, content_type), content_type)


@BOTH
def test_empty_containers_count(content_type: ContentType) -> None:
    """Each is an element of its own, so that their number is limited, too."""
    value = {"a": [[], {}, []]}  # a pair, three elements, three empty containers
    encoded = encode_map(value, content_type)
    assert decode_map(encoded, content_type, Limits(max_items=7)) == value
    refusal(encoded, content_type, Limits(max_items=6))


def test_hostile_json_strings_take_linear_time() -> None:
    """An unterminated string of quotes and backslashes is walked once."""
    for body in (b'\\"' * 500_000, b"\\" * 1_000_001, b'"' * 1_000_000):
        refusal(b'{"a":"' + body, ContentType.JSON)


@BOTH
def test_messages_never_contain_the_input(content_type: ContentType) -> None:
    """What a caller wrote does not end up in logs by way of an error."""
    for value in (
        b'{"secret":',
        b'{"secret":"secret"',
        b"\x81\xa6secret",
        b"\x92\xa6secret\xc1",
        b'{"secret":1,"secret":2}',
    ):
        assert "secret" not in refusal(value, content_type)


def test_json_is_compact_utf8_and_finite() -> None:
    """JSON goes out without spaces and escapes, and never with NaN."""
    assert encode_map({"a": "é", 5: (1, 2)}, ContentType.JSON) == '{"a":"é","5":[1,2]}'.encode()  # type: ignore[dict-item]
    with pytest.raises(ValueError):
        encode_map({"a": math.nan}, ContentType.JSON)
