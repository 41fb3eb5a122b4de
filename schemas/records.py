"""The records of reply logs, control and usage (protocol.md 3 and 7) as frozen dataclasses, and their wire form.

The dataclass annotations are the field tables: readers validate against them (unknown fields are ignored, so that the
contract can grow), and `schemas.asyncapi` prints them. Writing is spelled out by hand: it is the worker's hot path.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)

from schemas.codec import DEFAULT_LIMITS, ContentType, Limits, decode_map, encode_map
from schemas.errors import DecodeError, ProtocolError, RequestError
from schemas.reasons import ErrorCode, FinishReason

# An `end` may carry 16 choices with 20 alternatives a token; who writes it is our own worker.
REPLY_LIMITS = Limits(max_value_bytes=64 * 2**20, max_items=16_000_000, max_str_bytes=64 * 2**20)

MIN_LOGPROB = -1e30  # stands for -inf and NaN, which JSON cannot carry

Count = Annotated[StrictInt, Field(ge=0)]
Milliseconds = Annotated[StrictFloat, Field(allow_inf_nan=False)]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InputRef:
    """The place of a request record: what tells two records of one correlation id apart."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int

    @property
    def age_key(self) -> tuple[int, str, int, int]:
        """Sorts the older first (protocol.md 5.5)."""
        return (self.timestamp_ms, self.topic, self.partition, self.offset)

    def to_fields(self) -> list[object]:
        return [self.topic, self.partition, self.offset, self.timestamp_ms]


def _input_ref(wire: object) -> InputRef:
    if isinstance(wire, list | tuple) and [type(part) for part in wire[:4]] == [str, int, int, int]:
        return InputRef(*wire[:4])
    raise ValueError("must be [topic, partition, offset, timestamp_ms]")


_INPUT_SCHEMA = {
    "type": "array",
    "items": [{"type": "string"}, {"type": "integer"}, {"type": "integer"}, {"type": "integer"}],
    "minItems": 4,
    "description": "[topic, partition, offset, timestamp_ms] of the request record",
}
Input = Annotated[InputRef, PlainValidator(_input_ref), WithJsonSchema(_INPUT_SCHEMA)]


