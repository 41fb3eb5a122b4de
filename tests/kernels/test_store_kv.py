import pytest
import torch

from kernels.store_kv import naive, store_kv


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
