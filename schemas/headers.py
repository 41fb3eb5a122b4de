"""Record headers: the request's and the reply's (protocol.md 2 and 3), with the aliases that other clients use.

Header pairs are as the Kafka client gives them. A repeated header: the last one counts; a null value: not there.
Where the answer goes is read apart from everything else, so that a caller hears of a bad header.
"""

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from schemas.codec import ContentType
from schemas.errors import RequestError, Unanswerable
from schemas.reasons import DeadLetterReason, ErrorCode
from schemas.records import InputRef
from schemas.topics import (
    DEFAULT_REPLY_PREFIX,
    DEFAULT_REPLY_TOPIC,
    MAX_PRIORITY,
    MAX_TENANT_CHARS,
    is_valid_topic,
)

HeaderPairs = Sequence[tuple[str, bytes]]

# The canonical name wins; the others are Spring's, SmallRye's and CloudEvents' (binary mode), in this order.
CORRELATION_ID_NAMES = ("correlation_id", "kafka_correlationId", "REPLY_CORRELATION_ID", "ce_correlationid", "ce_id")
REPLY_TO_NAMES = ("reply_to", "kafka_replyTopic", "REPLY_TOPIC")
REPLY_PARTITION_NAMES = ("reply_partition", "kafka_replyPartition", "REPLY_PARTITION")

TRACEPARENT = "traceparent"  # W3C trace context
MAX_CORRELATION_ID_BYTES = 256
DEFAULT_TENANT = "default"

