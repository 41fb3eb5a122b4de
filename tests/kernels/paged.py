"""Paged caches for tests: scattered blocks, and poison wherever nothing may be read."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import RaggedBatch

POISONED_BLOCK = 1_000_000


def make_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, RaggedBatch, list[tuple[Tensor, Tensor]]]:
    """Query, key cache and value cache (one layer's strided views), batch, and each sequence's dense (keys, values)."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // block_size) for length in context_lens]
    total = sum(num_blocks) + 3
    blocks = torch.full((total, 3, 2, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    order = torch.randperm(total, generator=generator).tolist()
    tables = np.full((len(context_lens), max(num_blocks) + 2), POISONED_BLOCK, np.int32)
    dense = []
    for seq, length in enumerate(context_lens):
        tables[seq, : num_blocks[seq]] = [order.pop() for _ in range(num_blocks[seq])]
        keys, values = torch.randn(2, length, num_kv_heads, head_dim, generator=generator).to(dtype)
        for position in range(length):
            slot = blocks[tables[seq, position // block_size], 1, :, position % block_size]
            slot[0], slot[1] = keys[position], values[position]
        dense.append((keys, values))
    query = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
    batch = RaggedBatch(np.array(query_lens, np.int32), np.array(context_lens, np.int32), tables)
    return query, blocks[:, 1, 0], blocks[:, 1, 1], batch, dense
