import pytest
import torch

from kernels.quantised import LARGEST, dequantise, quantise
from kernels.store_kv import naive, store_kv

pytestmark = pytest.mark.usefixtures("cpu_path")


@pytest.mark.parametrize("num_tokens", [0, 1, 50])
def test_store_kv_writes_the_named_slots_and_nothing_else(num_tokens):
    """Keys and values land in their slots of one layer's strided view; all other memory keeps its content."""
    generator = torch.Generator().manual_seed(num_tokens)
    blocks = torch.randn(10, 3, 2, 8, 2, 4, generator=generator)
    key, value = torch.randn(2, num_tokens, 2, 4, generator=generator)
    slots = torch.randperm(80, generator=generator)[:num_tokens]
    want = blocks.clone()
    naive.store_kv(key, value, want[:, 1, 0], want[:, 1, 1], slots // 8, slots % 8)
    store_kv(key, value, blocks[:, 1, 0], blocks[:, 1, 1], slots // 8, slots % 8)
    assert torch.equal(blocks, want)


def test_store_kv_takes_transposed_tokens():
    """Keys as attention layers have them, heads before tokens in memory, are taken as they are."""
    blocks = torch.zeros(4, 1, 2, 8, 2, 4)
    key, value = torch.randn(2, 2, 5, 4).transpose(1, 2)
    store_kv(key, value, blocks[:, 0, 0], blocks[:, 0, 1], torch.full((5,), 3), torch.arange(5))
    assert torch.equal(blocks[3, 0, 0, :5], key)
    assert torch.equal(blocks[3, 0, 1, :5], value)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_store_kv_quantises(dtype):
    """In a cache of one byte, each token and head is kept within half a step, with its scale; the rest is untouched."""
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 5, 2, 16, generator=generator)
    blocks, scales = quantise(torch.full((4, 3, 2, 8, 2, 16), torch.nan), dtype)
    layer, kv_scales = (blocks[:, 1, 0], blocks[:, 1, 1]), (scales[:, 1, 0], scales[:, 1, 1])
    slots = torch.tensor([3, 0, 0, 2, 3]), torch.tensor([7, 0, 1, 4, 6])
    want = blocks.clone(), scales.clone()
    naive.store_kv(key, value, want[0][:, 1, 0], want[0][:, 1, 1], *slots, (want[1][:, 1, 0], want[1][:, 1, 1]))
    store_kv(key, value, *layer, *slots, kv_scales)
    assert torch.equal(blocks.view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(scales.view(torch.int32), want[1].view(torch.int32))
    assert int(scales.isnan().sum()) == scales.numel() - 2 * 5 * 2
    stored = torch.stack(
        [dequantise(c.view(torch.uint8)[slots].view(dtype), s[slots]) for c, s in zip(layer, kv_scales, strict=True)]
    )
    step = scales_of_steps(torch.stack((key, value)), dtype)
    assert ((stored - torch.stack((key, value))).abs() <= 0.501 * step).all()


def scales_of_steps(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbours in the format, around each number."""
    scale = x.abs().amax(dim=-1, keepdim=True) / LARGEST[dtype]
    if dtype == torch.int8:
        return scale
    # Three bits of mantissa, exponents from -6 on.
    return scale * 2.0 ** (torch.log2((x / scale).abs()).floor().clamp(min=-6) - 3)


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_quantised_rows_that_are_no_ordinary_numbers(dtype):
    """Zeros stay zeros, however small numbers nearly so; what is not finite is read back as NaN, all of its row."""
    x = torch.tensor([[0.0, 0.0], [1e-38, -1e-38], [1.0, torch.nan], [torch.inf, 1.0], [3.0, -3.0]])
    back = dequantise(*quantise(x, dtype))
    torch.testing.assert_close(back[:2], x[:2], atol=1e-30, rtol=0)
    assert back[2:4].isnan().all()
    assert back[4].tolist() == pytest.approx([3.0, -3.0])
