"""store_kv, copy_blocks, and the one-byte formats."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.copy_blocks import naive as copy_naive
from kernels.copy_blocks import triton_path as copy_path
from kernels.quantised import LARGEST, dequantise, quantise
from kernels.quantised_triton import from_fp8_bits, to_fp8_bits
from kernels.store_kv import naive as store_naive
from kernels.store_kv import triton_path as store_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(0, 2, 64), (1, 3, 80), (7, 8, 128)])
def test_store_kv_writes_the_named_slots_and_nothing_else(num_tokens, num_heads, head_dim, dtype, device):
    """Keys and values, of any strides, land in their slots bit by bit; all other memory keeps its content."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.full((5, 3, 2, 8, num_heads, head_dim), torch.nan, dtype=dtype)
    key, value = torch.randn(2, num_heads, num_tokens, head_dim + 5, generator=generator).to(dtype).transpose(1, 2)
    key, value = key[..., :head_dim], value[..., :head_dim]
    slots = torch.randperm(40, generator=generator)[:num_tokens]
    want = blocks.clone()
    store_naive.store_kv(key, value, want[:, 1, 0], want[:, 1, 1], slots // 8, slots % 8)
    got = blocks.to(device)
    on_device = [x.to(device) for x in (key, value, slots // 8, slots % 8)]
    store_path.store_kv(*on_device[:2], got[:, 1, 0], got[:, 1, 1], *on_device[2:])
    assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
def test_store_kv_quantises_as_specified(kv_dtype, dtype, device):
    """As the specification, but for one step where a division is rounded otherwise; what is not finite stays so."""
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(2, 6, 3, 80, generator=generator) * 5).to(dtype)
    key[0, 0] = 0.0
    key[1, 0, 3], value[2, 1, 79], value[3, 2, 0] = torch.nan, torch.inf, -torch.inf
    blocks, scales = quantise(torch.full((5, 3, 2, 8, 3, 80), torch.nan), kv_dtype)
    slots = torch.tensor([4, 0, 0, 2, 4, 1]), torch.tensor([7, 0, 1, 4, 6, 0])
    want, want_scales = blocks.clone(), scales.clone()
    store_naive.store_kv(key, value, want[:, 1, 0], want[:, 1, 1], *slots, (want_scales[:, 1, 0], want_scales[:, 1, 1]))
    got, got_scales = blocks.to(device), scales.to(device)
    store_path.store_kv(
        *(x.to(device) for x in (key, value)),
        got[:, 1, 0],
        got[:, 1, 1],
        *(x.to(device) for x in slots),
        (got_scales[:, 1, 0], got_scales[:, 1, 1]),
    )
    torch.testing.assert_close(got_scales.cpu(), want_scales, atol=0, rtol=1e-6, equal_nan=True)
    assert int(got_scales.isnan().sum()) == scales.numel() - 2 * 6 * 3 + 3
    # Bytes of neighbouring numbers are neighbours, in both formats, but for the two zeros of floats.
    steps = (got.cpu().view(torch.int8).int() - want.view(torch.int8).int()).abs()
    finite = want_scales.isfinite()
    assert int(steps[finite].max()) <= 1
    assert float((steps[finite] > 0).float().mean()) < 0.01
    assert dequantise(want, want_scales)[~finite].isnan().all()


@triton.jit
def _round_trip(x, bits, back, N: tl.constexpr):
    i = tl.arange(0, N)
    encoded = to_fp8_bits(tl.load(x + i))
    tl.store(bits + i, encoded)
    tl.store(back + i, from_fp8_bits(encoded).to(tl.float32) * 256.0)


def test_float8_bytes_are_those_of_torch(device):
    """Encoding and decoding in integer arithmetic: every number of the format, and what is rounded to it."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    between = (numbers[1:] + numbers[:-1]) / 2
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3000, generator=generator) * 2.0 ** torch.randint(-14, 8, (3000,), generator=generator)
    x = torch.cat((numbers, between, between * 1.0001, between * 0.9999, drawn)).clamp(-448, 448)
    x = torch.nn.functional.pad(x, (0, 4096 - len(x)))
    got_bits, got = torch.zeros(4096, dtype=torch.uint8, device=device), torch.zeros(4096, device=device)
    _round_trip[(1,)](x.to(device), got_bits, got, N=4096)
    want = x.to(torch.float8_e4m3fn)
    assert torch.equal(got_bits.cpu(), want.view(torch.uint8))
    assert torch.equal(got.cpu(), want.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 16, 2, 80), (1, 2, 3, 1, 5), (30, 2, 16, 3, 64)], ids=str)
def test_copies_whole_blocks_and_nothing_else(shape, dtype, device):
    """Gathered into an extent, scattered, or within a pool: blocks arrive bit by bit, NaN included."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(-128, 128, (9, *shape, dtype.itemsize), generator=generator, dtype=torch.int8)
    source = source.view(dtype).flatten(-2)
    target = torch.zeros((6, *shape), dtype=dtype)
    pairs = [(0, 4), (7, 2), (5, 1), (8, 5)]
    want = target.clone().view(torch.int8)
    copy_naive.copy_blocks(source.view(torch.int8), want, pairs)
    got = target.to(device)
    copy_path.copy_blocks(source.to(device), got, pairs)
    assert torch.equal(got.cpu().view(torch.int8), want)
    pool = source.to(device)
    copy_path.copy_blocks(pool, pool, [(1, 4), (2, 5)])
    assert torch.equal(pool[[4, 5]].cpu().view(torch.int8), source[[1, 2]].view(torch.int8))


def test_nothing_to_copy(device):
    """No pairs, no launch."""
    blocks = torch.zeros(2, 4, device=device)
    copy_path.copy_blocks(blocks, blocks, [])
