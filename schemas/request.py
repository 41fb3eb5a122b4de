"""The value of a request record (protocol.md 2): the field table, and the errors that say what is allowed.

A field's `description` completes the sentence "field 'x' must be ...", in errors and in the AsyncAPI document alike.
What depends on the model (vocabulary, context, an empty prompt) is the worker's to check.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from schemas.errors import RequestError
from schemas.reasons import ErrorCode

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20

_PENALTY = "a number from -2 to 2; counts generated tokens only"

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[tuple[TokenId, ...], Field(strict=False, fail_fast=True)]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    role: Annotated[str, Field(min_length=1)]
    content: str


def _stop_strings(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _int_keys(value: object) -> object:
    """JSON has string keys only; `str.isdecimal` also takes digits of other scripts, as `int` does."""
    if not isinstance(value, dict):
        return value
    converted = {int(k) if isinstance(k, str) and k.isdecimal() and len(k) < 20 else k: v for k, v in value.items()}
    if len(converted) != len(value):
        raise ValueError("a token id twice")
    return converted


class PromptRequest(BaseModel):
    """A request, validated as far as that goes without the model. Make it with `parse_request`."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        json_schema_extra={"oneOf": [{"required": [source]} for source in ("prompt", "messages", "token_ids")]},
    )

    prompt: Annotated[str | None, Field(description="a string")] = None
    messages: Annotated[
        Annotated[tuple[Message, ...], Field(strict=False, fail_fast=True), Field(min_length=1)] | None,
        Field(description="a list of at least one {role, content}, both strings"),
    ] = None
    token_ids: Annotated[
        Annotated[TokenIds, Field(min_length=1)] | None,
        Field(description="a list of at least one token id of the vocabulary"),
    ] = None
    model: Annotated[str | None, Field(description="a string: the name of the model that the lane serves")] = None
    max_tokens: Annotated[
        int | None, Field(ge=1, description="an integer of at least 1; what exceeds the context is cut")
    ] = None
    min_tokens: Annotated[int, Field(ge=0, description="an integer of at least 0; nothing ends a choice before")] = 0
    temperature: Annotated[float, Field(ge=0, description="a number of at least 0; 0 is greedy")] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, description="a number above 0, at most 1")] = 1.0
    top_k: Annotated[
        Annotated[int, Field(ge=1)] | Annotated[int, Field(ge=-1, le=-1)],
        Field(description="an integer of at least 1, or -1 for all"),
    ] = -1
    min_p: Annotated[float, Field(ge=0, lt=1, description="a number of at least 0, below 1")] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2, description=_PENALTY)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, description=_PENALTY)] = 0.0
    repetition_penalty: Annotated[
        float, Field(gt=0, description="a number above 0; counts prompt and generated tokens")
    ] = 1.0
    logit_bias: Annotated[
        dict[TokenId, float],
        BeforeValidator(_int_keys),
        Field(description="a map of token id (an integer, or a string of digits) to number"),
    ] = {}
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(strict=False, max_length=MAX_STOP_STRINGS),
        BeforeValidator(_stop_strings, json_schema_input_type=str | tuple[str, ...]),
        Field(description="a string or a list of at most 16, none empty; what matches is not delivered"),
    ] = ()
    stop_token_ids: Annotated[TokenIds, Field(description="a list of token ids that end a choice")] = ()
    ignore_eos: Annotated[bool, Field(description="true or false; true: generate past the end of sequence")] = False
    seed: Annotated[
        int | None,
        Field(ge=-(2**63), lt=2**64, description="an integer of 64 bits; the same seed gives the same tokens"),
    ] = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES, description="an integer from 1 to 16: how many choices")] = 1
    logprobs: Annotated[
        int | None, Field(ge=0, le=MAX_LOGPROBS, description="an integer from 0 to 20, or null: alternatives per token")
    ] = None
    stream: Annotated[bool, Field(description="true or false; false: one end record carries everything")] = True
    user: Annotated[str | None, Field(description="a string; kept in traces only")] = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if sum(source is not None for source in (self.prompt, self.messages, self.token_ids)) != 1:
            raise ValueError("exactly one of 'prompt', 'messages' and 'token_ids' is needed")
        if self.n > 1 and self.temperature == 0:
            raise ValueError("'n' above 1 needs a 'temperature' above 0: greedy choices would all be the same")
        return self


def parse_request(fields: Mapping[str, object]) -> PromptRequest:
    """The request of a decoded value. Raises RequestError that names the field and never contains the prompt."""
    try:
        return PromptRequest.model_validate(fields)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        raise RequestError(ErrorCode.INVALID_REQUEST, _message(details)) from None


def to_fields(request: PromptRequest) -> dict[str, Any]:
    """What differs from the defaults: the value of the request record."""
    return request.model_dump(exclude_defaults=True)


def _message(details: list[Any]) -> str:
    unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1]
    if unknown:
        name = str(unknown[0][0])[:64]
        close = get_close_matches(name, PromptRequest.model_fields, n=1)
        return f"unknown field {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    first = details[0]
    if not first["loc"]:
        return str(first["ctx"]["error"])
    name = first["loc"][0]
    item = next((f" (item {part} is not)" for part in first["loc"][1:] if isinstance(part, int)), "")
    return f"field {name!r} must be {PromptRequest.model_fields[name].description}{item}"
