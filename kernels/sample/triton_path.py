"""Sampling on GPUs: one program per row, a few passes over its logits, nothing sorted and nothing stored.

A filter is a least weight. The least weight of top_k and top_p is found by bisecting the bits of a float32: those of
numbers from 0 to 1 are ordered as the numbers are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Launch, power_of_two
from kernels.sample.naive import MIN_TEMPERATURE
from kernels.sample.rows import SamplingRows

_BLOCK = 4096
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_ABOVE_ONE = tl.constexpr(0x3F800001)  # the bits of the float32 after 1


@triton.jit
def _mix(x):
    """SplitMix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, choice, position):
    """The noise of a token, float64, as `naive.uniforms`. uint64 each."""
    stream = _mix(_mix(seed + 0x9E3779B97F4A7C15) + (choice + 1) * 0x9E3779B97F4A7C15)
    bits = _mix(stream + (position + 1) * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _weights(row, ids, vocab_size, peak, temperature):
    """[BLOCK]: how likely the tokens are, the likeliest 1."""
    x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.exp((x - peak) / temperature)


@triton.jit
def _at_least(row, vocab_size, peak, temperature, least, BLOCK: tl.constexpr):
    """(number, sum in float64) of the weights from `least` on."""
    number = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.float64)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        w = _weights(row, ids, vocab_size, peak, temperature)
        kept = (w >= least) & (ids < vocab_size)
        number += tl.sum(kept.to(tl.int32), axis=0)
        total += tl.sum(tl.where(kept, w, 0.0), axis=0).to(tl.float64)
    return number, total


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _least_weight(row, vocab_size, peak, temperature, top_k, top_p, BLOCK: tl.constexpr):
    """The smallest weight that top_k and top_p keep."""
    # low keeps enough, high too little: nothing, at first.
    low = tl.zeros([], tl.int32)
    number, total = _at_least(row, vocab_size, peak, temperature, 0.0, BLOCK)
    high = tl.full([], _ABOVE_ONE, tl.int32)
    while (high - low > 1) & (number > top_k):
        middle = low + (high - low) // 2
        n, s = _at_least(row, vocab_size, peak, temperature, _float(middle), BLOCK)
        enough = n >= top_k
        low = tl.where(enough, middle, low)
        number = tl.where(enough, n, number)
        total = tl.where(enough, s, total)
        high = tl.where(enough, high, middle)
    # Of several as likely as the last, top_k counts only some; top_p is a share of those.
    wanted = top_p * (total - (number - top_k).to(tl.float64) * _float(low).to(tl.float64))
    high = tl.full([], _ABOVE_ONE, tl.int32)
    number_above = tl.zeros([], tl.int32)
    while (high - low > 1) & (number - number_above > 1) & (top_p < 1):
        middle = low + (high - low) // 2
        n, s = _at_least(row, vocab_size, peak, temperature, _float(middle), BLOCK)
        enough = s >= wanted
        low = tl.where(enough, middle, low)
        number = tl.where(enough, n, number)
        high = tl.where(enough, high, middle)
        number_above = tl.where(enough, number_above, n)
    return _float(low)


@triton.jit
def _draw(row, vocab_size, peak, temperature, least, uniform, BLOCK: tl.constexpr):
    """The token at which the cumulative distribution over the weights from `least` on passes `uniform`."""
    _, total = _at_least(row, vocab_size, peak, temperature, least, BLOCK)
    target = uniform * total
    before = tl.zeros([], tl.float64)
    token = tl.full([], -1, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        w = _weights(row, ids, vocab_size, peak, temperature)
        w = tl.where((w >= least) & (ids < vocab_size), w, 0.0)
        after = before + tl.sum(w, axis=0).to(tl.float64)
        if (token < 0) & (after > target):
            passed = before + tl.cumsum(w, axis=0).to(tl.float64) > target
            token = tl.min(tl.where(passed & (w > 0), ids, vocab_size), axis=0)
            if token == vocab_size:  # the two sums differ in the last bit
                token = tl.max(tl.where(w > 0, ids, 0), axis=0)
        before = after
    return token


# The vocabulary of a model is fixed, but 1 or a multiple of 16 in it is nothing to compile for.
@triton.jit(do_not_specialize=["vocab_size"])
def _sample_kernel(
    tokens,  # int64 [num_rows]
    logits,  # [num_rows, vocab_size], by stride
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    choices,
    positions,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = logits + i * row_stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = tl.zeros([BLOCK], tl.int32)
    has_nan = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        has_nan |= (x != x).to(tl.int32)
        best_ids = tl.where(x > best, ids, best_ids)
        best = tl.where(x > best, x, best)
    peak = tl.max(best, axis=0)
    token = tl.min(tl.where(best == peak, best_ids, vocab_size), axis=0)
    temperature = tl.load(temperatures + i)
    if (tl.max(has_nan, axis=0) > 0) | (tl.abs(peak) == float("inf")):
        token = -1
    elif temperature > 0:
        temperature = tl.maximum(temperature, _MIN_TEMPERATURE)
        least = tl.load(min_ps + i)
        top_k = tl.load(top_ks + i)
        top_k = tl.where((top_k < 1) | (top_k > vocab_size), vocab_size, top_k).to(tl.int32)
        top_p = tl.load(top_ps + i)
        if (top_k < vocab_size) | (top_p < 1):
            least = tl.maximum(least, _least_weight(row, vocab_size, peak, temperature, top_k, top_p, BLOCK))
        uniform = _uniform(
            tl.load(seeds + i).to(tl.uint64), tl.load(choices + i).to(tl.uint64), tl.load(positions + i).to(tl.uint64)
        )
        token = _draw(row, vocab_size, peak, temperature, least, uniform, BLOCK)
    tl.store(tokens + i, token.to(tl.int64))


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """As `kernels.sample.sample`."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    launch(tokens, logits, rows)()
    return tokens


def launch(tokens: Tensor, logits: Tensor, rows: SamplingRows) -> Launch:
    assert logits.stride(1) == 1
    vocab_size = logits.shape[1]
    return Launch(
        kernel=_sample_kernel,
        grid=(len(logits),),
        arguments={
            "tokens": tokens,
            "logits": logits,
            "temperatures": rows.temperature,
            "top_ks": rows.top_k,
            "top_ps": rows.top_p,
            "min_ps": rows.min_p,
            "seeds": rows.seed,
            "choices": rows.choice,
            "positions": rows.position,
            "row_stride": logits.stride(0),
            "vocab_size": vocab_size,
        },
        constants={"BLOCK": min(_BLOCK, power_of_two(vocab_size))},
        num_warps=8,
    )
