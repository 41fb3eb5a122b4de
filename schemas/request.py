"""The value of a request record (protocol.md 2): the field table, and the errors that say what is allowed.

A field's `description` completes the sentence "field 'x' must be ...", in errors and in the AsyncAPI document alike.
What depends on the model (vocabulary, context, an empty prompt) is the worker's to check.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import ErrorDetails

from schemas.errors import RequestError
from schemas.reasons import ErrorCode

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20

_PENALTY = "a number from -2 to 2; counts generated tokens only"

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[tuple[TokenId, ...], Field(strict=False, fail_fast=True)]
NonEmpty = Annotated[str, Field(min_length=1)]
StopStrings = Annotated[tuple[NonEmpty, ...], Field(strict=False, fail_fast=True), Field(max_length=MAX_STOP_STRINGS)]


@dataclass(frozen=True, slots=True)
class Message:
    role: NonEmpty
    content: str


Messages = Annotated[tuple[Message, ...], Field(min_length=1)]


# Containers that a caller can fill with a million mistakes are checked by hand: pydantic would list them all.


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("")  # noqa: TRY004  pydantic takes only this for a mistake of the caller
    messages: list[Message] = []
    for index, item in enumerate(value):
        match item:
            case {"role": str(role), "content": str(content)} if role and len(item) == 2:
                messages.append(Message(role, content))
            case _:
                raise ValueError(f" (item {index} is not)")
    return tuple(messages)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("")  # noqa: TRY004  as above
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token_id = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
        if type(token_id) is not int or not 0 <= token_id < 2**31 or token_id in biases:
            raise ValueError("")
        if type(bias) not in (int, float) or not abs(bias) <= sys.float_info.max:  # false for NaN
            raise ValueError("")
        biases[token_id] = float(bias)
    return biases


def _stop_strings(value: object) -> object:
    return (value,) if isinstance(value, str) else value


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
        Annotated[Messages, BeforeValidator(_messages, json_schema_input_type=Messages)] | None,
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
        dict[int, float],
        PlainValidator(_logit_bias, json_schema_input_type=dict[int, float]),
        Field(description="a map of token id (an integer, or a string of digits) to number"),
    ] = {}
    stop: Annotated[
        StopStrings,
        BeforeValidator(_stop_strings, json_schema_input_type=NonEmpty | StopStrings),
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
    unknown = next((name for name in fields if name not in PromptRequest.model_fields), None)
    if unknown is not None:
        close = get_close_matches(unknown[:64], PromptRequest.model_fields, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RequestError(ErrorCode.INVALID_REQUEST, f"unknown field {unknown[:64]!r}{hint}")
    try:
        return PromptRequest.model_validate(fields)
    except ValidationError as error:
        message = _message(error.errors(include_url=False, include_input=False)[0])
        raise RequestError(ErrorCode.INVALID_REQUEST, message) from None


def to_fields(request: PromptRequest) -> dict[str, Any]:
    """What differs from the defaults: the value of the request record."""
    return request.model_dump(exclude_defaults=True)


def _message(detail: ErrorDetails) -> str:
    """A sentence from pydantic's first complaint, without its words and without the caller's input."""
    location, mistake = detail["loc"], str(detail.get("ctx", {}).get("error", ""))
    if not location:
        return mistake
    name = str(location[0])
    item = next((f" (item {part} is not)" for part in location[1:] if isinstance(part, int)), mistake)
    return f"field {name!r} must be {PromptRequest.model_fields[name].description}{item}"
