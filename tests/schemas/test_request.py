"""The value of a request: limits, defaults and the sentences of its errors."""

import contextlib
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.codec import ContentType, decode_map, encode_map
from schemas.errors import RequestError
from schemas.reasons import ErrorCode
from schemas.request import Message, PromptRequest, parse_request, to_fields

FUZZ = settings(max_examples=100, deadline=None, database=None)


def complaint(**fields: object) -> str:
    with pytest.raises(RequestError) as caught:
        parse_request(fields)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    return caught.value.message


def test_a_prompt_is_enough() -> None:
    """Everything else has the contract's default."""
    expected: dict[str, Any] = {
        "prompt": "x", "messages": None, "token_ids": None, "model": None, "max_tokens": None, "min_tokens": 0,
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "logit_bias": {}, "stop": (), "stop_token_ids": (), "ignore_eos": False,
        "seed": None, "n": 1, "logprobs": None, "stream": True, "user": None,
    }  # fmt: skip
    assert parse_request({"prompt": "x"}).model_dump() == expected


def test_values_are_normalised() -> None:
    """A single stop string, token ids as strings, integers for floats and lists become what the engine wants."""
    request = parse_request(
        {"token_ids": [1, 2], "stop": "END", "logit_bias": {"5": 1, 7: -2.5}, "temperature": 2, "stop_token_ids": [3]}
    )
    assert (request.token_ids, request.stop, request.stop_token_ids) == ((1, 2), ("END",), (3,))
    assert request.logit_bias == {5: 1.0, 7: -2.5}
    assert isinstance(request.temperature, float)
    chat = parse_request({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]})
    assert chat.messages == (Message("user", "Hi"), Message("assistant", ""))


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", [1, 10**9, None], [0, -1, 1.0, True, "5"]),
        ("min_tokens", [0, 5], [-1, 0.5, None, False]),
        ("temperature", [0, 0.7, 5], [-0.1, "hot", True, None, float("nan"), float("inf"), 10**400]),
        ("top_p", [0.1, 1], [0, 1.1, -1, None]),
        ("top_k", [-1, 1, 50], [0, -2, 1.5, True]),
        ("min_p", [0, 0.9], [1, -0.1]),
        ("presence_penalty", [-2, 2.0], [2.1, -3, "x"]),
        ("frequency_penalty", [-2, 2.0], [2.1, -3, "x"]),
        ("repetition_penalty", [0.1, 2], [0, -1]),
        ("logit_bias", [{}, {"1": 2}, {3: -1.5}],
         [[], {"a": 1}, {"-1": 1}, {-1: 1}, {1.5: 1}, {True: 1}, {1: "x"}, {1: True}, {1: float("nan")}, {1: 10**400},
          {"1": 1, 1: 1}, {2**31: 1}, {"9" * 5000: 1}, None]),
        ("stop", ["x", [], ["a"] * 16], ["", [""], ["a"] * 17, [1], 5, None, {"a": 1}]),
        ("stop_token_ids", [[], [0, 7]], [[-1], ["a"], [True], 5, None, "12"]),
        ("ignore_eos", [True, False], [1, "true", None]),
        ("seed", [0, -(2**63), 2**64 - 1, None], [2**64, -(2**63) - 1, 1.5, "x"]),
        ("n", [1, 16], [0, 17, True, 1.0, None]),
        ("logprobs", [0, 20, None], [21, -1, True]),
        ("stream", [True, False], [0, "yes", None]),
        ("model", ["m", None], [5]),
        ("user", ["u", None], [5]),
    ],
)  # fmt: skip
def test_each_field_has_its_limits(field: str, good: list[object], bad: list[object]) -> None:
    """What is within them passes; what is not is an error that names the field and says what is allowed."""
    for value in good:
        parse_request({"prompt": "x", field: value})
    allowed = PromptRequest.model_fields[field].description
    for value in bad:
        assert complaint(prompt="x", **{field: value}).startswith(f"field '{field}' must be {allowed}")


@pytest.mark.parametrize(
    "messages",
    [[], "x", [1], [{"role": "user"}], [{"role": "", "content": "x"}], [{"role": "user", "content": 5}],
     [{"role": "user", "content": "x", "name": "y"}], [{"role": "user", "content": "x"}, None]],
)  # fmt: skip
def test_messages_are_role_and_content(messages: object) -> None:
    """Anything else in their place, or beside them, is refused."""
    assert complaint(messages=messages).startswith("field 'messages' must be a list of at least one {role, content}")


