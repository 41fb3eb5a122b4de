"""The specification of sampling."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.sample import SamplingRows, naive, sample
from worker.model.sampler import SamplingBatch
from worker.model.sampler import sample as worker_sample

# temperature, top_k, top_p, min_p
WAYS = [
    (0.0, -1, 1.0, 0.0),
    (0.0, 5, 0.3, 0.9),
    (1.0, -1, 1.0, 0.0),
    (0.5, 1, 1.0, 0.0),
    (2.0, 20, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.3, -1, 0.05, 0.0),
    (1.0, -1, 0.0, 0.0),
    (1.0, 50, 0.8, 0.0),
    (1.0, 10**6, 1.0, 0.2),
    (0.7, 40, 0.95, 0.01),
    (1e-9, -1, 0.99, 0.0),
]
# Where ties and rounding decide what a filter keeps.
TIED_WAYS = [
    (1.0, 2, 1.0, 0.0),
    (1.0, 2, 0.02, 0.0),
    (1.0, 2, 0.6, 0.0),
    (1.0, 20, 0.8, 0.0),
    (0.7, 50, 0.9, 0.02),
    (1.0, -1, 0.3, 0.0),
    (1e6, 3, 1.0, 0.0),
    (1e6, 100, 0.2221, 0.0),
    (1e6, -1, 0.1111, 0.0),
    (1e6, 100, 1.0, 0.999999),
]


def make_rows(
    num_rows: int, device: str = "cpu", among: Sequence[tuple[float, int, float, float]] = WAYS
) -> SamplingRows:
    """One way after the other; seeds, choices and positions of all magnitudes."""
    ways = [among[i % len(among)] for i in range(num_rows)]
    temperature, top_k, top_p, min_p = zip(*ways, strict=True)
    i = torch.arange(num_rows, device=device)
    return SamplingRows(
        torch.tensor(temperature, dtype=torch.float32, device=device),
        torch.tensor(top_k, dtype=torch.int64, device=device),
        torch.tensor(top_p, dtype=torch.float64, device=device),
        torch.tensor(min_p, dtype=torch.float32, device=device),
        seed=(i - 3) * 0x0123456789ABCDEF,
        choice=i % 3,
        position=i * i,
    )


def noise(seed: int, choice: int, position: int) -> float:
    """SplitMix64 in whole numbers."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    stream = mix((mix((seed + gamma) % 2**64) + (choice + 1) * gamma) % 2**64)
    return (mix((stream + (position + 1) * gamma) % 2**64) >> 11) * 2.0**-53


def noises(rows: SamplingRows) -> list[float]:
    return [noise(*row) for row in zip(rows.seed.tolist(), rows.choice.tolist(), rows.position.tolist(), strict=True)]


def as_the_worker_draws(logits: Tensor, rows: SamplingRows) -> list[int]:
    """The tokens that the worker's own sampler takes, -1 for none."""
    batch = SamplingBatch(
        temperature=rows.temperature.numpy(),
        top_k=rows.top_k.numpy(),
        top_p=rows.top_p.numpy(),
        min_p=rows.min_p.numpy(),
        uniform=np.array(noises(rows)),
        num_logprobs=np.full(len(logits), -1),
    )
    return [-1 if token is None else token.token_id for token in worker_sample(logits.clone(), batch)]


def make_logits(num_rows: int, vocab_size: int) -> Tensor:
    """Rows like a model's, some of them full of ties; at the end some with masked tokens, or no distribution at all."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    logits[len(WAYS) : 2 * len(WAYS)] = logits[len(WAYS) : 2 * len(WAYS)].round()
    logits[-7] = 0.0
    logits[-6, : vocab_size - 3] = -torch.inf
    logits[-5, 1:] = -torch.inf
    logits[-4, 7] = torch.nan
    logits[-3, 7] = torch.inf
    logits[-2] = -torch.inf
    logits[-1, [2, 3]] = logits[-1].max() + 1
    return logits


def make_tied_logits(num_rows: int, vocab_size: int) -> Tensor:
    """For TIED_WAYS, each of which gets five kinds of rows: many logits equal, or so close that few digits differ."""
    generator = torch.Generator().manual_seed(1)
    logits = (2 * torch.randn(num_rows, vocab_size, generator=generator)).bfloat16().float()
    kind = torch.arange(num_rows) // len(TIED_WAYS) % 5
    logits[kind == 1] = 0.5
    logits[kind == 2] = torch.tensor([3.0] + [1.0] * (vocab_size - 1))
    logits[kind == 3] = logits[kind == 3].round()
    logits[kind == 4] = torch.linspace(0, 5, vocab_size)
    return logits


def test_the_noise_is_the_workers():
    """SplitMix64 with the constants that pin every seeded answer (tests/model/test_sampler.py)."""
    rows = make_rows(200)
    assert naive.uniforms(rows.seed, rows.choice, rows.position).tolist() == noises(rows)


def test_tokens_are_the_workers():
    """All ways of drawing give the tokens of the worker's sampler, from rows of all kinds."""
    rows, logits = make_rows(96), make_logits(96, 300)
    tokens = sample(logits, rows).tolist()
    assert tokens == as_the_worker_draws(logits, rows)
    assert tokens[-4:-1] == [-1, -1, -1]
    assert len(set(tokens)) > 40


def test_tied_tokens_are_the_workers():
    """Where logits tie: top_p is of all that top_k keeps, and what is compared is logits, not their rounded weights."""
    num_rows = 20 * 5 * len(TIED_WAYS)
    rows, logits = make_rows(num_rows, among=TIED_WAYS), make_tied_logits(num_rows, 600)
    assert sample(logits, rows).tolist() == as_the_worker_draws(logits, rows)
