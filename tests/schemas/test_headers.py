"""Request and reply headers, canonical and aliased."""

import contextlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.codec import ContentType
from schemas.errors import RequestError, Unanswerable
from schemas.headers import (
    CORRELATION_ID_NAMES,
    REPLY_PARTITION_NAMES,
    REPLY_TO_NAMES,
    ReplyAddress,
    RequestHeaders,
    read_reply_address,
    read_request_headers,
    write_reply_headers,
    write_request_headers,
)
from schemas.records import InputRef

SOURCE = InputRef("prompts.standard", 3, 17, 1000)
FORBIDDEN = ("prompts.standard", "prompts.dlq", "replies.internal")
TRACEPARENT = f"00-{'a' * 32}-{'1' * 16}-01"
FUZZ = settings(max_examples=100, deadline=None, database=None)

NAMES = (*CORRELATION_ID_NAMES, *REPLY_TO_NAMES, *REPLY_PARTITION_NAMES, "tenant", "priority", "deadline_ms",
         "content-type", "accept", "traceparent", "tracestate", "baggage")  # fmt: skip
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(NAMES), st.none() | st.binary(max_size=80) | st.sampled_from([b"replies.x", b"x", b"0", b"7"])
    )
)


def address(*headers: tuple[str, bytes], **options: object) -> ReplyAddress:
    return read_reply_address(headers, SOURCE, forbidden=FORBIDDEN, **options)  # type: ignore[arg-type]


def reason(*headers: tuple[str, bytes], **options: object) -> str:
    with pytest.raises(Unanswerable) as caught:
        address(*headers, **options)
    return caught.value.reason


def test_a_topic_named_after_its_correlation_id_is_per_request() -> None:
    """The id, the topic and partition 0 make a log of this request alone."""
    found = address(("correlation_id", b"abc"), ("reply_to", b"replies.abc"))
    assert found == ReplyAddress(b"abc", "replies.abc", None, ContentType.MSGPACK, (), per_request=True)
    assert address(("correlation_id", b"abc"), ("reply_to", b"replies.abc"), ("reply_partition", b"0")).per_request


@pytest.mark.parametrize(
    "headers",
    [
        (("correlation_id", b"abc"), ("reply_to", b"replies.other")),
        (("correlation_id", b"abc"), ("reply_to", b"replies.abc"), ("reply_partition", b"1")),
        (("reply_to", b"replies.abc"),),
        (("correlation_id", b"default"), ("reply_to", b"replies.default")),
        (("correlation_id", b"default"),),
        (("correlation_id", b"\xff\xfe"), ("reply_to", b"replies.abc")),
        (("correlation_id", b"a" * 201), ("reply_to", b"replies." + b"a" * 201)),
    ],
)
def test_every_other_log_is_shared(headers: tuple[tuple[str, bytes], ...]) -> None:
    """Another name, another partition, no id, the default topic and ids that cannot name a topic."""
    assert not address(*headers).per_request


def test_defaults_are_the_place_of_the_record_and_the_default_topic() -> None:
    """Without headers the id is topic-partition-offset and the answer goes to the default reply topic, in msgpack."""
    assert address() == ReplyAddress(
        b"prompts.standard-3-17", "replies.default", None, ContentType.MSGPACK, (), per_request=False
    )
    assert reason(default_reply_topic=None) == "reply_to_missing"


def test_the_last_of_a_repeated_header_counts_and_null_is_not_there() -> None:
    """Kafka allows both; clients do both."""
    found = address(("reply_to", b"replies.a"), ("correlation_id", None), ("reply_to", b"replies.b"))  # type: ignore[arg-type]
    assert (found.topic, found.correlation_id) == ("replies.b", b"prompts.standard-3-17")


def test_spring_is_understood_and_echoed() -> None:
    """ReplyingKafkaTemplate: opaque id, topic, and the partition as a 4-byte big-endian integer."""
    rid = bytes(range(240, 256))
    found = address(
        ("kafka_correlationId", rid), ("kafka_replyTopic", b"replies.s"), ("kafka_replyPartition", struct.pack(">i", 2))
    )
    assert (found.correlation_id, found.topic, found.partition) == (rid, "replies.s", 2)
    assert found.echo == (("kafka_correlationId", rid),)