def _finite(logprob: float) -> float:
    return max(MIN_LOGPROB, logprob)  # in this order, NaN loses too


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms. What is not finite goes out as MIN_LOGPROB."""

    token_id: StrictInt
    logprob: StrictFloat
    top: Annotated[
        tuple[tuple[StrictInt, StrictFloat], ...],
        Field(description="[token id, logprob] of the alternatives, most likely first"),
    ] = ()

    def to_fields(self) -> dict[str, object]:
        top = [[token_id, _finite(logprob)] for token_id, logprob in self.top]
        return {"token_id": self.token_id, "logprob": _finite(self.logprob), "top": top}


Logprobs = Annotated[tuple[TokenLogprob, ...], Field(description="one entry per token")] | None


@dataclass(frozen=True, slots=True)
class Begin:
    """An attempt starts. Its offset in the reply log is the attempt's number."""

    restart: Annotated[StrictBool, Field(description="forget what came before")]
    worker: StrictStr
    model: StrictStr
    prompt_tokens: Count
    seed: Annotated[StrictInt, Field(description="the one of the log's first begin counts")]
    queued_ms: Milliseconds
    input: Input
    v: Annotated[StrictInt, Field(description="version of the protocol")] = 1

    def to_fields(self) -> dict[str, object]:
        return {
            "v": self.v,
            "restart": self.restart,
            "worker": self.worker,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "seed": self.seed,
            "queued_ms": self.queued_ms,
            "input": self.input.to_fields(),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> Self:
        return _read(cls, fields)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some more tokens of one choice."""

    attempt: Annotated[Count, Field(description="the offset of this attempt's begin in the reply log")]
    choice: Count
    position: Annotated[Count, Field(description="how many tokens of this choice precede this record")]
    token_ids: Annotated[tuple[StrictInt, ...], Field(min_length=1)]
    text: Annotated[StrictStr, Field(description="what has become safe to show")]
    logprobs: Logprobs = None

    def to_fields(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "attempt": self.attempt,
            "choice": self.choice,
            "position": self.position,
            "token_ids": self.token_ids,
            "text": self.text,
        }
        if self.logprobs is not None:
            fields["logprobs"] = [entry.to_fields() for entry in self.logprobs]
        return fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> Self:
        return _read(cls, fields)


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """`code` is an ErrorCode; readers take any string, since the contract may grow."""

    code: Annotated[StrictStr, Field(examples=[code.value for code in ErrorCode])]
    message: StrictStr
    retry_after_ms: Annotated[
        StrictInt | None, Field(description="with codes overloaded and quota_exceeded, if known")
    ] = None

    def to_fields(self) -> dict[str, object]:
        fields: dict[str, object] = {"code": self.code, "message": self.message}
        if self.retry_after_ms is not None:
            fields["retry_after_ms"] = self.retry_after_ms
        return fields


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: Count
    completion_tokens: Annotated[Count, Field(description="of all choices")]
    cached_tokens: Annotated[Count, Field(description="prompt tokens found in the prefix cache")] = 0

    def to_fields(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
        }


@dataclass(frozen=True, slots=True)
class Timing:
    queued_ms: Milliseconds
    ttft_ms: Annotated[Milliseconds | None, Field(description="time to first token; null: there was none")]
    total_ms: Milliseconds

    def to_fields(self) -> dict[str, object]:
        return {"queued_ms": self.queued_ms, "ttft_ms": self.ttft_ms, "total_ms": self.total_ms}


@dataclass(frozen=True, slots=True)
class Preemptions:
    """How often the request lost its blocks, by how it got them back."""

    recompute: Count = 0
    swap: Count = 0

    def to_fields(self) -> dict[str, object]:
        return {"recompute": self.recompute, "swap": self.swap}


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """A whole choice, when the request was not streamed."""

    text: StrictStr
    token_ids: tuple[StrictInt, ...]
    finish_reason: FinishReason
    logprobs: Logprobs = None

    def to_fields(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason.value,
        }
        if self.logprobs is not None:
            fields["logprobs"] = [entry.to_fields() for entry in self.logprobs]
        return fields


def _int_keys(wire: object) -> object:
    """JSON has string keys only."""
    if not isinstance(wire, dict):
        return wire
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: text for key, text in wire.items()}


@dataclass(frozen=True, slots=True)
class End:
    """The request is over. The first `end` that the reader rule accepts is the only one."""

    attempt: Annotated[StrictInt, Field(ge=-1, description="-1: the request was never begun")]
    finish_reason: Annotated[
        FinishReason | Annotated[tuple[FinishReason, ...], Field(min_length=1)],
        Field(description="one for all choices, or one per choice"),
    ]
    error: ErrorInfo | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    preemptions: Preemptions | None = None
    choices: Annotated[tuple[ChoiceResult, ...] | None, Field(description="when the request was not streamed")] = None
    tail: Annotated[
        dict[Count, StrictStr],
        BeforeValidator(_int_keys),
        Field(description="choice -> text that was held back and that no token is left to carry"),
    ] = field(default_factory=dict)

    def to_fields(self) -> dict[str, object]:
        reason = self.finish_reason
        fields: dict[str, object] = {
            "attempt": self.attempt,
            "finish_reason": reason.value if isinstance(reason, FinishReason) else [each.value for each in reason],
        }
        for name, part in (
            ("error", self.error),
            ("usage", self.usage),
            ("timing", self.timing),
            ("preemptions", self.preemptions),
        ):
            if part is not None:
                fields[name] = part.to_fields()
        if self.choices is not None:
            fields["choices"] = [choice.to_fields() for choice in self.choices]
        if self.tail:
            fields["tail"] = self.tail
        return fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> Self:
        return _read(cls, fields)


@dataclass(frozen=True, slots=True)
class Left:
    """A worker that lives has given an attempt up of which no token was sent: it is not among those that workers died
    of. The attempt's last record; it changes nothing for callers."""

    attempt: Annotated[Count, Field(description="the offset of this attempt's begin in the reply log")]

    def to_fields(self) -> dict[str, object]:
        return {"attempt": self.attempt}

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> Self:
        return _read(cls, fields)


ReplyRecord = Begin | Tokens | End  # what callers see
LogRecord = ReplyRecord | Left  # what may lie in a reply log

_EVENTS: dict[str, type[Begin] | type[Tokens] | type[End] | type[Left]] = {
    "begin": Begin,
    "tokens": Tokens,
    "end": End,
    "left": Left,
}


def event_of(record: LogRecord) -> str:
    """The `event` header of a record."""
    return type(record).__name__.lower()


def encode_reply(record: LogRecord, content_type: ContentType) -> bytes:
    return encode_map(record.to_fields(), content_type)


def decode_reply(headers: Sequence[tuple[str, bytes]], value: bytes | None) -> LogRecord | None:
    """The record of a reply log, or None for an event that this reader does not know. Raises ProtocolError."""
    last = dict(headers)
    event = last.get("event")
    if event is None:
        raise ProtocolError("a reply record has no header 'event'")
    record_type = _EVENTS.get(event.decode(errors="replace"))
    if record_type is None:
        return None
    try:
        content_type = ContentType((last.get("content-type") or b"").decode(errors="replace"))
        fields = decode_map(value, content_type, REPLY_LIMITS)
    except DecodeError as error:
        raise ProtocolError(f"{event.decode()}: {error.message}") from None
    except ValueError:
        raise ProtocolError(f"{event.decode()}: the header 'content-type' is missing or unknown") from None
    return record_type.from_fields(fields)


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """What a finished request cost. Delivered at least once: deduplicate by `input`."""

    tenant: StrictStr
    lane: StrictStr
    model: StrictStr
    correlation_id: Annotated[bytes, WithJsonSchema({"type": "string", "description": "bytes where it is not UTF-8"})]
    input: Input
    finish_reason: FinishReason | tuple[FinishReason, ...]
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    queued_ms: Milliseconds
    total_ms: Milliseconds
    at_ms: Annotated[StrictInt, Field(description="Unix time of the end")]
    v: StrictInt = 1

    def to_fields(self) -> dict[str, object]:
        reason = self.finish_reason
        return {
            "v": self.v,
            "tenant": self.tenant,
            "lane": self.lane,
            "model": self.model,
            "correlation_id": _text_or_bytes(self.correlation_id),
            "input": self.input.to_fields(),
            "finish_reason": reason.value if isinstance(reason, FinishReason) else [each.value for each in reason],
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "queued_ms": self.queued_ms,
            "total_ms": self.total_ms,
            "at_ms": self.at_ms,
        }


def encode_usage(record: UsageRecord, content_type: ContentType = ContentType.MSGPACK) -> bytes:
    """Raises TypeError for JSON and a correlation id that is not UTF-8."""
    return encode_map(record.to_fields(), content_type)


def decode_usage_input(headers: Sequence[tuple[str, bytes]], value: bytes | None) -> InputRef:
    """Of which request record a usage record says that it was answered. Raises ProtocolError."""
    try:
        content_type = ContentType((dict(headers).get("content-type") or ContentType.MSGPACK.encode()).decode())
        return _input_ref(decode_map(value, content_type, REPLY_LIMITS).get("input"))
    except (ValueError, DecodeError) as error:
        raise ProtocolError(f"usage: {error}") from None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request, wherever it is: waiting, running, swapped out or not yet arrived."""

    correlation_id: bytes


def encode_cancel(cancel: Cancel, content_type: ContentType) -> bytes:
    """Raises TypeError for JSON and a correlation id that is not UTF-8."""
    return encode_map({"op": "cancel", "correlation_id": _text_or_bytes(cancel.correlation_id)}, content_type)


def decode_control(headers: Sequence[tuple[str, bytes]], value: bytes | None) -> Cancel | None:
    """The control record, or None for an `op` that this reader does not know. Raises RequestError."""
    try:
        content_type = ContentType((dict(headers).get("content-type") or ContentType.MSGPACK.encode()).decode())
    except ValueError:
        raise DecodeError("the header 'content-type' is unknown") from None
    fields = decode_map(value, content_type, DEFAULT_LIMITS)
    if fields.get("op") != "cancel":
        return None
    correlation_id = fields.get("correlation_id")
    if isinstance(correlation_id, str):
        correlation_id = correlation_id.encode()
    if not isinstance(correlation_id, bytes) or not correlation_id:
        raise RequestError(ErrorCode.INVALID_REQUEST, "a cancel needs a correlation_id")
    return Cancel(correlation_id)


def _text_or_bytes(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


_ADAPTERS: dict[type, TypeAdapter[Any]] = {each: TypeAdapter(each) for each in (Begin, Tokens, End, Left)}


def _read(cls: type[T], fields: Mapping[str, object]) -> T:
    try:
        record: T = _ADAPTERS[cls].validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"{cls.__name__.lower()}: field {path!r}: {first['msg']}") from None
    return record
