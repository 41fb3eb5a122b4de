"""The sampler against its definition, written out per row."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.outputs import SampledToken
from worker.model.sampler import SamplingBatch, sample, streams, uniforms

DEFAULTS = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5, "num_logprobs": -1}


def make_batch(*rows: dict[str, float]) -> SamplingBatch:
    dtypes = {"temperature": np.float32, "top_k": np.int64, "min_p": np.float32, "num_logprobs": np.int64}
    return SamplingBatch(
        **{
            name: np.array([row.get(name, default) for row in rows], dtypes.get(name, np.float64))
            for name, default in DEFAULTS.items()
        }
    )


def ids(tokens: list[SampledToken | None]) -> list[int]:
    return [token.token_id for token in tokens]


def drawn(logits: list[float], uniforms: np.ndarray, **params: float) -> np.ndarray:
    """How often each token is drawn over `uniforms`."""
    batch = make_batch(*({"uniform": u} | params for u in uniforms))
    tokens = ids(sample(torch.tensor([logits]).repeat(len(uniforms), 1), batch))
    return np.bincount(tokens, minlength=len(logits)) / len(uniforms)


def kept_by_definition(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The filtered distribution in float64, one token after the other."""
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = order if top_k < 1 else [i for i in order if p[i] >= p[order[min(top_k, len(p)) - 1]]]
    total, mass, nucleus = p[kept].sum(), 0.0, []
    for i in kept:
        if mass >= top_p * total:
            break
        nucleus.append(i)
        mass += p[i]
    nucleus = [i for i in nucleus if p[i] >= min_p * p.max()]
    q = np.zeros(len(p))
    q[nucleus] = p[nucleus]
    return q / q.sum()


def noise(seed: object, choice: object, position: object) -> np.ndarray:
    """The uniforms of so many tokens; what is one number is the same for all."""
    seed, choice, position = np.broadcast_arrays(
        *(np.atleast_1d(np.array(x, np.uint64)) for x in (seed, choice, position))
    )
    return uniforms(streams(seed, choice), position)


def test_uniforms_are_splitmix64():
    """The noise is pinned: another value would change every seeded answer in the world."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    for seed, choice, position in [(0, 0, 0), (7, 0, 3), (2**64 - 1, 15, 10**6)]:
        stream = (mix((seed + gamma) % 2**64) + (choice + 1) * gamma) % 2**64
        want = (mix((mix(stream) + (position + 1) * gamma) % 2**64) >> 11) * 2.0**-53
        assert noise(seed, choice, position).tolist() == [want]
        assert 0.0 <= want < 1.0


def test_uniforms_are_uniform_and_unrelated():
    """Over positions, seeds and choices the noise fills [0, 1) evenly, and neighbours do not follow each other."""
    grid = np.arange(4096, dtype=np.uint64)
    series = [noise(5, 0, grid), noise(grid, 0, 0), noise(5, grid, 0), noise(6, 0, grid)]
    for values in series:
        counts, _ = np.histogram(values, bins=16, range=(0, 1))
        assert ((counts - 256) ** 2 / 256).sum() < 37.7  # chi-square, 15 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(series[0], series[3])[0, 1]) < 0.05


def test_greedy_takes_the_lowest_of_equals():
    """Temperature 0 is the largest logit; among equal ones the lowest id, however many there are."""
    logits = torch.zeros(3, 50_000)
    logits[0, [7, 40_000]] = 5.0
    logits[1, 49_999] = 1.0
    assert ids(sample(logits, make_batch(*[{"temperature": 0.0}] * 3))) == [7, 49_999, 0]


def test_draws_follow_the_distribution():
    """Over evenly spread noise each token is drawn as often as the softmax at that temperature says."""
    logits = [2.0, -1.0, 0.5, 2.5, -math.inf]
    even = (np.arange(2000) + 0.5) / 2000
    for temperature in (0.3, 1.0, 2.5):
        want = kept_by_definition(np.array(logits), temperature, -1, 1.0, 0.0)
        np.testing.assert_allclose(drawn(logits, even, temperature=temperature), want, atol=1e-3)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_filters_keep_what_their_definition_keeps(data):
    """top_k, then top_p of the rest, then min_p: alone and together, as written out token by token."""
    size = data.draw(st.integers(2, 12))
    # Steps of a quarter from a shuffled ladder: no two weights are so near that rounding decides.
    logits = np.array(data.draw(st.permutations([0.25 * i for i in range(size)])))
    params = {
        "temperature": data.draw(st.sampled_from([0.5, 1.0, 1.7])),
        "top_k": data.draw(st.sampled_from([-1, 1, 2, 5, 100])),
        "top_p": data.draw(st.sampled_from([1.0, 0.913, 0.517, 0.049, 1e-9])),
        "min_p": data.draw(st.sampled_from([0.0, 0.049, 0.317, 0.999])),
    }
    want = kept_by_definition(logits, **params)
    even = (np.arange(400) + 0.5) / 400
    np.testing.assert_allclose(drawn(logits.tolist(), even, **params), want, atol=0.006)


def test_top_p_looks_as_far_as_it_must():
    """A flat distribution over 50,000 tokens needs nearly all of them, a peaked one a few: both are exact."""
    flat = torch.linspace(0, 1e-2, 50_000)
    peaked = torch.linspace(0, -5000, 50_000)
    batch = make_batch(*[{"top_p": 0.9, "uniform": u} for u in (0.0, 1 - 2**-53) * 2])
    first, last, lowest, highest = ids(sample(torch.stack([flat, flat, peaked, peaked]), batch))
    weights = flat.double().exp()
    kept = int((weights.flip(0).cumsum(0) < 0.9 * weights.sum()).sum()) + 1
    assert abs(first - (50_000 - kept)) <= 2
    assert last == 49_999
    assert lowest == 0
    assert highest == int(math.log(10) / 0.1)  # the sum of 1 - exp(-0.1 i) passes 0.9


def test_equally_likely_tokens_stay_together():
    """Where a filter's limit falls among equals, all of them are kept."""
    even = (np.arange(1000) + 0.5) / 1000
    np.testing.assert_allclose(drawn([1.0, 3.0, 3.0, 3.0], even, top_k=2), [0, 1 / 3, 1 / 3, 1 / 3], atol=2e-3)
    np.testing.assert_allclose(drawn([3.0, 3.0, -9.0], even, top_p=0.3), [0.5, 0.5, 0], atol=2e-3)


