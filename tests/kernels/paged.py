"""Paged caches for tests: scattered blocks, and poison wherever nothing may be read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import RaggedBatch
from kernels.quantised import dequantise, quantise

POISONED_BLOCK = 1_000_000
SCALE = 0.17


@dataclass(frozen=True)
class Case:
    query: Tensor  # [num_tokens, num_heads, head_dim]
    keys: Tensor  # one layer's strided view of a pool, [num_blocks, block_size, num_kv_heads, head_dim]
    values: Tensor
    batch: RaggedBatch
    dense: list[tuple[Tensor, Tensor]]  # each sequence's keys and values [context_len, num_kv_heads, head_dim]
    kv_scales: tuple[Tensor, Tensor] | None = None


def make_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """`kv_dtype`: of a quantised cache; there, poison is in the scales, and `dense` is what can be read back."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // block_size) for length in context_lens]
    total = sum(num_blocks) + 3
    blocks = torch.full((total, 3, 2, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    order = torch.randperm(total, generator=generator).tolist()
    tables = np.full((len(context_lens), max(num_blocks, default=0) + 2), POISONED_BLOCK, np.int32)
    dense = []
    for seq, length in enumerate(context_lens):
        tables[seq, : num_blocks[seq]] = [order.pop() for _ in range(num_blocks[seq])]
        kv = torch.randn(2, length, num_kv_heads, head_dim, generator=generator).to(dtype)
        for position in range(length):
            blocks[tables[seq, position // block_size], 1, :, position % block_size] = kv[:, position]
        if kv_dtype is not None:
            kv = dequantise(*quantise(kv, kv_dtype))
        dense.append((kv[0], kv[1]))
    query = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
    batch = RaggedBatch(np.array(query_lens, np.int32), np.array(context_lens, np.int32), tables)
    kv_scales = None
    if kv_dtype is not None:
        blocks, scales = quantise(blocks, kv_dtype)
        scales = scales.to(device)
        kv_scales = scales[:, 1, 0], scales[:, 1, 1]
    blocks = blocks.to(device)
    return Case(query.to(device), blocks[:, 1, 0], blocks[:, 1, 1], batch, dense, kv_scales)


def dense_attention(
    case: Case, sliding_window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Attention in float64, one query and head at a time, straight from its formula. On the CPU."""
    query, batch = case.query.cpu().double(), case.batch
    out = torch.zeros_like(query)
    for seq, (keys, values) in enumerate(case.dense):
        group = query.shape[1] // keys.shape[1]
        for i in range(int(batch.query_lens[seq])):
            token = int(batch.query_starts[seq]) + i
            position = int(batch.context_lens[seq] - batch.query_lens[seq]) + i
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(query.shape[1]):
                seen = slice(first, position + 1), head // group
                scores = keys[seen].double() @ query[token, head] * SCALE
                if softcap is not None:
                    scores = softcap * (scores / softcap).tanh()
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].cpu().double()))
                weights = scores.softmax(0)[: position + 1 - first]
                out[token, head] = weights @ values[seen].double()
    return out
