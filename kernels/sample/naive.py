"""Sampling as its specification: sort everything."""

import torch
from torch import Tensor

from kernels.sample.rows import SamplingRows

# Below this a temperature is as good as 0, but still divides.
MIN_TEMPERATURE = 1e-6


def uniforms(seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """The noise of each row, float64 in [0, 1) with 53 bits.

    SplitMix64's output number `position` of a stream whose start is a hash of seed and choice (Steele, Lea, Flood:
    Fast Splittable Pseudorandom Number Generators, 2014; constants as in Vigna's splitmix64.c). int64 wraps as uint64.
    """
    gamma = _signed(0x9E3779B97F4A7C15)
    stream = _mix(_mix(seed + gamma) + (choice + 1) * gamma)
    return _shift(_mix(stream + (position + 1) * gamma), 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser; arithmetic modulo 2^64."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """As `kernels.sample.sample`."""
    vocab_size = logits.shape[1]
    logits = logits.float()
    peak = logits.amax(dim=-1, keepdim=True)
    ids = torch.arange(vocab_size, device=logits.device)
    likeliest = torch.where(logits == peak, ids, vocab_size).amin(dim=-1)
    weights = ((logits - peak) / rows.temperature.clamp(min=MIN_TEMPERATURE)[:, None]).exp()
    weights = torch.where(weights < _least_weight(weights, rows)[:, None], 0.0, weights)
    cumulative = weights.double().cumsum(dim=-1)
    target = uniforms(rows.seed, rows.choice, rows.position)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    tokens = torch.where(rows.temperature > 0, drawn, likeliest)
    return torch.where(peak.squeeze(-1).isfinite(), tokens, -1)


def _least_weight(weights: Tensor, rows: SamplingRows) -> Tensor:
    """[num_rows]: the weight below which a row's filters drop a token."""
    vocab_size = weights.shape[1]
    top_k = torch.where(rows.top_k < 1, vocab_size, rows.top_k.clamp(max=vocab_size))[:, None]
    descending = weights.sort(dim=-1, descending=True).values
    cumulative = descending.double().cumsum(dim=-1)
    wanted = rows.top_p[:, None] * cumulative.gather(1, top_k - 1)
    # The first with which the sum reaches what top_p wants is the last one kept.
    last = torch.minimum((cumulative < wanted).sum(dim=-1, keepdim=True), top_k - 1)
    kept = descending.gather(1, last).squeeze(1)
    kept = torch.where((rows.top_p < 1) | (top_k.squeeze(1) < vocab_size), kept, 0.0)
    return torch.maximum(kept, rows.min_p)
