"""Decodes on CPUs in C (`kernels/native`): keys and values are read where they lie, once."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import native
from kernels.paged_attention.batch import RaggedBatch

_SPLIT = 256  # tokens, as in source.c
_MAX_HEAD_DIM = 512
_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}


class _Decodes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("block_tables", "seqs", "context_lens", "tokens", "first_tasks")),
        *((name, ctypes.c_int64) for name in ("num_decodes", "table_width", "block_size", "window")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("query", "keys", "values", "key_scales", "value_scales", "sinks", "out", "partials")
        ),
        *((name, ctypes.c_int64) for name in ("block_stride", "slot_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("scale_block_stride", "scale_slot_stride")),
        *((name, ctypes.c_int64) for name in ("num_kv_heads", "group", "head_dim", "format")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


@dataclass(frozen=True, slots=True)
class Decodes:
    """The sequences of a batch with one query, as the library takes them."""

    structure: _Decodes
    num_tasks: int  # of one kv head
    arrays: tuple[NDArray[np.int32], ...]  # what the structure points to


def serves(query: Tensor, key_cache: Tensor) -> bool:
    """Whether the library is there and knows these shapes and formats."""
    head_dim = query.shape[-1]
    return (
        native.library() is not None
        and not query.is_cuda
        and query.dtype in (torch.float32, torch.bfloat16)
        and key_cache.dtype in _FORMATS
        and key_cache.stride(-1) == 1
        and head_dim <= _MAX_HEAD_DIM
        and (head_dim % 16 == 0 or key_cache.dtype == torch.float32)
    )


def find_decodes(batch: RaggedBatch, block_size: int, sliding_window: int | None) -> Decodes | None:
    seqs = np.flatnonzero(batch.query_lens == 1).astype(np.int32)
    if not len(seqs):
        return None
    contexts = np.ascontiguousarray(batch.context_lens[seqs], np.int32)
    tokens = batch.query_starts[seqs].astype(np.int32)
    first_seen = np.maximum(contexts - sliding_window, 0) if sliding_window else np.zeros_like(contexts)
    num_splits = -(-contexts // _SPLIT) - first_seen // _SPLIT
    first_tasks = np.concatenate(([0], np.cumsum(num_splits))).astype(np.int32)
    tables = np.ascontiguousarray(batch.block_tables, np.int32)
    arrays = (tables, seqs, contexts, tokens, first_tasks)
    structure = _Decodes(
        *(array.ctypes.data for array in arrays), len(seqs), tables.shape[1], block_size, sliding_window or 0
    )
    return Decodes(structure, int(first_tasks[-1]), arrays)


def attend_decodes(
    query: Tensor,  # [num_tokens, num_kv_heads, group, head_dim]
    key_cache: Tensor,
    value_cache: Tensor,
    decodes: Decodes,
    out: Tensor,  # as query
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [num_kv_heads, group, 1]
    kv_scales: tuple[Tensor, Tensor] | None,
) -> None:
    """Writes the rows of `out` that belong to decodes."""
    num_kv_heads, group, head_dim = query.shape[1:]
    computed = out if out.dtype == torch.float32 else torch.empty(out.shape)
    query = query.float().contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    partials = torch.empty(decodes.num_tasks * num_kv_heads * group * (head_dim + 2))
    scales: tuple[Any, ...] = kv_scales or (None, None)
    layer = _Layer(
        *(
            None if tensor is None else tensor.data_ptr()
            for tensor in (query, key_cache, value_cache, *scales, sinks, computed, partials)
        ),
        *key_cache.stride()[:3],
        *(scales[0].stride()[:2] if kv_scales else (0, 0)),
        num_kv_heads,
        group,
        head_dim,
        _FORMATS[key_cache.dtype],
        scale,
        softcap or 0.0,
    )
    native.library().attend_decodes(ctypes.byref(decodes.structure), ctypes.byref(layer))
    if computed is not out:
        rows = torch.from_numpy(decodes.arrays[3]).long()
        out[rows] = computed[rows].to(out.dtype)
