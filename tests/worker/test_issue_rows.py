"""Issues that other engines had with what a request may ask for (the number in a name is the row), at the edge."""

import json

import pytest

from schemas.errors import RequestError
from schemas.reasons import ErrorCode, FinishReason
from schemas.request import parse_request
from schemas.topics import DEFAULT_TIERS
from tests.worker.world import EOS, VOCAB, Bytes, World
from worker.engine.outputs import SamplingParams
from worker.prepare import MAX_BIAS, MAX_REPETITION_PENALTY, ModelFacts, check_fields, sampling_params, tokenise

STANDARD = DEFAULT_TIERS["standard"]
MAX_LEN = 256


class BytesWithBos(Bytes):
    def encode(self, text: str) -> list[int]:
        return super().encode(text) or [1]


def model(tokenizer: Bytes | None = None) -> ModelFacts:
    return ModelFacts("fake", VOCAB, MAX_LEN, (EOS,), tokenizer or Bytes())


async def ends_of(*bodies: dict[str, object]) -> list:
    """The `end` of each request, all served together; every input is done, and a good one beside them is answered."""
    world = World()
    for i, body in enumerate(bodies):
        world.broker.create(f"replies.r{i}")
        fields = {"prompt": "Hello", "max_tokens": 3} | body
        world.publish(f"r{i}", raw=json.dumps({k: v for k, v in fields.items() if v is not None}).encode())
    world.publish("good")
    async with world.worker() as server:
        await world.serve(server)
    assert world.answer("good").end.finish_reason is FinishReason.LENGTH
    assert world.source.tracker.position == len(bodies) + 1
    return [world.answer(f"r{i}").end for i in range(len(bodies))]


async def test_row_25_log_probabilities_of_the_prompt_are_refused_by_name():
    """They are not in the contract: asked for under the names that others use, they are an error, not ignored."""
    for end, name in zip(
        await ends_of({"prompt_logprobs": 1}, {"echo": True}), ("prompt_logprobs", "echo"), strict=True
    ):
        assert end.error.code == ErrorCode.INVALID_REQUEST
        assert name in end.error.message


@pytest.mark.parametrize("max_tokens", [0, -1])
async def test_row_31_max_tokens_of_nothing_are_refused(max_tokens: int):
    """Zero and negative numbers are an error that says what is allowed."""
    (end,) = await ends_of({"max_tokens": max_tokens})
    assert (end.error.code, end.usage.completion_tokens) == (ErrorCode.INVALID_REQUEST, 0)
    assert "'max_tokens' must be an integer of at least 1" in end.error.message


async def test_row_32_an_empty_prompt_is_refused_without_bos():
    """There is nothing to start from: the caller is told, and the worker lives."""
    for end in await ends_of({"prompt": ""}, {"prompt": None, "token_ids": []}):
        assert end.error.code == ErrorCode.INVALID_REQUEST


def test_row_32_an_empty_prompt_is_the_bos_token():
    """Where the model has one, it is something to start from."""
    assert tokenise(parse_request({"prompt": ""}), STANDARD, model(BytesWithBos())).token_ids == (1,)


@pytest.mark.parametrize(
    ("num_prompt", "num_tokens"),
    [(MAX_LEN - 3, 3), (MAX_LEN - 1, 1), (MAX_LEN, None), (MAX_LEN + 1, None), (5000, None)],
)
async def test_row_33_the_context_has_an_exact_edge(num_prompt: int, num_tokens: int | None):
    """Up to one below the limit a prompt is served to `length`; from the limit on it is refused, with the limit."""
    (end,) = await ends_of({"prompt": "x" * num_prompt, "max_tokens": 100, "ignore_eos": True})
    if num_tokens is None:
        assert end.error.code == ErrorCode.PROMPT_TOO_LONG
        assert str(MAX_LEN - 1) in end.error.message
        assert str(num_prompt) in end.error.message
    else:
        assert end.finish_reason is FinishReason.LENGTH
        assert end.usage.completion_tokens == num_tokens


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"stop_token_ids": [5, VOCAB]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"5": 1.0, str(VOCAB): 1.0}}, "logit_bias"),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias"),
        ({"prompt": None, "token_ids": [1, VOCAB]}, "token_ids"),
        ({"min_tokens": 1, "stop_token_ids": list(range(VOCAB))}, "min_tokens"),
    ],
)
async def test_row_34_ids_outside_the_vocabulary_do_not_reach_the_model(body: dict[str, object], field: str):
    """Each is an error that names the field."""
    (end,) = await ends_of(body)
    assert end.error.code == ErrorCode.INVALID_REQUEST
    assert field in end.error.message


