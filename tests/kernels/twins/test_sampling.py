import pytest
import torch
import triton

from kernels.sample import naive, triton_path
from kernels.sample.triton_path import _uniform
from tests.kernels.test_sample import (
    TIED_WAYS,
    as_the_worker_draws,
    make_logits,
    make_rows,
    make_tied_logits,
    noises,
)


@triton.jit
def _noise_kernel(out, seeds, choices, positions):
    i = triton.language.program_id(0)
    seed = triton.language.load(seeds + i).to(triton.language.uint64)
    choice = triton.language.load(choices + i).to(triton.language.uint64)
    position = triton.language.load(positions + i).to(triton.language.uint64)
    triton.language.store(out + i, _uniform(seed, choice, position))


def test_the_noise_is_the_same(device):
    """Bit by bit, the noise of a token is that of SplitMix64."""
    rows = make_rows(100, device)
    out = torch.zeros(100, dtype=torch.float64, device=device)
    _noise_kernel[(100,)](out, rows.seed, rows.choice, rows.position)
    assert out.tolist() == noises(rows)


@pytest.mark.parametrize("vocab_size", [300, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_as_specified(vocab_size, dtype, device):
    """All ways of drawing, from rows of all kinds, strided, in one tile of the vocabulary or several."""
    rows, logits = make_rows(32), make_logits(32, vocab_size + 7).to(dtype)[:, :vocab_size]
    got = triton_path.sample(logits.to(device), make_rows(32, device))
    assert got.tolist() == naive.sample(logits, rows).tolist()


def test_tied_tokens_are_the_workers(device):
    """Where logits tie, or weights have not the digits to tell them apart, the filters keep what the CPU keeps."""
    num_rows = 5 * len(TIED_WAYS)
    logits = make_tied_logits(num_rows, 5000)
    got = triton_path.sample(logits.to(device), make_rows(num_rows, device, TIED_WAYS))
    assert got.tolist() == as_the_worker_draws(logits, make_rows(num_rows, among=TIED_WAYS))


def test_greedy_takes_the_lowest_of_equals(device):
    """Temperature 0 is the largest logit; among equal ones the lowest id, wherever in the vocabulary they are."""
    logits = torch.zeros(3, 9000, device=device)
    logits[0, [4711, 8000]] = 5.0
    logits[1, 8999] = 1.0
    rows = make_rows(25, device)
    greedy = [i for i in range(25) if rows.temperature[i] == 0][:3]
    picked = type(rows)(*(getattr(rows, name)[greedy] for name in rows.__slots__))
    assert triton_path.sample(logits, picked).tolist() == [4711, 8999, 0]
