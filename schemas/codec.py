"""Record values: one map in msgpack or JSON, decoded within limits.

Both decoders first walk the bytes without building anything, and refuse there what is too deep, too large or too
many. The libraries alone would not do: msgpack allocates what a header declares, up to 500 levels of it, and json
recurses. Runs of scalars are walked in C (`re`): 200,000 token ids take 7 ms, a Python loop took 19.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgpack  # type: ignore[import-untyped]

from schemas.errors import DecodeError


class ContentType(StrEnum):
    MSGPACK = "application/msgpack"
    JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds of one value.

    `max_items`: the elements of all its containers together; a pair of a map is one, an empty container counts as one.
    """

    max_value_bytes: int = 8 * 2**20
    max_depth: int = 16  # the map itself is level 1
    max_items: int = 1_000_000
    max_str_bytes: int = 4 * 2**20  # of one string, as encoded


DEFAULT_LIMITS = Limits()


def decode_map(value: bytes | None, content_type: ContentType, limits: Limits = DEFAULT_LIMITS) -> dict[str, object]:
    """The map that `value` holds.

    Its keys are strings; nested maps may have integer keys (msgpack). Strings are valid UTF-8. Raises DecodeError,
    whose message never contains the input, for anything else: another type, trailing bytes, a repeated key, an
    extension type, NaN or Infinity in JSON, a limit passed.
    """
    if not value:
        raise DecodeError("the record has no value")
    if len(value) > limits.max_value_bytes:
        raise DecodeError(f"the value is larger than {limits.max_value_bytes} bytes")
    decoded = _decode_json(value, limits) if content_type is ContentType.JSON else _decode_msgpack(value, limits)
    if not isinstance(decoded, dict):
        raise DecodeError(f"the value is not a map in {content_type}")
    if not all(isinstance(key, str) for key in decoded):
        raise DecodeError("the map has a key that is not a string")
    return decoded


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_map(value: Mapping[str, object], content_type: ContentType) -> bytes:
    """The reverse of `decode_map`; tuples become lists. Raises ValueError or TypeError for what cannot be encoded."""
    if content_type is ContentType.JSON:
        return _JSON.encode(value).encode()
    packed: bytes = msgpack.packb(value)
    return packed


def _is_small(value: bytes, no_opener: bytes, limits: Limits) -> bool:
    """True when no limit can be passed: too short, and too few bytes that may open a container. Most records are.

    no_opener: the bytes that never open one.
    """
    num_openers = len(value.translate(None, no_opener))
    return num_openers <= limits.max_depth and len(value) + num_openers <= min(limits.max_items, limits.max_str_bytes)


def _map_of(pairs: list[tuple[object, object]]) -> dict[object, object]:
    for key, _ in pairs:
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise DecodeError("a map has a key that is neither a string nor an integer")
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise DecodeError("a map has a key twice")
    return unique


# JSON: a bracket or a string. That it begins with a set lets `re` skip to the next one fast.
_JSON_TOKEN = re.compile(rb'["\[\]{}](?:(?<=")[^"\\]*+(?:\\.[^"\\]*+)*+"?)?', re.DOTALL)
_NO_JSON_OPENER = bytes(set(range(256)) - set(b"[{"))
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _decode_json(value: bytes, limits: Limits) -> object:
    try:
        if not _is_small(value, _NO_JSON_OPENER, limits):
            _check_json(value, limits)
        text = value.decode()
        decoded = json.loads(text, object_pairs_hook=_map_of, parse_constant=_no_constant, parse_float=_finite)
        if _SURROGATE.search(text):  # half a surrogate pair cannot be encoded again
            json.dumps(decoded, ensure_ascii=False).encode()
    except ValueError:  # UnicodeError and JSONDecodeError among them
        raise DecodeError("the value is not JSON in UTF-8") from None
    return decoded


def _check_json(value: bytes, limits: Limits) -> None:
    """Raises DecodeError where a limit is passed. Brackets need not match: the parser will see that."""
    depth = items = position = 0
    for token in _JSON_TOKEN.finditer(value):
        start, end = token.span()
        items += value.count(b",", position, start)
        position = end
        if value[start] == 0x22:  # a quotation mark
            if end - start - 2 > limits.max_str_bytes:
                raise DecodeError(f"a string is longer than {limits.max_str_bytes} bytes")
        elif value[start] in b"[{":
            depth += 1
            items += 1
            if depth > limits.max_depth:
                raise DecodeError(f"the value is nested deeper than {limits.max_depth} levels")
        else:
            depth -= 1
    if items + value.count(b",", position) > limits.max_items:
        raise DecodeError(f"the value has more than {limits.max_items} elements")


