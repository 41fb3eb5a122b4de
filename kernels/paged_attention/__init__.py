"""Causal attention of a ragged batch over a paged KV cache.

`naive.py` is the specification: per sequence, dense, obvious. `torch_path.py` is the fast one for CPUs,
`triton_path.py` (with the kernels in `triton_kernel.py`) the one for GPUs. All take the same arguments and give the
same numbers.
"""

import torch
from torch import Tensor

from kernels.chips import chip_of, use_triton
from kernels.paged_attention import torch_path
from kernels.paged_attention.batch import RaggedBatch
from kernels.paged_attention.native_path import Plan
from kernels.paged_attention.torch_path import Workspace
from kernels.quantised import is_quantised

__all__ = ["Plan", "RaggedBatch", "Workspace", "paged_attention", "queries_per_tile"]


def queries_per_tile(
    device: torch.device,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> int:
    """For `tiles.tile_table`: how the Triton path cuts chunks of such heads. `dtype`: of queries; `kv_dtype`: cache."""
    from kernels.paged_attention import triton_path

    return triton_path.queries_per_tile(num_heads, num_kv_heads, head_dim, dtype, kv_dtype, chip_of(device))


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    workspace: Workspace,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """As `naive.paged_attention`. Overwrites `workspace`; reads nothing of the cache but visible tokens."""
    assert is_quantised(key_cache) == (kv_scales is not None), "a cache has scales when it is quantised"
    attend = torch_path.paged_attention
    if use_triton(query):
        from kernels.paged_attention import triton_path

        attend = triton_path.paged_attention
    return attend(
        query,
        key_cache,
        value_cache,
        batch,
        scale=scale,
        workspace=workspace,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        kv_scales=kv_scales,
    )
