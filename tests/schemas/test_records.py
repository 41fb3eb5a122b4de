"""Reply, control and usage records on the wire."""

import contextlib
import math
import struct

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.codec import ContentType, decode_map, encode_map
from schemas.dead_letters import dead_letter_headers
from schemas.errors import DecodeError, ProtocolError, RequestError
from schemas.reasons import FinishReason
from schemas.records import (
    MIN_LOGPROB,
    Begin,
    Cancel,
    ChoiceResult,
    End,
    ErrorInfo,
    InputRef,
    Left,
    LogRecord,
    Preemptions,
    Timing,
    TokenLogprob,
    Tokens,
    Usage,
    UsageRecord,
    decode_control,
    decode_reply,
    decode_usage_input,
    encode_cancel,
    encode_reply,
    encode_usage,
    event_of,
)

BOTH = pytest.mark.parametrize("content_type", list(ContentType))
FUZZ = settings(max_examples=100, deadline=None, database=None)
SOURCE = InputRef("prompts.standard", 3, 17, 1_700_000_000_000)
LOGPROBS = (TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5))), TokenLogprob(9, 0.0))
RECORDS: list[LogRecord] = [
    Begin(restart=False, worker="w", model="m", prompt_tokens=3, seed=2**64 - 1, queued_ms=1.5, input=SOURCE),
    Tokens(attempt=0, choice=1, position=2, token_ids=(5, 9), text="héy"),
    Tokens(attempt=0, choice=0, position=0, token_ids=(5, 9), text="", logprobs=LOGPROBS),
    End(attempt=-1, finish_reason=FinishReason.ERROR, error=ErrorInfo("overloaded", "later", 500)),
    End(
        attempt=7,
        finish_reason=(FinishReason.STOP, FinishReason.LENGTH),
        usage=Usage(3, 4, 1),
        timing=Timing(1.0, None, 2.0),
        preemptions=Preemptions(1, 2),
        choices=(ChoiceResult("a", (1,), FinishReason.STOP), ChoiceResult("b", (5, 9), FinishReason.LENGTH, LOGPROBS)),
        tail={0: "x", 15: "y"},
    ),
    Left(attempt=7),
]


def headers_of(record: LogRecord, content_type: ContentType) -> list[tuple[str, bytes]]:
    return [("event", event_of(record).encode()), ("content-type", content_type.encode())]


@BOTH
@pytest.mark.parametrize("record", RECORDS, ids=event_of)
def test_a_record_comes_back_as_it_went(record: LogRecord, content_type: ContentType) -> None:
    """Every field of every event, in both types; the tail's keys are integers again."""
    assert decode_reply(headers_of(record, content_type), encode_reply(record, content_type)) == record


@BOTH
@pytest.mark.parametrize("record", RECORDS, ids=event_of)
def test_unknown_fields_are_ignored(record: LogRecord, content_type: ContentType) -> None:
    """The contract may grow under a reader."""
    value = encode_map({**record.to_fields(), "new": {"x": [1]}}, content_type)
    assert decode_reply(headers_of(record, content_type), value) == record


def test_unknown_events_are_skipped() -> None:
    """An event that this reader does not know is None, whatever its value."""
    assert decode_reply([("event", b"keepalive")], b"\xc1") is None
    assert decode_reply([("event", b"\xff")], None) is None


@pytest.mark.parametrize("record", RECORDS, ids=event_of)
def test_a_missing_or_mistyped_field_is_a_protocol_error(record: LogRecord) -> None:
    """It names the event and the field."""
    fields = record.to_fields()
    optional = {"v", "logprobs", "error", "usage", "timing", "preemptions", "choices", "tail"}
    for name in fields.keys() - optional:
        missing = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(ProtocolError, match=f"{event_of(record)}: field '{name}"):
            type(record).from_fields(missing)
    for name in fields:
        with pytest.raises(ProtocolError, match=f"{event_of(record)}: field '{name}"):
            type(record).from_fields({**fields, name: object()})


