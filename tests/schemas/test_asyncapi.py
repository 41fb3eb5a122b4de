"""The AsyncAPI document says what the code does."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from schemas.asyncapi import document
from schemas.codec import ContentType, decode_map, encode_map
from schemas.dead_letters import CUT_HEADERS, CUT_KEY, CUT_VALUE, dead_letter_headers
from schemas.headers import (
    CORRELATION_ID_NAMES,
    REPLY_PARTITION_NAMES,
    REPLY_TO_NAMES,
    read_reply_address,
    write_reply_headers,
    write_request_headers,
)
from schemas.reasons import FinishReason
from schemas.records import (
    Begin,
    Cancel,
    ChoiceResult,
    End,
    ErrorInfo,
    InputRef,
    Left,
    Preemptions,
    Timing,
    TokenLogprob,
    Tokens,
    Usage,
    UsageRecord,
    encode_cancel,
    encode_reply,
    encode_usage,
)
from schemas.request import Message, PromptRequest
from schemas.topics import DEFAULT_TIERS, REPLY_TOPIC_CONFIG

DOCUMENT = document()
CHECKED_IN = Path(__file__).parents[2] / "docs" / "asyncapi.json"
SOURCE = InputRef("prompts.standard", 3, 17, 1000)
LOGPROBS = (TokenLogprob(5, -0.5, ((5, -0.5),)),)
USAGE = UsageRecord(
    "t", "batch", "m", b"abc", SOURCE, (FinishReason.STOP,), prompt_tokens=1, completion_tokens=2, cached_tokens=0,
    queued_ms=1.0, total_ms=2.0, at_ms=3,
)  # fmt: skip
END = End(
    0, FinishReason.STOP, ErrorInfo("internal", "x"), Usage(1, 2), Timing(1.0, None, 2.0), Preemptions(),
    (ChoiceResult("a", (5,), FinishReason.STOP, LOGPROBS),), {0: "x"},
)  # fmt: skip
SAMPLES = {
    "begin": lambda kind: encode_reply(Begin(False, "w", "m", 3, 2**64 - 1, 1.5, SOURCE), kind),
    "tokens": lambda kind: encode_reply(Tokens(0, 0, 0, (5,), "x", LOGPROBS), kind),
    "end": lambda kind: encode_reply(END, kind),
    "left": lambda kind: encode_reply(Left(0), kind),
    "cancel": lambda kind: encode_cancel(Cancel(b"abc"), kind),
    "usage": lambda kind: encode_usage(USAGE, kind),
    "prompt": lambda kind: encode_map(
        {"messages": [{"role": "user", "content": "Hi"}], "stop": "x", "logit_bias": {"5": 1}}, kind
    ),
}


def payload_validator(message: str) -> Draft7Validator:
    """A validator of the message's payload. The references stay local: the components travel with the schema."""
    payload = DOCUMENT["components"]["messages"][message]["payload"]
    Draft7Validator.check_schema(payload)
    return Draft7Validator({"allOf": [payload], "components": DOCUMENT["components"]})


def header_names(message: str) -> set[str]:
    return set(DOCUMENT["components"]["messages"][message]["headers"]["properties"])


def test_the_checked_in_document_is_current() -> None:
    """docs/asyncapi.json is what `python -m schemas.asyncapi` prints."""
    assert json.loads(CHECKED_IN.read_text()) == DOCUMENT, "run: python -m schemas.asyncapi > docs/asyncapi.json"


def test_every_field_is_in_it() -> None:
    """Each field of the request and of every record, nested ones included."""
    schemas = DOCUMENT["components"]["schemas"]
    assert set(schemas["PromptRequest"]["properties"]) == set(PromptRequest.model_fields)
    records = (
        Message,
        Begin,
        Tokens,
        End,
        Left,
        UsageRecord,
        TokenLogprob,
        ErrorInfo,
        Usage,
        Timing,
        Preemptions,
        ChoiceResult,
    )
    for record in records:
        assert set(schemas[record.__name__]["properties"]) == {field.name for field in fields(record)}
    assert schemas["FinishReason"]["enum"] == [reason.value for reason in FinishReason]


@pytest.mark.parametrize("content_type", list(ContentType))
@pytest.mark.parametrize("message", SAMPLES)
def test_encoded_records_match_their_schema(message: str, content_type: ContentType) -> None:
    """What the code writes, decoded as a map, is valid against the payload schema."""
    value = decode_map(SAMPLES[message](content_type), content_type)
    payload_validator(message).validate(json.loads(json.dumps(value)))


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("prompt", {"prompt": "x", "n": 17}),
        ("prompt", {"n": 1}),
        ("prompt", {"prompt": "x", "max_token": 1}),
        ("tokens", {"attempt": 0}),
        ("left", {"attempt": -1}),
        ("end", {"attempt": 0, "finish_reason": "tired"}),
    ],
)
def test_the_schemas_refuse_what_the_code_refuses(message: str, wrong: dict[str, Any]) -> None:
    """They are not so loose that they pass everything."""
    assert not payload_validator(message).is_valid(wrong)


def test_every_header_is_in_it() -> None:
    """What the code writes, and every alias that it reads."""
    request = write_request_headers(
        correlation_id="a", reply_to="replies.a", reply_partition=0, tenant="t", priority=1, deadline_ms=1,
        content_type=ContentType.JSON, accept=ContentType.JSON,
        trace=[("traceparent", ""), ("tracestate", ""), ("baggage", "")],
    )  # fmt: skip
    aliases = {*CORRELATION_ID_NAMES, *REPLY_TO_NAMES, *REPLY_PARTITION_NAMES}
    assert header_names("prompt") == {name for name, _ in request} | aliases
    address = read_reply_address([("kafka_correlationId", b"x")], SOURCE)
    assert {name for name, _ in write_reply_headers(address, "end", "x")} <= header_names("end")
    assert "traceparent" not in header_names("tokens") | header_names("left")
    letter = {name for name, _ in dead_letter_headers([], SOURCE, "x", "y", "z")}
    assert header_names("deadLetter") == letter | {CUT_VALUE, CUT_KEY, CUT_HEADERS}


def test_channels_and_replies_are_those_of_the_service() -> None:
    """Lanes by parameter, replies by the request's own header, reply topics configured, every reference resolvable."""
    channels = DOCUMENT["channels"]
    assert channels["lanes"]["address"] == "prompts.{lane}"
    assert channels["lanes"]["parameters"]["lane"]["enum"] == list(DEFAULT_TIERS)
    assert channels["requestReplies"]["address"] == "replies.{correlation_id}"
    configuration = channels["requestReplies"]["bindings"]["kafka"]["topicConfiguration"]
    assert {name: str(value) for name, value in configuration.items()} == REPLY_TOPIC_CONFIG
    reply = DOCUMENT["operations"]["complete"]["reply"]
    assert reply["address"]["location"] == "$message.header#/reply_to"
    events = {"begin", "tokens", "end", "left"}
    assert set(channels["replies"]["messages"]) == set(channels["requestReplies"]["messages"]) == events
    assert len(reply["messages"]) == len(events)
    assert channels["replies"]["address"] is None  # AsyncAPI: no address beside a runtime one
    for reference in references(DOCUMENT):
        node: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        return [each for key, value in node.items() for each in ([value] if key == "$ref" else references(value))]
    return [each for item in node for each in references(item)] if isinstance(node, list) else []