@pytest.mark.parametrize(("top_p", "kept"), [(0.02, 600), (0.01, 1)])
def test_top_p_measures_all_that_top_k_left(top_p, kept):
    """Of one likely token and 599 equal ones top_k 2 keeps all; top_p is a share of them together, however many."""
    logits = [3.0, *[1.0] * 599]  # weights 1 and 0.135: the likely one has 1 of 82
    even = (np.arange(3000) + 0.5) / 3000
    assert np.count_nonzero(drawn(logits, even, top_k=2, top_p=top_p)) == kept


def test_hot_logits_that_differ_are_told_apart():
    """At a temperature that makes all weights the same in float32, top_k keeps the k largest and no more."""
    logits = np.linspace(0.0, 5.0, 300)
    even = (np.arange(100) + 0.5) / 100
    frequencies = drawn(logits.tolist(), even, top_k=3, temperature=1e6)
    assert np.flatnonzero(frequencies).tolist() == [297, 298, 299]


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 512, 1000])
def test_any_vocabulary_is_drawn_from_whole(vocab_size):
    """Sums are made in blocks: the first and the last token of each, and what follows the last whole block, come up."""
    even = (np.arange(4 * vocab_size) + 0.5) / (4 * vocab_size)
    np.testing.assert_allclose(drawn([0.5] * vocab_size, even), np.full(vocab_size, 1 / vocab_size))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1.0, 1e30])
def test_extreme_noise_and_temperatures_stay_in_the_support(uniform, temperature):
    """The ends of [0, 1) and temperatures near 0 and infinity give a token that has a probability."""
    logits = torch.tensor([[-math.inf, 3.0, -100.0, 2.0, -math.inf]])
    (token,) = ids(sample(logits, make_batch({"uniform": uniform, "temperature": temperature})))
    assert token in (1, 2, 3)
    if temperature < 1e-3:
        assert token == 1


def test_a_row_does_not_depend_on_its_company():
    """A row gets the same token alone, among others, and in another place."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(8, 3000, generator=generator)
    rows = [
        {"temperature": 0.0},
        {"uniform": 0.3},
        {"top_k": 40, "uniform": 0.9},
        {"top_p": 0.8, "uniform": 0.1},
        {"top_p": 0.99, "top_k": 700, "uniform": 0.6, "temperature": 2.0},
        {"min_p": 0.1, "uniform": 0.7},
        {"top_p": 0.5, "min_p": 0.2, "uniform": 0.99},
        {"top_k": 1, "uniform": 0.2},
    ]
    together = ids(sample(logits, make_batch(*rows)))
    assert ids(sample(logits.flip(0), make_batch(*rows[::-1])))[::-1] == together
    for i, row in enumerate(rows):
        assert ids(sample(logits[i : i + 1], make_batch(row))) == together[i : i + 1]


def test_logprobs_are_the_models_own():
    """They are natural logarithms of the plain softmax, whatever temperature and filters did to the draw."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    rows = [{"num_logprobs": 2, "temperature": 5.0, "top_k": 1}, {}, {"num_logprobs": 0, "temperature": 0.0}]
    first, second, third = sample(logits, make_batch(*rows))
    want = logits[0].log_softmax(0).tolist()
    assert first.token_id == 3
    assert first.logprob == pytest.approx(want[3])
    assert [token_id for token_id, _ in first.top] == [3, 2]
    assert [logprob for _, logprob in first.top] == pytest.approx([want[3], want[2]])
    assert second.logprob is None
    assert second.top == ()
    assert third == SampledToken(3, pytest.approx(want[3]), ())


def test_alternatives_that_are_equal_come_in_order():
    """Among equals the lowest id comes first, and is the one that is reported; what the model rules out is none."""
    logits = torch.tensor(
        [[1.0, 2.0, 2.0, 1.0, 2.0, -math.inf], [0.0, -math.inf, 0.0, -math.inf, -math.inf, -math.inf]]
    )
    first, second = sample(logits, make_batch({"num_logprobs": 4}, {"num_logprobs": 3}))
    assert [token_id for token_id, _ in first.top] == [1, 2, 4, 0]
    assert [token_id for token_id, _ in second.top] == [0, 2]


def test_more_alternatives_than_tokens():
    """A vocabulary smaller than the number of alternatives asked for gives all it has."""
    (token,) = sample(torch.tensor([[0.0, 1.0]]), make_batch({"num_logprobs": 20}))
    assert len(token.top) == 2


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2, "num_logprobs": 2}])
def test_rows_that_are_no_distribution_are_none(params):
    """NaN, +inf and nothing but -inf give None for that row, and the others their tokens."""
    good = [0.0, 1.0, -math.inf, 9.0]
    bad = [[0.0, math.nan, 1.0, 2.0], [0.0, math.inf, 1.0, 2.0], [-math.inf] * 4]
    tokens = sample(torch.tensor([good, *bad, good]), make_batch(*[params] * 5))
    assert [token is None for token in tokens] == [False, True, True, True, False]
    assert tokens[0] == tokens[4]
    assert tokens[0].token_id == 3