@pytest.mark.parametrize(
    ("event", "change"),
    [
        ("tokens", {"token_ids": []}),
        ("tokens", {"token_ids": [True]}),
        ("tokens", {"position": -1}),
        ("tokens", {"attempt": "0"}),
        ("tokens", {"text": b"x"}),
        ("end", {"attempt": -2}),
        ("end", {"finish_reason": "tired"}),
        ("end", {"finish_reason": []}),
        ("end", {"tail": {"a": "x"}}),
        ("begin", {"restart": 1}),
        ("begin", {"input": ["t", 0, 1]}),
        ("begin", {"input": ["t", 0, 1, True]}),
        ("left", {"attempt": -1}),
    ],
)
def test_values_outside_the_contract_are_protocol_errors(event: str, change: dict[str, object]) -> None:
    """An empty tokens record, a negative position, a boolean for a number, a word nobody knows."""
    record = next(each for each in RECORDS if event_of(each) == event)
    with pytest.raises(ProtocolError):
        type(record).from_fields({**record.to_fields(), **change})


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("event", b"end")],
        [("event", b"end"), ("content-type", b"text/plain")],
        [("event", b"end"), ("content-type", None)],
    ],
)
def test_a_reply_without_its_headers_is_a_protocol_error(headers: list[tuple[str, bytes]]) -> None:
    """event and content-type are on every reply."""
    with pytest.raises(ProtocolError):
        decode_reply(headers, encode_reply(RECORDS[3], ContentType.MSGPACK))


def test_an_undecodable_reply_is_a_protocol_error() -> None:
    """Readers of replies see one exception, DecodeError is for requests."""
    with pytest.raises(ProtocolError):
        decode_reply([("event", b"end"), ("content-type", b"application/json")], None)


@BOTH
def test_log_probabilities_on_the_wire_are_finite(content_type: ContentType) -> None:
    """A masked token's -inf goes out as a large negative number, and so does NaN."""
    record = Tokens(0, 0, 0, (5,), "", (TokenLogprob(5, math.nan, ((6, -math.inf),)),))
    decoded = decode_reply(headers_of(record, content_type), encode_reply(record, content_type))
    assert isinstance(decoded, Tokens)
    assert decoded.logprobs == (TokenLogprob(5, MIN_LOGPROB, ((6, MIN_LOGPROB),)),)


def test_older_input_records_come_first() -> None:
    """By timestamp, then topic, partition and offset."""
    older = [
        InputRef("b", 9, 9, 1),
        InputRef("a", 9, 9, 2),
        InputRef("b", 0, 9, 2),
        InputRef("b", 1, 0, 2),
        InputRef("b", 1, 1, 2),
    ]
    shuffled = [older[place] for place in (3, 0, 4, 1, 2)]
    assert sorted(shuffled, key=lambda ref: ref.age_key) == older


@BOTH
def test_a_cancel_survives_the_wire(content_type: ContentType) -> None:
    """The id is text where it can be; readers take text and bytes."""
    value = encode_cancel(Cancel("é".encode()), content_type)
    assert decode_map(value, content_type) == {"op": "cancel", "correlation_id": "é"}
    assert decode_control([("content-type", content_type.encode())], value) == Cancel("é".encode())


def test_a_cancel_of_a_binary_id_needs_msgpack() -> None:
    """JSON has no bytes."""
    cancel = Cancel(b"\xff\x00")
    assert decode_control([], encode_cancel(cancel, ContentType.MSGPACK)) == cancel
    with pytest.raises(TypeError):
        encode_cancel(cancel, ContentType.JSON)


def test_unknown_control_operations_are_skipped_and_bad_ones_refused() -> None:
    """An op of a later version is None; a cancel without an id, and what is no map, are errors."""
    assert decode_control([], msgpack.packb({"op": "drain"})) is None
    for fields in ({"op": "cancel"}, {"op": "cancel", "correlation_id": 5}, {"op": "cancel", "correlation_id": ""}):
        with pytest.raises(RequestError, match="correlation_id"):
            decode_control([], msgpack.packb(fields))
    for headers, value in (
        ([], None),
        ([("content-type", b"text/plain")], b"\x80"),
        ([("content-type", b"\xff")], b"\x80"),
    ):
        with pytest.raises(DecodeError):
            decode_control(headers, value)


def test_a_usage_record_says_what_a_request_cost() -> None:
    """All fields of the contract, the id as text where it can be."""
    record = UsageRecord(
        tenant="t", lane="batch", model="m", correlation_id=b"abc", input=SOURCE, finish_reason=FinishReason.STOP,
        prompt_tokens=1, completion_tokens=2, cached_tokens=0, queued_ms=1.0, total_ms=2.0, at_ms=3,
    )  # fmt: skip
    assert decode_map(encode_usage(record), ContentType.MSGPACK) == {
        "v": 1, "tenant": "t", "lane": "batch", "model": "m", "correlation_id": "abc",
        "input": ["prompts.standard", 3, 17, 1_700_000_000_000], "finish_reason": "stop", "prompt_tokens": 1,
        "completion_tokens": 2, "cached_tokens": 0, "queued_ms": 1.0, "total_ms": 2.0, "at_ms": 3,
    }  # fmt: skip


