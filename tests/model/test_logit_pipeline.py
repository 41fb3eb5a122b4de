"""Everything between logits and token, through the runner's own rows, against its definition and other libraries."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.model.sampling import Row, Rows, edited, filtered, log_softmax, noise
from worker.engine.outputs import SampledToken, SamplingParams

PLAIN = SamplingParams(temperature=1.0)


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    token = st.integers(0, vocab_size - 1)
    bias = st.floats(-8, 8, width=32) | st.sampled_from([-1e30, 1e30, -100.0, 100.0])
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.4, 1.0, 1.0, 1.8, 1e6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.97, 0.61, 0.05])),
        top_k=draw(st.sampled_from([-1, -1, 1, 3, 30, 256, 10**6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.013, 0.4])),
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        logprobs=draw(st.sampled_from([None, 0, 3, 20])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.3, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -1.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.6])),
        logit_bias=tuple(draw(st.dictionaries(token, bias, max_size=4)).items()),
        min_tokens=draw(st.sampled_from([0, 0, 1, 2, 5])),
    )


@st.composite
def rows_of(draw: st.DrawFn, vocab_size: int) -> Row:
    token = st.integers(0, min(vocab_size, 12) - 1)  # few, so that they repeat
    return Row(
        prompt=draw(st.lists(token, min_size=1, max_size=8)),
        sampling=draw(sampling_params(vocab_size)),
        end_token_ids=tuple(draw(st.lists(st.integers(0, vocab_size - 2), max_size=2))),
        choice=draw(st.integers(0, 15)),
        output=draw(st.lists(token, max_size=4)),
    )


def assert_drawn_by_definition(token: SampledToken, logits: NDArray[np.float32], row: Row) -> None:
    """`row` is as it was before the draw. Float32 may decide otherwise where the definition is on the edge."""
    values, sampling = edited(logits, row), row.sampling
    share = noise(sampling.seed % 2**64, row.choice, len(row.output))
    fits = []
    for on_the_edge in (1.0, 1 - 1e-5, 1 + 1e-5):
        p = filtered(values, replace(sampling, top_p=min(1.0, sampling.top_p * on_the_edge)))
        above = p[: token.token_id + 1].sum()
        fits.append(p[token.token_id] > 0 and above - p[token.token_id] - 1e-5 <= share <= above + 1e-5)
    if sampling.temperature == 0:
        assert values[token.token_id] == pytest.approx(values.max(), rel=1e-6, abs=1e-5)
    else:
        assert any(fits), (token, row)
    if sampling.logprobs is None:
        assert (token.logprob, token.top) == (None, ())
    else:
        raw = log_softmax(logits)
        best = np.argsort(-raw, kind="stable")[: sampling.logprobs]
        assert token.logprob == pytest.approx(raw[token.token_id], abs=1e-4)
        assert [token_id for token_id, _ in token.top] == best.tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(raw[best].tolist(), abs=1e-4)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_draw_is_that_of_its_definition(data: st.DataObject) -> None:
    """Rows with all fields, over several steps and displaced between them: each token follows from its row alone."""
    vocab_size = data.draw(st.sampled_from([5, 40, 256, 257, 600]))
    driver = Rows(data.draw(st.lists(rows_of(vocab_size), min_size=1, max_size=5)), vocab_size)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for _ in range(3):
        for index in range(len(driver.rows)):
            if data.draw(st.booleans()):
                driver.displace(index)
        logits = (3 * generator.standard_normal((len(driver.rows), vocab_size))).astype(np.float32)
        before = [replace(row, output=list(row.output)) for row in driver.rows]
        for row, token, values in zip(before, driver.step(logits), logits, strict=True):
            assert token is not None
            assert_drawn_by_definition(token, values, row)


def test_a_row_that_comes_back_draws_what_it_would_have_drawn() -> None:
    """Penalties, bias, mask, noise and log probabilities: a displaced row and one that stays are one and the same."""
    generator = np.random.default_rng(7)
    sampling = SamplingParams(
        temperature=0.9,
        top_p=0.95,
        seed=3,
        logprobs=4,
        presence_penalty=0.8,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias=((1, 2.0), (9, -3.0)),
        min_tokens=12,
    )
    stays, moves = (Rows([Row([1, 2, 3, 2], sampling, (0, 4))], 30) for _ in range(2))
    for step in range(40):
        if step % 3 == 0:
            moves.displace(0)
        logits = (2 * generator.standard_normal((1, 30))).astype(np.float32)
        assert stays.step(logits.copy()) == moves.step(logits.copy())
    assert not {0, 4} & set(stays.rows[0].output[:12])
    assert {0, 4} & set(stays.rows[0].output[12:])


def test_no_row_knows_its_company() -> None:
    """Thirty rows of all kinds draw in one batch, in another order, and each alone, the very same tokens."""
    generator = np.random.default_rng(11)
    kinds = [
        PLAIN,
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=0.7, top_p=0.9, logprobs=0),
        SamplingParams(temperature=1.3, top_k=7, frequency_penalty=1.0),
        SamplingParams(temperature=1.0, top_p=0.999, top_k=700, presence_penalty=-1.0),
        SamplingParams(temperature=1.0, min_p=0.1, logit_bias=((3, 4.0),), logprobs=20),
        SamplingParams(temperature=1.0, min_tokens=4),
        SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=0.7, logit_bias=((5, -1e30),)),
        SamplingParams(temperature=2.0, top_p=0.6, min_p=0.01),
    ]

    def row(index: int) -> Row:
        return Row([index, 5, 6, 5], replace(kinds[index % len(kinds)], seed=index), (2, 8), choice=index % 3)

    count, vocab_size = 30, 1500
    logits = [(2.5 * generator.standard_normal((count, vocab_size))).astype(np.float32) for _ in range(6)]
    together = Rows([row(i) for i in range(count)], vocab_size)
    backwards = Rows([row(i) for i in reversed(range(count))], vocab_size)
    alone = [Rows([row(i)], vocab_size) for i in range(count)]
    for values in logits:
        tokens = together.step(values.copy())
        assert backwards.step(values[::-1].copy())[::-1] == tokens
        assert [driver.step(values[i : i + 1].copy())[0] for i, driver in enumerate(alone)] == tokens


CHI_SQUARE_11 = 31.3  # 11 degrees of freedom, p = 0.001


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 1.7},
        {"top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.08},
        {"repetition_penalty": 1.8},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": ((3, 1.5), (7, -2.0))},
        {"min_tokens": 9},
        {"top_k": 8, "top_p": 0.9, "repetition_penalty": 0.8, "temperature": 0.7},
    ],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_tokens_are_drawn_as_often_as_they_are_likely(changes: dict[str, object]) -> None:
    """3,000 seeds: how often each token comes is what the definition says (chi-square; the seeds are fixed)."""
    vocab_size, num_rows = 12, 3000
    generator = np.random.default_rng(5)
    logits = (1.3 * generator.standard_normal(vocab_size)).astype(np.float32)
    row = Row([1, 2, 2, 3], replace(PLAIN, **changes), (0, 5), output=[3, 4, 4])
    rows = [replace(row, sampling=replace(row.sampling, seed=seed), output=[3, 4, 4]) for seed in range(num_rows)]
    tokens = Rows(rows, vocab_size).step(np.tile(logits, (num_rows, 1)))
    counts = np.bincount([token.token_id for token in tokens if token], minlength=vocab_size)
    expected = num_rows * filtered(edited(logits, row), row.sampling)
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    assert ((counts - expected)[possible] ** 2 / expected[possible]).sum() < CHI_SQUARE_11


def distribution(logits: NDArray[np.float32], row: Row) -> NDArray[np.float64]:
    """What transformers' own processors make of the logits, in the order in which its `generate` has them."""
    sampling = row.sampling
    processors = LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[i], float(bias)] for i, bias in sampling.logit_bias]))
    processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(
        MinNewTokensLengthLogitsProcessor(len(row.prompt), sampling.min_tokens, list(row.end_token_ids), "cpu")
    )
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    processors.append(TopPLogitsWarper(sampling.top_p))
    processors.append(MinPLogitsWarper(sampling.min_p))
    input_ids = torch.tensor([[*row.prompt, *row.output]])
    return processors(input_ids, torch.from_numpy(logits)[None].clone())[0].double().softmax(-1).numpy()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_distribution_is_that_of_transformers(data: st.DataObject) -> None:
    """Where transformers has a processor for it, ours keeps the same tokens with the same probabilities."""
    vocab_size = data.draw(st.sampled_from([6, 50, 300]))
    row = data.draw(rows_of(vocab_size))
    row.sampling = replace(
        row.sampling,
        temperature=data.draw(st.sampled_from([0.5, 1.0, 1.6])),
        presence_penalty=0.0,  # transformers has none
        frequency_penalty=0.0,
        # It refuses 0; 1e30 makes equal what was not, and its top_p drops some of what is equal.
        logit_bias=tuple((i, bias) for i, bias in row.sampling.logit_bias if 0 < abs(bias) < 1e3),
        logprobs=None,
    )
    row.end_token_ids = tuple(dict.fromkeys(row.end_token_ids)) or (0,)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = (3 * generator.standard_normal(vocab_size)).astype(np.float32)
    num_rows = 600
    rows = [
        replace(row, sampling=replace(row.sampling, seed=seed), output=list(row.output)) for seed in range(num_rows)
    ]
    tokens = Rows(rows, vocab_size).step(np.tile(logits, (num_rows, 1)))
    drawn = [token.token_id for token in tokens if token]
    p = distribution(logits, row)
    assert (p[drawn] > 0).all()
    # The same noise on their distribution gives the same tokens, but where rounding decides.
    shares = np.array([noise(seed, row.choice, len(row.output)) for seed in range(num_rows)])
    theirs = np.searchsorted(p.cumsum(), shares, side="right").clip(max=vocab_size - 1)
    assert (theirs == drawn).mean() > 0.99