def test_smallrye_and_cloudevents_are_understood_and_echoed() -> None:
    """Their names work like the canonical ones; the more specific CloudEvents attribute wins."""
    found = address(("REPLY_CORRELATION_ID", b"r"), ("REPLY_TOPIC", b"replies.r"), ("REPLY_PARTITION", b"4"))
    assert (found.correlation_id, found.topic, found.partition) == (b"r", "replies.r", 4)
    found = address(("ce_id", b"1"), ("ce_correlationid", b"2"))
    assert (found.correlation_id, found.echo) == (b"2", (("ce_correlationid", b"2"), ("ce_id", b"1")))


def test_canonical_names_win() -> None:
    """An alias beside a canonical header is echoed but does not count."""
    found = address(
        ("kafka_correlationId", b"k"), ("correlation_id", b"c"), ("reply_to", b"replies.c"),
        ("REPLY_TOPIC", b"replies.r"), ("reply_partition", b"1"), ("kafka_replyPartition", b"\0\0\0\x02"),
    )  # fmt: skip
    assert (found.correlation_id, found.topic, found.partition) == (b"c", "replies.c", 1)
    assert found.echo == (("kafka_correlationId", b"k"),)


@pytest.mark.parametrize(
    "raw", [b"", b"-1", b"x", b"1.0", b"\xff\xff\xff\xff", b"\0\0\0", b"2147483648", b"\0" * 8, "٣".encode()]
)
def test_a_bad_partition_is_unanswerable(raw: bytes) -> None:
    """A partition that cannot exist is no address."""
    assert reason(("reply_partition", raw)) == "reply_partition_invalid"


@pytest.mark.parametrize(
    ("topic", "why"),
    [
        (b"prompts.standard", "reply_to_forbidden"),
        (b"replies.internal", "reply_to_forbidden"),
        (b"__consumer_offsets", "reply_to_forbidden"),
        (b"other.abc", "reply_to_forbidden"),
        (b"", "reply_to_invalid"),
        (b"replies.\xff", "reply_to_invalid"),
        (b"replies.a b", "reply_to_invalid"),
        (b"replies." + b"a" * 250, "reply_to_invalid"),
    ],
)
def test_a_bad_reply_topic_is_unanswerable(topic: bytes, why: str) -> None:
    """Lanes, internal topics, topics outside the allow-list and impossible names."""
    assert reason(("reply_to", topic)) == why


def test_internal_topics_are_refused_even_where_a_prefix_allows_all() -> None:
    """An empty prefix in the allow-list does not open the broker's own topics."""
    assert reason(("reply_to", b"__consumer_offsets"), reply_prefixes=("",)) == "reply_to_forbidden"
    assert address(("reply_to", b"anything"), reply_prefixes=("x.", "")).topic == "anything"


@pytest.mark.parametrize("raw", [b"", b"x" * 257])
def test_a_bad_correlation_id_is_unanswerable(raw: bytes) -> None:
    """An id that cannot be echoed as it came gives the caller nothing to find its answer by."""
    assert reason(("correlation_id", raw)) == "correlation_id_invalid"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, ContentType.MSGPACK),
        ({"content-type": b"application/json"}, ContentType.JSON),
        ({"content-type": b"application/json", "accept": b"application/msgpack"}, ContentType.MSGPACK),
        ({"content-type": b"Application/JSON; charset=utf-8"}, ContentType.JSON),
        ({"content-type": b"application/json", "accept": b"text/html"}, ContentType.JSON),
        ({"content-type": b"\xff", "accept": b"application/json"}, ContentType.JSON),
        ({"content-type": b"text/plain", "accept": b"\xff"}, ContentType.MSGPACK),
    ],
)
def test_replies_come_in_a_type_that_is_valid(headers: dict[str, bytes], expected: ContentType) -> None:
    """accept, else the request's type, else msgpack; what is invalid does not make a request unanswerable."""
    assert address(*headers.items()).content_type is expected


