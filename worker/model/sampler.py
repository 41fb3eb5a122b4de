"""From logits to tokens, for all sequences of a step at once.

One uniform number per token, a pure function of (seed, choice, position), is looked up in the inverse cumulative
distribution over the token ids that the filters keep. Nothing depends on what else is in the batch, so preemption,
resumption and the company a sequence keeps do not change its tokens.

It is numpy, not torch: on a CPU with vector instructions its argmax, partition and sort of float32 take a tenth of the
time (docs/performance.md), and each row is computed in the same order of operations whatever is beside it.
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
    vocab_size = values.shape[-1]
    scaled = _scaled(values, peak, batch.temperature[rows])
    top_k = np.where(batch.top_k[rows] < 1, vocab_size, np.minimum(batch.top_k[rows], vocab_size))
    top_p, min_p = batch.top_p[rows], batch.min_p[rows]
    if (top_k == vocab_size).all() and (top_p == 1.0).all() and not min_p.any():
        weights = np.exp(scaled, out=scaled)
    else:
        weights = np.exp(scaled)
        with np.errstate(divide="ignore"):
            least = np.log(min_p)
        chosen = np.flatnonzero((top_k < vocab_size) | (top_p < 1.0))
        kept = _least_kept(_take(scaled, chosen), _take(weights, chosen), vocab_size, top_k[chosen], top_p[chosen])
        least[chosen] = np.maximum(least[chosen], kept)
        np.multiply(weights, scaled >= least[:, None], out=weights)
    return _look_up(weights, batch.uniform[rows])


def _scaled(
    values: NDArray[np.float32], peak: NDArray[np.float32], temperature: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Logarithms of the weights [num_rows, width], the largest 0; filled up with -inf to whole blocks."""
    num_rows, vocab_size = values.shape
    padded = np.empty((num_rows, -(-vocab_size // _BLOCK) * _BLOCK), np.float32)
    padded[:, vocab_size:] = -np.inf
    scaled = padded[:, :vocab_size]
    with np.errstate(over="ignore"):  # down to -inf
        np.subtract(values, peak[:, None], out=scaled)
        if (temperature != 1.0).any():
            np.divide(scaled, np.maximum(temperature, np.float32(_MIN_TEMPERATURE))[:, None], out=scaled)
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


def _least_kept(
    scaled: NDArray[np.float32],
    weights: NDArray[np.float32],
    vocab_size: int,
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
) -> NDArray[np.float32]:
    """[num_rows]: the smallest of `scaled` that top_k (vocab_size: all) and top_p keep; `weights` are its exponentials.

    Compared are logarithms: weights near 1, at high temperatures, have not the digits to tell one from another.
    """
    least = np.full(len(scaled), -np.inf, np.float32)
    undecided = np.arange(len(scaled))
    width = -(-int(top_k.max(where=top_k < vocab_size, initial=1)) // _BLOCK) * _BLOCK
    while len(undecided):
        kept, decided = _least_of_largest(
            _take(scaled, undecided),
            _take(weights, undecided),
            width,
            np.where(top_k[undecided] < vocab_size, top_k[undecided], 0),
            top_p[undecided],
        )
        least[undecided] = kept
        undecided = undecided[~decided]
        width = scaled.shape[-1]
    return least


def _least_of_largest(
    scaled: NDArray[np.float32],
    weights: NDArray[np.float32],
    width: int,
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """What `_least_kept` looks for among the `width` largest of each row, and whether it is there. top_k 0: all."""
    rows, is_limited = np.arange(len(scaled)), top_k > 0
    first = scaled.shape[-1] - width
    largest = np.sort(scaled if first == 0 else np.partition(scaled, first, axis=-1)[:, first:], axis=-1)
    least = np.where(is_limited, largest[rows, width - np.maximum(top_k, 1)], np.float32(-np.inf))
    largest_weights = np.exp(largest) * (largest >= least[:, None])
    total = _block_sums(largest_weights).sum(axis=-1, dtype=np.float64)
    others = np.zeros(len(scaled))  # what is kept by top_k beyond the largest: all, or what is as likely as the last
    if first > 0 and (top_p < 1.0).any():
        num_equal = np.count_nonzero(scaled == least[:, None], axis=-1)
        num_equal -= np.count_nonzero(largest == least[:, None], axis=-1)
        others = np.where(
            is_limited,
            num_equal * np.exp(least, dtype=np.float64),
            _block_sums(weights).sum(axis=-1, dtype=np.float64) - total,
        )
    dropped = (1.0 - top_p) * (total + others) - others  # by top_p, of the largest
    share = np.clip(dropped / total, 0.0, 1 - 2.0**-53)
    kept = np.maximum(least, largest[rows, _look_up(largest_weights, share)])
    decided = is_limited | (dropped >= 0)
    return np.where(decided, kept, np.float32(-np.inf)), decided


def _describe(
    values: NDArray[np.float32], token_ids: NDArray[np.int64], num_logprobs: NDArray[np.int64]
) -> list[SampledToken]:
    """The drawn tokens with log probabilities, alternatives most likely first, among equals the lowest id."""
    num_rows, vocab_size = values.shape
    peak = values.max(axis=-1)
    scaled = _scaled(values, peak, np.ones(num_rows, np.float32))
    log_total = np.log(_block_sums(np.exp(scaled, out=scaled)).sum(axis=-1, dtype=np.float64)) + peak
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
