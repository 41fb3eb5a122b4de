"""Sampling on GPUs: one program per row, a few passes over its logits, nothing sorted and nothing stored.

A token's distance is by how much its logit, over the temperature, is below the largest: its weight is exp(-distance).
A filter is a largest distance. That of top_k and top_p is found by bisecting the bits of a float32: those of numbers
from 0 to infinity are ordered as the numbers are. Weights would not do: at high temperatures they are near 1, and have
not the digits to tell one from another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Launch, power_of_two
from kernels.sample.naive import MIN_TEMPERATURE
from kernels.sample.rows import SamplingRows

# Tokens at a time; few where they are drawn, as a cumulative sum in float64 takes registers.
_BLOCKS = {"BLOCK": 4096, "DRAW_BLOCK": 1024}
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)
_INFINITY = tl.constexpr(0x7F800000)  # its bits


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
def _distances(row, ids, vocab_size, peak, temperature):
    """[BLOCK]: 0 for the likeliest; rounded as the CPU's division, or other logits than there would tie."""
    x = tl.load(row + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.div_rn(peak - x, tl.zeros_like(x) + temperature)


@triton.jit
def _number_within(row, vocab_size, peak, temperature, limit, BLOCK: tl.constexpr):
    """How many tokens are not farther than `limit`."""
    number = tl.zeros([], tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        kept = (_distances(row, ids, vocab_size, peak, temperature) <= limit) & (ids < vocab_size)
        number += tl.sum(kept.to(tl.int32), axis=0)
    return number


@triton.jit
def _within(row, vocab_size, peak, temperature, limit, BLOCK: tl.constexpr):
    """(number, sum of weights in float64) of the tokens that are not farther than `limit`."""
    number = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.float64)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        distances = _distances(row, ids, vocab_size, peak, temperature)
        kept = (distances <= limit) & (ids < vocab_size)
        number += tl.sum(kept.to(tl.int32), axis=0)
        total += tl.sum(tl.where(kept, tl.exp(-distances), 0.0), axis=0).to(tl.float64)
    return number, total


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _limit(row, vocab_size, peak, temperature, top_k, top_p, BLOCK: tl.constexpr):
    """The largest distance that top_k and top_p keep, or a larger one that keeps no more."""
    # `enough` keeps enough, `short` too little: nothing, at first.
    enough = tl.full([], _INFINITY, tl.int32)
    short = tl.full([], -1, tl.int32)
    number = tl.zeros([], tl.int32) + vocab_size
    while (enough - short > 1) & (number > top_k):
        middle = short + (enough - short) // 2
        n = _number_within(row, vocab_size, peak, temperature, _float(middle), BLOCK)
        number = tl.where(n >= top_k, n, number)
        enough = tl.where(n >= top_k, middle, enough)
        short = tl.where(n >= top_k, short, middle)
    if top_p < 1:
        # A share of all that top_k keeps, those as likely as its last included.
        number, total = _within(row, vocab_size, peak, temperature, _float(enough), BLOCK)
        short = tl.full([], -1, tl.int32)
        number_short = tl.zeros([], tl.int32)
        while (enough - short > 1) & (number - number_short > 1):
            middle = short + (enough - short) // 2
            n, s = _within(row, vocab_size, peak, temperature, _float(middle), BLOCK)
            is_enough = s >= top_p * total
            number = tl.where(is_enough, n, number)
            number_short = tl.where(is_enough, number_short, n)
            enough = tl.where(is_enough, middle, enough)
            short = tl.where(is_enough, short, middle)
    return _float(enough)


@triton.jit
def _draw(row, vocab_size, peak, temperature, limit, uniform, BLOCK: tl.constexpr):
    """The token at which the cumulative distribution over those not farther than `limit` passes `uniform`."""
    _, total = _within(row, vocab_size, peak, temperature, limit, BLOCK)
    target = uniform * total
    before = tl.zeros([], tl.float64)
    token = tl.full([], -1, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        distances = _distances(row, ids, vocab_size, peak, temperature)
        w = tl.where((distances <= limit) & (ids < vocab_size), tl.exp(-distances), 0.0)
        after = before + tl.sum(w, axis=0).to(tl.float64)
        if (token < 0) & (after > target):
            # Thousands of float32 added one after the other would be a token off.
            passed = before + tl.cumsum(w.to(tl.float64), axis=0) > target
            token = tl.min(tl.where(passed & (w > 0), ids, vocab_size), axis=0)
            if token == vocab_size:  # the two sums differ in the last bits
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
    DRAW_BLOCK: tl.constexpr,
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
        min_p = tl.load(min_ps + i)
        limit = tl.where(min_p > 0, -tl.log(tl.where(min_p > 0, min_p, 1.0)), float("inf"))
        top_k = tl.load(top_ks + i)
        top_k = tl.where((top_k < 1) | (top_k > vocab_size), vocab_size, top_k).to(tl.int32)
        top_p = tl.load(top_ps + i)
        if (top_k < vocab_size) | (top_p < 1):
            limit = tl.minimum(limit, _limit(row, vocab_size, peak, temperature, top_k, top_p, BLOCK))
        uniform = _uniform(
            tl.load(seeds + i).to(tl.uint64), tl.load(choices + i).to(tl.uint64), tl.load(positions + i).to(tl.uint64)
        )
        token = _draw(row, vocab_size, peak, temperature, limit, uniform, DRAW_BLOCK)
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
        constants={name: min(size, power_of_two(vocab_size)) for name, size in _BLOCKS.items()},
        num_warps=8,
    )