_PER_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,200}")
_INTEGER = re.compile(rb"[0-9]{1,19}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_MAX_TRACE_CHARS = {"tracestate": 512, "baggage": 8192}  # what W3C asks everybody to carry


@dataclass(frozen=True, slots=True)
class ReplyAddress:
    """Where and how a request is answered."""

    correlation_id: bytes  # as it came
    topic: str
    partition: int | None  # None: the caller named none
    content_type: ContentType  # of the reply records
    echo: tuple[tuple[str, bytes], ...]  # the caller's own names for the correlation id, repeated on every reply
    per_request: bool  # a log of this request alone: named after its correlation id, partition 0


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """What the headers say beside the reply address. `trace`: the W3C headers that are well-formed."""

    priority: int | None
    deadline_ms: int | None  # Unix time
    content_type: ContentType
    tenant: str = DEFAULT_TENANT
    trace: tuple[tuple[str, str], ...] = ()


def read_reply_address(
    headers: HeaderPairs,
    source: InputRef,
    *,
    reply_prefixes: Sequence[str] = (DEFAULT_REPLY_PREFIX,),
    forbidden: Container[str] = (),
    default_reply_topic: str | None = DEFAULT_REPLY_TOPIC,
) -> ReplyAddress:
    """Where to answer the request that was read at `source`.

    forbidden: topics that no caller may name (lanes, DLQ, control, usage); `__` topics never may. A bad `accept` or
    `content-type` does not matter here: `read_request_headers` refuses it, and the refusal travels in what is valid.
    Raises Unanswerable with reason correlation_id_invalid, reply_to_missing, reply_to_invalid, reply_to_forbidden or
    reply_partition_invalid.
    """
    last = _last(headers)
    correlation_id = _first(last, CORRELATION_ID_NAMES)
    if correlation_id is None:
        correlation_id = f"{source.topic}-{source.partition}-{source.offset}".encode()
    elif not 1 <= len(correlation_id) <= MAX_CORRELATION_ID_BYTES:
        raise Unanswerable(
            DeadLetterReason.CORRELATION_ID_INVALID, f"correlation_id must have 1 to {MAX_CORRELATION_ID_BYTES} bytes"
        )
    topic = _read_reply_topic(last, reply_prefixes, forbidden, default_reply_topic)
    partition = _read_partition(last)
    return ReplyAddress(
        correlation_id=correlation_id,
        topic=topic,
        partition=partition,
        content_type=_content_type(last, "accept") or _content_type(last, "content-type") or ContentType.MSGPACK,
        echo=tuple(
            (name, last[name])
            for name in CORRELATION_ID_NAMES[1:]
            if name in last and len(last[name]) <= MAX_CORRELATION_ID_BYTES
        ),
        per_request=(
            partition in (None, 0)
            and topic != default_reply_topic  # shared, whatever the id
            and _PER_REQUEST_ID.fullmatch(correlation_id) is not None
            and any(topic == prefix + correlation_id.decode() for prefix in reply_prefixes)
        ),
    )


def read_request_headers(headers: HeaderPairs, *, lane_tenant: str | None = None) -> RequestHeaders:
    """The request's other headers. Raises RequestError that names the header and says what is allowed.

    lane_tenant: the one whose lane it is; then the header `tenant` is ignored, whatever is in it.
    """
    last = _last(headers)
    for name in ("accept", "content-type"):
        if name in last and _content_type(last, name) is None:
            raise _invalid(name, " or ".join(ContentType))
    tenant = lane_tenant or _text(last.get("tenant", DEFAULT_TENANT.encode()))
    if tenant is None or not 1 <= len(tenant) <= MAX_TENANT_CHARS:
        raise _invalid("tenant", f"1 to {MAX_TENANT_CHARS} characters of UTF-8")
    priority = _integer(last, "priority", MAX_PRIORITY, f"an integer from 0 to {MAX_PRIORITY}; larger is more urgent")
    deadline_ms = _integer(last, "deadline_ms", 2**63 - 1, "a Unix time in milliseconds")
    return RequestHeaders(
        priority=priority,
        deadline_ms=deadline_ms,
        content_type=_content_type(last, "content-type") or ContentType.MSGPACK,
        tenant=tenant,
        trace=_read_trace(last),
    )


def write_request_headers(
    *,
    correlation_id: str | bytes,
    reply_to: str,
    content_type: ContentType,
    reply_partition: int | None = None,
    tenant: str | None = None,
    priority: int | None = None,
    deadline_ms: int | None = None,
    accept: ContentType | None = None,
    trace: Iterable[tuple[str, str]] = (),
) -> list[tuple[str, bytes]]:
    """The headers of a request, canonical names only; what is None is left out."""
    optional: dict[str, object] = {
        "reply_partition": reply_partition,
        "tenant": tenant,
        "priority": priority,
        "deadline_ms": deadline_ms,
        "accept": accept,
    }
    return [
        ("correlation_id", correlation_id if isinstance(correlation_id, bytes) else correlation_id.encode()),
        ("reply_to", reply_to.encode()),
        ("content-type", content_type.encode()),
        *((name, str(value).encode()) for name, value in optional.items() if value is not None),
        *((name, value.encode()) for name, value in trace),
    ]


def write_reply_headers(address: ReplyAddress, event: str, trace: str | None = None) -> list[tuple[str, bytes]]:
    """The headers of a reply record. trace: the `traceparent` of `begin` and `end`; None on `tokens`."""
    headers = [
        ("correlation_id", address.correlation_id),
        ("event", event.encode()),
        ("content-type", address.content_type.encode()),
        *address.echo,
    ]
    if trace is not None:
        headers.append(("traceparent", trace.encode()))
    return headers


def read_traceparent(headers: HeaderPairs) -> str | None:
    """The `traceparent` of a reply record, None when there is no usable one."""
    raw = next((value for name, value in reversed(headers) if name == TRACEPARENT and value is not None), None)
    parent = None if raw is None else _text(raw)
    return parent if parent is not None and _TRACEPARENT.fullmatch(parent) else None


def _last(headers: HeaderPairs) -> dict[str, bytes]:
    return {name: value for name, value in dict(headers).items() if value is not None}


def _first(last: dict[str, bytes], names: Sequence[str]) -> bytes | None:
    return next((last[name] for name in names if name in last), None)


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _content_type(last: dict[str, bytes], name: str) -> ContentType | None:
    """The type without its parameters, in any case (RFC 9110 8.3); None when it is missing or not one of ours."""
    try:
        return ContentType(last.get(name, b"").decode().partition(";")[0].strip().lower())
    except ValueError:
        return None


def _invalid(name: str, allowed: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"header {name!r} must be {allowed}")


def _integer(last: dict[str, bytes], name: str, maximum: int, allowed: str) -> int | None:
    if name not in last:
        return None
    if _INTEGER.fullmatch(last[name]) is None or int(last[name]) > maximum:
        raise _invalid(name, allowed)
    return int(last[name])


def _read_reply_topic(
    last: dict[str, bytes], reply_prefixes: Sequence[str], forbidden: Container[str], default: str | None
) -> str:
    named = _first(last, REPLY_TO_NAMES)
    if named is None:
        if default is None:
            raise Unanswerable(
                DeadLetterReason.REPLY_TO_MISSING, "the header reply_to is missing, and no default is configured"
            )
        return default
    topic = _text(named)
    if topic is None or not is_valid_topic(topic):
        raise Unanswerable(DeadLetterReason.REPLY_TO_INVALID, "reply_to is not a topic name")
    if topic.startswith("__") or topic in forbidden:
        raise Unanswerable(DeadLetterReason.REPLY_TO_FORBIDDEN, f"reply_to may not name {topic}")
    if topic != default and not topic.startswith(tuple(reply_prefixes)):
        raise Unanswerable(
            DeadLetterReason.REPLY_TO_FORBIDDEN, f"reply_to must start with {' or '.join(reply_prefixes)}"
        )
    return topic


def _read_partition(last: dict[str, bytes]) -> int | None:
    """Decimal digits, or the 4-byte big-endian integer that Spring writes."""
    raw = _first(last, REPLY_PARTITION_NAMES)
    if raw is None:
        return None
    is_text = _INTEGER.fullmatch(raw) is not None
    partition = int(raw) if is_text else int.from_bytes(raw)
    if not (is_text or len(raw) == 4) or partition >= 2**31:
        raise Unanswerable(DeadLetterReason.REPLY_PARTITION_INVALID, "reply_partition must be a partition number")
    return partition


def _read_trace(last: dict[str, bytes]) -> tuple[tuple[str, str], ...]:
    """A bad traceparent starts a new trace, and tracestate goes with it (W3C Trace Context 3.3)."""
    found: list[tuple[str, str]] = []
    parent = _text(last.get("traceparent", b""))
    if parent and _TRACEPARENT.fullmatch(parent) and (len(parent) == 55 or not parent.startswith("00")):
        found.append(("traceparent", parent))
    for name, max_chars in _MAX_TRACE_CHARS.items():
        value = _text(last.get(name, b""))
        if name == "tracestate" and not found:
            continue
        if value and value.isascii() and value.isprintable() and len(value) <= max_chars:
            found.append((name, value))
    return tuple(found)
