"""From logits to tokens, for all sequences of a step at once.

One uniform number per token, a pure function of (seed, choice, position), is looked up in the inverse cumulative
distribution over the token ids that the filters keep. Nothing depends on what else is in the batch, so preemption,
resumption and the company a sequence keeps do not change its tokens.

It is numpy, not torch: on a CPU its exp, its sums and above all its partition and sort of float32 take a tenth of the
time (bench/sampling_cost.py), and each row is computed in the same order of operations whatever is beside it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.outputs import SampledToken
from worker.model.logit_edits import LogitEdits

# Below this a temperature is as good as 0, but still divides.
_MIN_TEMPERATURE = 1e-6
# Weights are summed in blocks of so many tokens first: a cumulative sum over the whole vocabulary, in float64, would
# cost more than everything else. top_p, too, looks at so many of the most likely tokens first, and only when they are
# too few at all of them: to sort the vocabulary takes four times as long as to find its first 256.
_BLOCK = 256

_GAMMA, _ONE = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How each of a step's rows is drawn; arrays [num_rows]. SamplingParams says what the values mean."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float64]  # in [0, 1 - 2**-53]
    num_logprobs: NDArray[np.int64]  # -1: none asked for
    edits: LogitEdits | None = None  # of the logits, before anything else; None: no row has any


def streams(seed: NDArray[np.uint64], choice: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Where the noise of each sequence starts: a hash of its seed and its choice."""
    return _mix(_mix(seed + _GAMMA) + (choice + _ONE) * _GAMMA)