def test_a_usage_record_says_which_request_was_answered() -> None:
    """`input` of either form; what is none raises ProtocolError."""
    record = UsageRecord("t", "batch", "m", b"abc", SOURCE, FinishReason.STOP, 1, 2, 0, 1.0, 2.0, 3)
    for content_type in ContentType:
        headers = [("content-type", content_type.encode())]
        assert decode_usage_input(headers, encode_usage(record, content_type)) == SOURCE
    assert decode_usage_input([], encode_usage(record)) == SOURCE
    for headers, value in (
        ([], None),
        ([], b"garbage"),
        ([], encode_map({"v": 1}, ContentType.MSGPACK)),
        ([], encode_map({"input": ["t", 1]}, ContentType.MSGPACK)),
        ([("content-type", b"text/plain")], encode_usage(record)),
        ([("content-type", b"\xff")], encode_usage(record)),
    ):
        with pytest.raises(ProtocolError):
            decode_usage_input(headers, value)


def test_dead_letters_keep_their_headers_and_say_where_they_came_from() -> None:
    """As Spring writes them: 4-byte partition, 8-byte offset and timestamp, big-endian."""
    headers = dead_letter_headers([("a", b"\xff"), ("a", b"2")], SOURCE, "undecodable", "not a map")
    assert headers[:2] == [("a", b"\xff"), ("a", b"2")]
    assert dict(headers[2:]) == {
        "dlq_reason": b"undecodable",
        "dlq_message": b"not a map",
        "kafka_dlt-original-topic": b"prompts.standard",
        "kafka_dlt-original-partition": struct.pack(">i", 3),
        "kafka_dlt-original-offset": struct.pack(">q", 17),
        "kafka_dlt-original-timestamp": struct.pack(">q", 1_700_000_000_000),
        "kafka_dlt-exception-message": b"not a map",
    }
    assert (
        dead_letter_headers([], InputRef("t", 0, 0, -1), "x", "")[5][1] == b"\xff" * 8
    )  # a record without a timestamp


TRACE, STALE, OURS = (f"00-{digit * 32}-{digit * 16}-01" for digit in "123")


@pytest.mark.parametrize(
    ("own", "expected"),
    [([], [OURS]), ([None], [OURS]), ([TRACE], [TRACE]), ([STALE, TRACE], [TRACE]), ([TRACE, None], [TRACE])],
)
def test_t36_dead_letters_have_exactly_one_traceparent(own: list[str | None], expected: list[str]) -> None:
    """The record's own last one, else the worker's; that comes after what the worker adds, so replays leave it out."""
    headers = [("traceparent", None if value is None else value.encode()) for value in own]
    letter = dead_letter_headers([*headers, ("a", b"1")], SOURCE, "x", "y", OURS)
    assert [value.decode() for name, value in letter if name == "traceparent"] == expected
    assert dict(letter)["a"] == b"1"
    names = [name for name, _ in letter]
    assert (names.index("traceparent") > names.index("dlq_reason")) == (expected == [OURS])


ODD = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(-5, 5), max_size=4)
)
FIELD_NAMES = sorted({name for record in RECORDS for name in record.to_fields()})


@FUZZ
@given(
    st.sampled_from(["begin", "tokens", "end", "left"]),
    st.dictionaries(st.sampled_from(FIELD_NAMES), ODD),
    st.binary(max_size=40),
)
def test_random_replies_bring_protocol_errors_only(event: str, fields: dict[str, object], raw: bytes) -> None:
    """A record, or ProtocolError."""
    for value in (msgpack.packb(fields), raw):
        with contextlib.suppress(ProtocolError):
            decode_reply([("event", event.encode()), ("content-type", b"application/msgpack")], value)


@FUZZ
@given(st.binary(max_size=60), st.sampled_from([b"application/json", b"application/msgpack", b""]))
def test_random_control_records_bring_request_errors_only(value: bytes, content_type: bytes) -> None:
    """A cancel, None, or RequestError."""
    with contextlib.suppress(RequestError):
        decode_control([("content-type", content_type)], value)