@pytest.mark.parametrize("token_ids", [[], [1, -1], [1, 2.0], ["1"], [True], "12", {"1": 1}, [2**31]])
def test_token_ids_are_non_negative_integers(token_ids: object) -> None:
    """A list of at least one; the vocabulary's size is the worker's to check."""
    assert complaint(token_ids=token_ids).startswith("field 'token_ids' must be a list of at least one")


def test_a_wrong_item_is_named_by_its_place() -> None:
    """A list of thousands says where it is wrong."""
    assert complaint(token_ids=[1, 2, "x"]).endswith("(item 2 is not)")
    assert complaint(messages=[{"role": "a", "content": "b"}, 7]).endswith("(item 1 is not)")


def test_a_misspelt_field_is_named_with_the_nearest() -> None:
    """`max_token` must not pass in silence."""
    assert complaint(prompt="x", max_token=3) == "unknown field 'max_token'; did you mean 'max_tokens'?"
    assert complaint(prompt="x", zzz=3) == "unknown field 'zzz'"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 3},
        {"prompt": "x", "token_ids": [1]},
        {"prompt": None},
        {"prompt": "", "messages": [{"role": "a", "content": ""}]},
    ],
)
def test_exactly_one_source_is_needed(fields: dict[str, object]) -> None:
    """None, or two of prompt, messages and token_ids, are refused; null counts as not there."""
    assert complaint(**fields) == "exactly one of 'prompt', 'messages' and 'token_ids' is needed"
    assert parse_request({"prompt": "x", "messages": None, "token_ids": None}).prompt == "x"


def test_several_greedy_choices_are_refused() -> None:
    """They would all be the same."""
    assert "'n'" in complaint(prompt="x", n=2, temperature=0)


def test_messages_never_contain_the_prompt() -> None:
    """Prompts are private: an error names fields, not contents."""
    wrong: list[dict[str, object]] = [
        {"prompt": 5, "user": "secret"},
        {"prompt": "secret", "n": "secret"},
        {"messages": [{"role": "secret"}]},
        {"prompt": "secret", "token_ids": ["secret"]},
        {"prompt": "x", "logit_bias": {"secret": 1}},
    ]
    for fields in wrong:
        assert "secret" not in complaint(**fields)


def test_large_requests_and_large_mistakes_are_quick() -> None:
    """200,000 token ids take milliseconds, and so does a value with 200,000 mistakes."""
    wrong: list[dict[str, object]] = [
        {"prompt": "x", **{f"k{i}": 0 for i in range(200_000)}},
        {"prompt": "x", "logit_bias": dict.fromkeys(range(-200_000, 0), "x")},
        {"messages": [{"role": "x", "content": "", **{f"k{i}": 0 for i in range(200_000)}}]},
        {"token_ids": ["x"] * 200_000},
        {"prompt": "x", "stop": [""] * 200_000},
    ]
    start = time.process_time()
    parse_request({"token_ids": list(range(200_000))})
    for fields in wrong:
        complaint(**fields)
    assert time.process_time() - start < 0.5  # measured: 20 ms; listing all mistakes took seconds


def test_a_request_survives_the_wire() -> None:
    """What a client writes with to_fields parses to an equal request, in both types; defaults stay at home."""
    request = parse_request(
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "stop": ["a"],
            "logit_bias": {5: 1},
            "n": 2,
            "seed": 7,
            "stream": False,
        }
    )
    fields = to_fields(request)
    assert set(fields) == {"messages", "stop", "logit_bias", "n", "seed", "stream"}
    for content_type in ContentType:
        assert parse_request(decode_map(encode_map(fields, content_type), content_type)) == request


def test_a_request_is_frozen() -> None:
    """Nothing downstream may change what the caller asked for."""
    with pytest.raises(ValueError):
        parse_request({"prompt": "x"}).n = 2  # type: ignore[misc]


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4),
    max_leaves=8,
)


@FUZZ
@given(st.dictionaries(st.sampled_from(sorted(PromptRequest.model_fields)) | st.text(max_size=5), ODD, max_size=5))
def test_random_fields_bring_request_errors_only(fields: dict[str, Any]) -> None:
    """A value parses, or is refused."""
    with contextlib.suppress(RequestError):
        parse_request(fields)