def uniforms(stream: NDArray[np.uint64], position: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The noise of each token, in [0, 1) with 53 bits. `position` counts the tokens of the choice before this one.

    SplitMix64's output number `position` of the stream (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, 2014; constants as in Vigna's splitmix64.c).
    """
    bits = _mix(stream + (position + _ONE) * _GAMMA)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser; arithmetic modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits: Tensor, batch: SamplingBatch) -> list[SampledToken | None]:
    """Draws one token per row of `logits`, float32 [num_rows, vocab_size]; None where a row is not a distribution.

    That is a row with NaN or +inf, or of -inf only, after the edits of the batch (which change `logits`). Temperature 0
    takes the largest logit, the lowest id among equals. Otherwise temperature, then top_k, then top_p of what top_k
    left, then min_p, as transformers orders them; tokens as likely as the last one that a filter keeps are kept with
    it. Log probabilities are those of the unedited logits, at temperature 1.
    """
    values = logits.numpy()
    before = batch.edits.apply(values) if batch.edits is not None else None
    token_ids = values.argmax(axis=-1)  # of NaN, where there is one
    peak = values[np.arange(len(values)), token_ids]
    sound = np.isfinite(peak)
    drawn = np.flatnonzero(sound & (batch.temperature > 0))
    if len(drawn):
        token_ids[drawn] = _draw(_take(values, drawn), peak[drawn], batch, drawn)
    tokens: list[SampledToken | None] = [SampledToken(token_id) for token_id in token_ids.tolist()]
    reported = np.flatnonzero(sound & (batch.num_logprobs >= 0))
    if len(reported):
        if batch.edits is not None and before is not None:
            batch.edits.undo(values, before)
        described = _describe(_take(values, reported), token_ids[reported], batch.num_logprobs[reported])
        for row, token in zip(reported.tolist(), described, strict=True):
            tokens[row] = token
    for row in np.flatnonzero(~sound).tolist():
        tokens[row] = None
    return tokens


def _take(table: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """`table[rows]`, ascending rows; all of them without a copy."""
    return table if len(rows) == len(table) else table[rows]


def _draw(
    values: NDArray[np.float32], peak: NDArray[np.float32], batch: SamplingBatch, rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """One token id per row: inverse of the cumulative distribution, over ids in their own order."""
    weights = _weights(values, peak, batch.temperature[rows])
    least = _least_weight(weights, values.shape[-1], batch, rows)
    if least.any():
        np.multiply(weights, weights >= least[:, None], out=weights)
    return _look_up(weights, batch.uniform[rows])


def _weights(
    values: NDArray[np.float32], peak: NDArray[np.float32], temperature: NDArray[np.float32]
) -> NDArray[np.float32]:
    """exp(value / temperature) up to a factor per row, the largest 1; padded with 0 to whole blocks."""
    num_rows, vocab_size = values.shape
    padded = np.empty((num_rows, -(-vocab_size // _BLOCK) * _BLOCK), np.float32)
    padded[:, vocab_size:] = 0.0
    weights = padded[:, :vocab_size]
    with np.errstate(over="ignore"):  # down to -inf, whose exp is 0
        np.subtract(values, peak[:, None], out=weights)
        if (temperature != 1.0).any():
            np.divide(weights, np.maximum(temperature, np.float32(_MIN_TEMPERATURE))[:, None], out=weights)
    np.exp(weights, out=weights)
    return padded


def _block_sums(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """[num_rows, num_blocks]."""
    return _in_blocks(weights).sum(axis=-1)


def _in_blocks(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """[num_rows, num_blocks, _BLOCK]."""
    num_rows, width = weights.shape
    return weights.reshape(num_rows, width // _BLOCK, _BLOCK)


def _look_up(weights: NDArray[np.float32], share: NDArray[np.float64]) -> NDArray[np.int64]:
    """[num_rows]: the first index at which the cumulative sum of a row is above that share (0 <= share < 1) of it all.

    The block first, then the place in it.
    """
    rows = np.arange(len(weights))
    sums = _block_sums(weights)
    ends = sums.cumsum(axis=-1, dtype=np.float64)
    # With 53 bits a share is so far below 1 that rounding does not reach the total.
    target = share * ends[:, -1]
    block = (ends <= target[:, None]).sum(axis=-1)
    in_block = _in_blocks(weights)[rows, block].cumsum(axis=-1, dtype=np.float64)
    # A block's sum is rounded to float32: what is left of the target counts as a share of it.
    before, total = ends[rows, block] - sums[rows, block], in_block[:, -1]
    target = np.clip((target - before) / sums[rows, block] * total, 0.0, np.nextafter(total, 0.0))
    return block * _BLOCK + (in_block <= target[:, None]).sum(axis=-1)


def _least_weight(
    weights: NDArray[np.float32], vocab_size: int, batch: SamplingBatch, rows: NDArray[np.int64]
) -> NDArray[np.float32]:
    """[num_rows]: the weight below which a row's filters drop a token. `weights` have a maximum of 1 in each row."""
    least = batch.min_p[rows]
    top_k = np.where(batch.top_k[rows] < 1, vocab_size, np.minimum(batch.top_k[rows], vocab_size))
    top_p = batch.top_p[rows]
    undecided = np.flatnonzero((top_k < vocab_size) | (top_p < 1.0))
    largest_k = top_k[undecided].max(where=top_k[undecided] < vocab_size, initial=1)
    width = -(-int(largest_k) // _BLOCK) * _BLOCK
    while len(undecided):
        kept, decided = _least_kept(
            _take(weights, undecided), width, top_k[undecided], top_k[undecided] < vocab_size, top_p[undecided]
        )
        least[undecided] = np.maximum(least[undecided], kept)
        undecided = undecided[~decided]
        width = weights.shape[-1]
    return least


def _least_kept(
    weights: NDArray[np.float32],
    width: int,
    top_k: NDArray[np.int64],
    is_limited: NDArray[np.bool_],
    top_p: NDArray[np.float64],
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The smallest weight that top_k and top_p keep, looking at the `width` largest; and where they are enough to know.

    Where they are not, it is 0.
    """
    num_rows, num_weights = weights.shape
    first = num_weights - width
    largest = weights if first == 0 else np.partition(weights, first, axis=-1)[:, first:]
    largest = np.sort(largest, axis=-1)
    # What top_k drops, here and beyond the largest.
    least = np.where(is_limited, largest[np.arange(num_rows), width - np.where(is_limited, top_k, 1)], np.float32(0))
    np.multiply(largest, largest >= least[:, None], out=largest)
    total = _block_sums(largest).sum(axis=-1, dtype=np.float64)
    if first == 0 or (top_p == 1.0).all():
        others = np.zeros(num_rows)
    else:
        # Beyond the largest there are, without top_k, all others; with it those as likely as the last of the k.
        others = _block_sums(weights).sum(axis=-1, dtype=np.float64) - total
        equal = np.count_nonzero(weights == least[:, None], axis=-1) - np.count_nonzero(
            largest == least[:, None], axis=-1
        )
        others = np.where(is_limited, equal * least.astype(np.float64), others)
    dropped = (1.0 - top_p) * (total + others) - others  # of the largest, their sum
    decided = is_limited | (dropped >= 0)
    share = np.clip(dropped / total, 0.0, 1 - 2.0**-53)
    kept = np.maximum(least, largest[np.arange(num_rows), _look_up(largest, share)])
    return np.where(decided, kept, np.float32(0)), decided


def _describe(
    values: NDArray[np.float32], token_ids: NDArray[np.int64], num_logprobs: NDArray[np.int64]
) -> list[SampledToken]:
    """The drawn tokens with log probabilities, alternatives most likely first, among equals the lowest id."""
    num_rows, vocab_size = values.shape
    peak = values.max(axis=-1)
    ones = np.ones(num_rows, np.float32)
    log_total = np.log(_block_sums(_weights(values, peak, ones)).sum(axis=-1, dtype=np.float64)) + peak
    chosen = (values[np.arange(num_rows), token_ids] - log_total).tolist()
    num_top = min(int(num_logprobs.max()), vocab_size)
    if num_top == 0:
        return [SampledToken(*pair) for pair in zip(token_ids.tolist(), chosen, strict=True)]
    least = np.partition(values, vocab_size - num_top, axis=-1)[:, vocab_size - num_top]
    # What the model rules out (-inf) is no alternative.
    is_top = values >= np.maximum(least, np.finfo(np.float32).min)[:, None]
    rows, ids = np.divmod(np.flatnonzero(is_top), vocab_size)  # nonzero of two dimensions takes 50 times as long
    order = np.lexsort((ids, -values[rows, ids], rows))
    starts = np.searchsorted(rows, np.arange(num_rows)).tolist()
    ends = [*starts[1:], len(rows)]
    logprobs = (values[rows, ids] - log_total[rows])[order].tolist()
    ids = ids[order].tolist()
    tokens = []
    for token_id, logprob, start, end, count in zip(
        token_ids.tolist(), chosen, starts, ends, num_logprobs.tolist(), strict=True
    ):
        top = slice(start, min(end, start + count))
        tokens.append(SampledToken(token_id, logprob, tuple(zip(ids[top], logprobs[top], strict=True))))
    return tokens
