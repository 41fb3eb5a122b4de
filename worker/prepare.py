"""From a request as it was published to one that the engine can run: everything that needs the model's facts."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from schemas.errors import RequestError
from schemas.reasons import ErrorCode
from schemas.request import PromptRequest
from schemas.topics import Tier
from worker.engine.outputs import SamplingParams
from worker.engine.protocols import Detokenizer
from worker.engine.request import Request

MAX_TEMPERATURE = 1e6  # uniform in float32; larger ones overflow
# A bias of this size bans or forces a token, whatever the model says, and survives any penalty in float32.
MAX_BIAS = 1e30
MAX_REPETITION_PENALTY = 1e6  # and its inverse


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]:
        """Token ids; of an empty text the BOS token, if there is one."""
        ...

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation by the model's chat template. Raises ValueError when there is none."""
        ...

    def new_detokenizer(self) -> Detokenizer: ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What must be known of the model to accept a request."""

    name: str
    vocab_size: int
    max_model_len: int  # prompt and answer together
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt in tokens, and how many may follow."""

    token_ids: tuple[int, ...]
    max_tokens: int


def check_tier(tenant: str, tier: str, allowed: Collection[str]) -> None:
    """Raises RequestError: the caller's mistake, which no waiting heals, so the code is none of quota or load."""
    if tier not in allowed:
        others = f"it may use {', '.join(allowed)}" if allowed else "nor any other"
        raise RequestError(ErrorCode.INVALID_REQUEST, f"tenant {tenant!r} may not use the tier {tier!r}; {others}")


def check_fields(request: PromptRequest, model: ModelFacts) -> None:
    """Refuses what cannot be served whatever the prompt. Raises RequestError."""
    if request.model is not None and request.model != model.name:
        message = f"model {request.model[:100]!r} is not served here; this lane's model is {model.name!r}"
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, message)
    _check_vocabulary("stop_token_ids", request.stop_token_ids, model)
    _check_vocabulary("logit_bias", request.logit_bias, model)
    if request.min_tokens and len({*model.eos_token_ids, *request.stop_token_ids}) >= model.vocab_size:
        message = "'min_tokens' leaves nothing to generate: 'stop_token_ids' are the whole vocabulary"
        raise RequestError(ErrorCode.INVALID_REQUEST, message)


def tokenise(request: PromptRequest, tier: Tier, model: ModelFacts) -> Prompt:
    """The prompt's tokens. CPU-bound for long texts. Raises RequestError."""
    token_ids = _token_ids(request, model)
    room = model.max_model_len - len(token_ids)
    if not token_ids:
        message = "the prompt is empty, and this model has no BOS token to start from"
        raise RequestError(ErrorCode.INVALID_REQUEST, message)
    if room < 1:
        raise RequestError(
            ErrorCode.PROMPT_TOO_LONG,
            f"the prompt has {len(token_ids)} tokens; this model's context is {model.max_model_len}, "
            f"so a prompt may have at most {model.max_model_len - 1}",
        )
    return Prompt(token_ids, min(request.max_tokens or tier.default_max_tokens, room))


def _token_ids(request: PromptRequest, model: ModelFacts) -> tuple[int, ...]:
    if request.token_ids is not None:
        token_ids, field = tuple(request.token_ids), "token_ids"
    elif request.messages is not None:
        field = "messages"
        try:
            token_ids = tuple(
                model.tokenizer.render([{"role": m.role, "content": m.content} for m in request.messages])
            )
        except ValueError as e:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"messages: {e}") from e
    else:
        token_ids, field = tuple(model.tokenizer.encode(request.prompt or "")), "prompt"
    # A tokenizer may know more than its model ("<pad>" added, embedding not resized), and one such id in a step would
    # fail everybody in it.
    if len(token_ids) < model.max_model_len:  # longer ones are refused for their length
        _check_vocabulary(field, token_ids, model)
    return token_ids


def _check_vocabulary(field: str, token_ids: Iterable[int], model: ModelFacts) -> None:
    bad = next((t for t in token_ids if not 0 <= t < model.vocab_size), None)
    if bad is not None:
        message = f"{field}: {bad} is not in the vocabulary; ids go from 0 to {model.vocab_size - 1}"
        if field in ("prompt", "messages"):
            message = (
                f"{field}: a part of it is token {bad} to the tokenizer, and the model has only {model.vocab_size}"
            )
        raise RequestError(ErrorCode.INVALID_REQUEST, message)


def engine_request(
    request_id: str,
    request: PromptRequest,
    prompt: Prompt,
    seed: int,
    model: ModelFacts,
    *,
    lane: str,
    tenant: str,
    priority: int,
    priority_class: int,
    arrival: float,
    deadline: float | None,
) -> Request:
    """What the engine runs, fresh. Times are seconds on the engine's clock."""
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        sampling=sampling_params(request, seed, model.vocab_size),
        max_tokens=prompt.max_tokens,
        eos_token_ids=model.eos_token_ids,
        stop_token_ids=request.stop_token_ids,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        n=request.n,
        lane=lane,
        tenant=tenant,
        priority=priority,
        priority_class=priority_class,
        arrival=arrival,
        deadline=deadline,
        new_detokenizer=model.tokenizer.new_detokenizer,
    )


def sampling_params(request: PromptRequest, seed: int, vocab_size: int) -> SamplingParams:
    """What the sampler computes with: values beyond its number types are cut to the largest that differs."""
    return SamplingParams(
        temperature=min(request.temperature, MAX_TEMPERATURE),
        top_p=request.top_p,
        top_k=min(request.top_k, vocab_size),
        min_p=request.min_p,
        seed=seed,
        logprobs=request.logprobs,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=_within(request.repetition_penalty, 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        logit_bias=tuple((i, _within(bias, -MAX_BIAS, MAX_BIAS)) for i, bias in request.logit_bias.items()),
        min_tokens=request.min_tokens,
    )


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)