def _no_constant(name: str) -> object:
    raise DecodeError(f"{name} is not JSON")


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise DecodeError("a number is too large")
    return number


# msgpack: one scalar of fixed size: ints, nil, booleans, floats.
_SCALAR = rb"(?>[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]|[\xcd\xd1].{2}|[\xcc\xd0].|[\xce\xd2\xca].{4}|[\xcf\xd3\xcb].{8})"
_SCALAR_RUNS = tuple((n, re.compile(_SCALAR + b"{%d}" % n, re.DOTALL)) for n in (1024, 32, 1))
# Type byte -> (objects per element, bytes of its length): str, bin, array, map.
_LONG_HEADS = {
    0xD9: (0, 1), 0xDA: (0, 2), 0xDB: (0, 4), 0xC4: (0, 1), 0xC5: (0, 2), 0xC6: (0, 4),
    0xDC: (1, 2), 0xDD: (1, 4), 0xDE: (2, 2), 0xDF: (2, 4),
}  # fmt: skip
_NEVER_USED = 0xC1
_NO_MSGPACK_OPENER = bytes(set(range(256)) - {*range(0x80, 0xA0), *range(0xDC, 0xE0)})


def _decode_msgpack(value: bytes, limits: Limits) -> object:
    if not _is_small(value, _NO_MSGPACK_OPENER, limits):
        _check_msgpack(value, limits)
    try:
        decoded: object = msgpack.unpackb(
            value, strict_map_key=False, object_pairs_hook=_map_of, ext_hook=_no_extension, max_ext_len=0
        )
    except ValueError:
        raise DecodeError("the value is not msgpack with strings in UTF-8") from None
    return decoded


def _no_extension(_code: int, _data: bytes) -> object:
    raise DecodeError("the value has a msgpack extension type")


def _check_msgpack(value: bytes, limits: Limits) -> None:
    """Raises DecodeError where a limit is passed. Whether the value ends where it should is the parser's to see."""
    to_come = [1]  # objects that are still to come, per open container; the value itself is the first
    position = items = 0
    while to_come:
        remaining, position = _skip_scalars(value, position, to_come[-1])
        if not remaining:
            to_come.pop()
            continue
        to_come[-1] = remaining - 1
        per_element, size, position = _read_head(value, position)
        if not per_element:
            if size > limits.max_str_bytes:
                raise DecodeError(f"a string is longer than {limits.max_str_bytes} bytes")
            position += size
            continue
        to_come.append(size * per_element)
        items += max(1, size)
        if items > limits.max_items:
            raise DecodeError(f"the value has more than {limits.max_items} elements")
        if len(to_come) - 1 > limits.max_depth:
            raise DecodeError(f"the value is nested deeper than {limits.max_depth} levels")


def _skip_scalars(value: bytes, position: int, remaining: int) -> tuple[int, int]:
    """Passes over at most `remaining` scalars from `position`; returns what then remains, and where."""
    for size, pattern in _SCALAR_RUNS:
        while remaining >= size and (run := pattern.match(value, position)):
            remaining -= size
            position = run.end()
    return remaining, position


def _read_head(value: bytes, position: int) -> tuple[int, int, int]:
    """The head at `position`: objects per element (0 string, 1 array, 2 map), elements or bytes, position after it."""
    kind = value[position] if position < len(value) else _NEVER_USED
    if 0x80 <= kind <= 0x8F:
        return 2, kind & 0x0F, position + 1
    if 0x90 <= kind <= 0x9F:
        return 1, kind & 0x0F, position + 1
    if 0xA0 <= kind <= 0xBF:
        return 0, kind & 0x1F, position + 1
    per_element, width = _LONG_HEADS.get(kind, (0, 0))
    end = position + 1 + width
    if not width or end > len(value):
        raise DecodeError("the value is not one whole msgpack object without extension types")
    return per_element, int.from_bytes(value[position + 1 : end]), end
