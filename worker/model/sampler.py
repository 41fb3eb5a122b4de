"""From logits to tokens, for all sequences of a step at once.

One uniform number per token, a pure function of (seed, choice, position), is looked up in the inverse cumulative
distribution over the token ids that the filters keep. Nothing depends on what else is in the batch, so preemption,
resumption and the company a sequence keeps do not change its tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.outputs import SampledToken

# Below this a temperature is as good as 0, but still divides.
_MIN_TEMPERATURE = 1e-6
# How many of the most likely tokens top_p looks at first, and by how much more if they are too few: sorting the whole
# vocabulary costs 10 times as much as finding the first 256.
_CANDIDATES = 256
_CANDIDATES_GROWTH = 16


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each of a step's rows is drawn; arrays [num_rows]. SamplingParams says what the values mean."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float64]  # in [0, 1 - 2**-53]
    num_logprobs: NDArray[np.int64]  # -1: none asked for


def uniforms(seed: NDArray[np.uint64], choice: NDArray[np.uint64], position: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The noise of each token, in [0, 1) with 53 bits. `position` counts the tokens of the choice before this one.

    SplitMix64's output number `position` of a stream whose start is a hash of seed and choice (Steele, Lea, Flood:
    Fast Splittable Pseudorandom Number Generators, 2014; constants as in Vigna's splitmix64.c).
    """
    gamma, one = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
    stream = _mix(_mix(seed + gamma) + (choice + one) * gamma)
    bits = _mix(stream + (position + one) * gamma)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser; arithmetic modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits: Tensor, batch: SamplingBatch) -> list[SampledToken | None]:
    """Draws one token per row of `logits`, float32 [num_rows, vocab_size]; None where a row is not a distribution.

    That is a row with NaN or +inf, or of -inf only. Temperature 0 takes the largest logit, the lowest id among equals.
    Otherwise temperature, then top_k, then top_p of what top_k left, then min_p, as transformers orders them; tokens as
    likely as the last one that a filter keeps are kept with it.
    """
    peak, token_ids = logits.max(dim=-1)
    sound = torch.isfinite(peak)
    drawn = np.flatnonzero(sound.numpy() & (batch.temperature > 0))
    if len(drawn):
        token_ids[drawn] = _draw(_take(logits, drawn), peak[drawn], batch, drawn)
    tokens = [SampledToken(token_id) for token_id in token_ids.tolist()]
    reported = np.flatnonzero(sound.numpy() & (batch.num_logprobs >= 0))
    if len(reported):
        described = _describe(_take(logits, reported), token_ids[reported], batch.num_logprobs[reported])
        for row, token in zip(reported.tolist(), described, strict=True):
            tokens[row] = token
    return [token if ok else None for token, ok in zip(tokens, sound.tolist(), strict=True)]


def _take(table: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """`table[rows]`, ascending rows; all of them without a copy."""
    return table if len(rows) == len(table) else table[rows]


def _draw(logits: Tensor, peak: Tensor, batch: SamplingBatch, rows: NDArray[np.int64]) -> Tensor:
    """One token id per row: inverse of the cumulative distribution, over ids in their own order."""
    temperature = torch.from_numpy(batch.temperature[rows]).clamp(min=_MIN_TEMPERATURE)
    weights = (logits - peak[:, None]).div_(temperature[:, None]).exp_()  # the largest is 1
    least = _least_weight(weights, batch, rows)
    if least.any():
        weights.masked_fill_(weights < least[:, None], 0.0)
    cumulative = weights.double().cumsum(dim=-1)
    # With 53 bits a uniform is so far below 1 that rounding does not reach the total, beyond which no id lies.
    target = torch.from_numpy(batch.uniform[rows])[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def _least_weight(weights: Tensor, batch: SamplingBatch, rows: NDArray[np.int64]) -> Tensor:
    """[num_rows]: the weight below which a row's filters drop a token. `weights` have a maximum of 1 in each row."""
    least = torch.from_numpy(batch.min_p[rows])
    vocab_size = weights.shape[-1]
    top_k = np.where(batch.top_k[rows] < 1, vocab_size, np.minimum(batch.top_k[rows], vocab_size))
    top_p = batch.top_p[rows]
    undecided = np.flatnonzero((top_k < vocab_size) | (top_p < 1.0))
    limited = top_k[undecided] < vocab_size
    num_candidates = int(top_k[undecided][limited].max(initial=0 if limited.all() else _CANDIDATES))
    while len(undecided):
        num_candidates = min(vocab_size, num_candidates)
        kept, decided = _least_kept(_take(weights, undecided), top_k[undecided], top_p[undecided], num_candidates)
        least[undecided] = torch.maximum(least[undecided], kept)
        undecided = undecided[~decided]
        num_candidates *= _CANDIDATES_GROWTH
    return least


def _least_kept(
    weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64], num_candidates: int
) -> tuple[Tensor, NDArray[np.bool_]]:
    """The smallest weight that top_k and top_p keep, 0 where `num_candidates` are too few to know; and where not."""
    candidates = weights.topk(num_candidates, dim=-1).values
    k = torch.from_numpy(top_k)[:, None]
    cumulative = candidates.double().cumsum(dim=-1)
    total = cumulative.gather(1, k.clamp(max=num_candidates) - 1)
    unlimited = k == weights.shape[-1]
    if unlimited.any():
        total = torch.where(unlimited, weights.sum(dim=-1, keepdim=True, dtype=torch.float64), total)
    wanted = torch.from_numpy(top_p)[:, None] * total
    # The first candidate with which the sum reaches what top_p wants is the last one kept.
    last = torch.minimum((cumulative < wanted).sum(dim=-1, keepdim=True), k - 1)
    decided = last < num_candidates
    kept = candidates.gather(1, last.clamp(max=num_candidates - 1)).masked_fill_(~decided, 0.0)
    return kept.squeeze(1), decided.squeeze(1).numpy()


def _describe(logits: Tensor, token_ids: Tensor, num_logprobs: NDArray[np.int64]) -> list[SampledToken]:
    """The drawn tokens with log probabilities of the model's own distribution, alternatives most likely first."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None]).squeeze(1).tolist()
    top = logprobs.topk(min(int(num_logprobs.max()), logits.shape[-1]), dim=-1)
    alternatives = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        SampledToken(token_id, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for token_id, logprob, count, (ids, values) in zip(
            token_ids.tolist(), chosen, num_logprobs.tolist(), alternatives, strict=True
        )
    ]