class BytesWithPad(Bytes):
    """Knows a token that the model does not, as after `<pad>` was added and the embedding not resized."""

    def encode(self, text: str) -> list[int]:
        return [VOCAB if c == "~" else ord(c) for c in text]

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        return [token_id for message in messages for token_id in self.encode(message["content"])]


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_row_34_ids_that_only_the_tokenizer_knows_do_not_reach_the_model(field: str):
    """One such id would fail the step, and all who are in it."""

    def request(text: str):
        return parse_request({field: text if field == "prompt" else [{"role": "user", "content": text}]})

    facts = model(BytesWithPad())
    assert tokenise(request("ab"), STANDARD, facts).token_ids == (97, 98)
    with pytest.raises(RequestError, match=f"{field}: a part of it is token {VOCAB}") as refused:
        tokenise(request("a~b"), STANDARD, facts)
    assert refused.value.code == ErrorCode.INVALID_REQUEST
    with pytest.raises(RequestError, match="this model's context is"):  # which is what is wrong with it first
        tokenise(request("~" * MAX_LEN), STANDARD, facts)


async def test_row_34_the_last_id_of_the_vocabulary_is_in_it():
    """The edge of the range is served."""
    body = {"stop_token_ids": [VOCAB - 1], "logit_bias": {str(VOCAB - 1): -5}, "prompt": None, "token_ids": [VOCAB - 1]}
    (end,) = await ends_of(body)
    assert end.error is None


def test_every_sampling_field_reaches_the_sampler():
    """What the contract has is in SamplingParams, value for value."""
    fields = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "logprobs": 3,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": -1.5, "8": 2},
        "min_tokens": 4,
    }
    request = parse_request({"prompt": "x"} | fields)
    check_fields(request, model())
    assert sampling_params(request, 11, VOCAB) == SamplingParams(
        **fields | {"logit_bias": ((7, -1.5), (8, 2.0)), "seed": 11}
    )


def test_values_that_float32_cannot_hold_are_cut_to_what_acts_like_them():
    """The largest numbers that a caller may send ban, force and flatten, as they would have done."""
    request = parse_request(
        {
            "prompt": "x",
            "temperature": 1e308,
            "top_k": 2**64,
            "repetition_penalty": 1e-308,
            "logit_bias": {1: 1e308, 2: -1e308},
            "min_tokens": 2**64,
        }
    )
    params = sampling_params(request, 0, VOCAB)
    assert params.logit_bias == ((1, MAX_BIAS), (2, -MAX_BIAS))
    assert params.repetition_penalty == 1 / MAX_REPETITION_PENALTY
    assert params.top_k == VOCAB
    assert params.temperature < 1e30


def test_a_model_with_a_lone_end_token_takes_min_tokens():
    """Nothing is refused as long as one token can be drawn."""
    stops = list(range(2, VOCAB))
    check_fields(parse_request({"prompt": "x", "min_tokens": 3, "stop_token_ids": stops}), model())
    with pytest.raises(RequestError, match="min_tokens"):
        check_fields(parse_request({"prompt": "x", "min_tokens": 3, "stop_token_ids": [1, *stops]}), model())
