import pytest
import torch

from kernels.copy_blocks import copy_blocks, naive


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", [[], [(3, 0)], [(0, 4), (7, 2), (5, 1)]])
def test_copies_whole_blocks_between_pools_and_nothing_else(pairs, dtype):
    """Blocks land where they are told to, in every layer; all other memory keeps its content."""
    generator = torch.Generator().manual_seed(0)
    device = torch.randn(8, 3, 2, 4, 2, 5, generator=generator).to(dtype)
    host = torch.randn(6, 3, 2, 4, 2, 5, generator=generator).to(dtype)
    want = host.clone()
    naive.copy_blocks(device, want, pairs)
    source = device.clone()
    copy_blocks(device, host, pairs)
    assert torch.equal(host, want)
    assert torch.equal(device, source)


def test_copies_within_one_pool():
    """Copy-on-write: source and target in the same tensor."""
    blocks = torch.arange(6.0)[:, None].repeat(1, 3)
    copy_blocks(blocks, blocks, [(1, 4), (2, 5)])
    assert blocks[:, 0].tolist() == [0, 1, 2, 3, 1, 2]
