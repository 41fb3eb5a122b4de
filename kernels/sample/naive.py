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
    scaled = (logits - peak) / rows.temperature.clamp(min=MIN_TEMPERATURE)[:, None]
    weights = torch.where(scaled >= _least(scaled, rows)[:, None], scaled.exp(), 0.0)
    cumulative = weights.double().cumsum(dim=-1)
    target = uniforms(rows.seed, rows.choice, rows.position)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    tokens = torch.where(rows.temperature > 0, drawn, likeliest)
    return torch.where(peak.squeeze(-1).isfinite(), tokens, -1)


def _least(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """[num_rows]: the logarithm of a weight below which a row's filters drop a token.

    Logarithms, not weights: at high temperatures weights are near 1 and have not the digits to tell one from another.
    """
    vocab_size = scaled.shape[1]
    top_k = torch.where(rows.top_k < 1, vocab_size, rows.top_k.clamp(max=vocab_size))[:, None]
    descending = scaled.sort(dim=-1, descending=True).values
    least = torch.where(top_k < vocab_size, descending.gather(1, top_k - 1), -torch.inf)
    # top_p is a share of all that top_k keeps, those as likely as its last included.
    cumulative = torch.where(descending >= least, descending.exp(), 0.0).double().cumsum(dim=-1)
    # The first with which the sum reaches what top_p wants is the last one kept.
    last = (cumulative < rows.top_p[:, None] * cumulative[:, -1:]).sum(dim=-1, keepdim=True).clamp(max=vocab_size - 1)
    least = torch.where(rows.top_p[:, None] < 1, torch.maximum(least, descending.gather(1, last)), least)
    return torch.maximum(least.squeeze(1), rows.min_p.log())