def test_request_headers_are_read() -> None:
    """Everything beside the address, with its defaults."""
    assert read_request_headers([]) == RequestHeaders(None, None, ContentType.MSGPACK, "default", ())
    found = read_request_headers(
        [
            ("tenant", "Zoë".encode()),
            ("priority", b"9"),
            ("deadline_ms", b"1700000000000"),
            ("content-type", b"application/json"),
            ("accept", b"application/msgpack"),
            ("traceparent", TRACEPARENT.encode()),
            ("tracestate", b"a=1"),
            ("baggage", b"k=v"),
        ]
    )
    trace = (("traceparent", TRACEPARENT), ("tracestate", "a=1"), ("baggage", "k=v"))
    assert found == RequestHeaders(9, 1_700_000_000_000, ContentType.JSON, "Zoë", trace)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        *(("tenant", raw) for raw in (b"", b"x" * 65, b"\xff")),
        *(("priority", raw) for raw in (b"10", b"-1", b"high", b"")),
        *(("deadline_ms", raw) for raw in (b"-5", b"soon", b"9" * 30)),
        *(("accept", raw) for raw in (b"*/*", b"\xff")),
        ("content-type", b"text/plain"),
    ],
)
def test_a_bad_header_is_an_error_that_names_it(name: str, raw: bytes) -> None:
    """The caller hears which header it was, and what is allowed."""
    with pytest.raises(RequestError, match=f"header '{name}' must be"):
        read_request_headers([(name, raw)])


@pytest.mark.parametrize(
    ("traceparent", "kept"),
    [
        (TRACEPARENT, True),
        (f"01-{'a' * 32}-{'1' * 16}-01-more", True),
        (f"{TRACEPARENT}-more", False),
        ("nonsense", False),
        (f"00-{'0' * 32}-{'1' * 16}-01", False),
        (f"00-{'a' * 32}-{'0' * 16}-01", False),
        (f"ff-{'a' * 32}-{'1' * 16}-01", False),
        (TRACEPARENT.upper(), False),
        (TRACEPARENT + "\n", False),
    ],
)
def test_an_invalid_traceparent_is_dropped(traceparent: str, kept: bool) -> None:
    """It starts a new trace, and takes its tracestate with it; baggage stays."""
    found = dict(
        read_request_headers([("traceparent", traceparent.encode()), ("tracestate", b"a=1"), ("baggage", b"k=v")]).trace
    )
    assert ("traceparent" in found, "tracestate" in found, "baggage" in found) == (kept, kept, True)


def test_what_a_client_writes_a_worker_reads() -> None:
    """write_request_headers and the two readers agree on every field."""
    headers = write_request_headers(
        correlation_id="abc", reply_to="replies.abc", reply_partition=0, tenant="t", priority=3, deadline_ms=5,
        content_type=ContentType.JSON, accept=ContentType.MSGPACK, trace=[("traceparent", TRACEPARENT)],
    )  # fmt: skip
    assert address(*headers) == ReplyAddress(b"abc", "replies.abc", 0, ContentType.MSGPACK, (), per_request=True)
    trace = (("traceparent", TRACEPARENT),)
    assert read_request_headers(headers) == RequestHeaders(3, 5, ContentType.JSON, "t", trace)
    short = write_request_headers(correlation_id=b"\xff", reply_to="replies.x", content_type=ContentType.MSGPACK)
    assert [name for name, _ in short] == ["correlation_id", "reply_to", "content-type"]


def test_a_reply_carries_the_id_under_all_names_the_caller_used() -> None:
    """Canonical headers first, then the aliases as they came, then at most one traceparent."""
    found = address(
        ("kafka_correlationId", b"\xff\x00"), ("kafka_replyTopic", b"replies.s"), ("accept", b"application/json")
    )
    assert write_reply_headers(found, "begin", TRACEPARENT) == [
        ("correlation_id", b"\xff\x00"), ("event", b"begin"), ("content-type", b"application/json"),
        ("kafka_correlationId", b"\xff\x00"), ("traceparent", TRACEPARENT.encode()),
    ]  # fmt: skip
    assert "traceparent" not in dict(write_reply_headers(found, "tokens"))


@FUZZ
@given(HEADERS)
def test_random_headers_bring_declared_errors_only(headers: list[tuple[str, bytes]]) -> None:
    """Whatever the bytes: an address or Unanswerable, headers or RequestError; an address can be written again."""
    with contextlib.suppress(Unanswerable):
        write_reply_headers(address(*headers), "end")
    with contextlib.suppress(RequestError):
        read_request_headers(headers)
