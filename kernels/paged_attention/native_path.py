"""Attention on CPUs in C (`kernels/native/attention.c`): keys and values are read where they lie."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import native
from kernels.paged_attention.batch import RaggedBatch

_SPLIT = 256  # positions, as in attention.c
_ROWS = 48  # query heads of a piece, likewise
_LANES = 16  # at most, as in vectors.h
_MAX_HEAD_DIM = 512
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}


class PlanStructure(ctypes.Structure):
    """`struct plan` of attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("block_tables", "pieces")),
        *((name, ctypes.c_int64) for name in ("num_pieces", "table_width", "block_size", "window")),
    ]


class AttentionStructure(ctypes.Structure):
    """`struct attention` of attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "out", "keys", "values", "key_scales", "value_scales")),
        *((name, ctypes.c_void_p) for name in ("sinks", "partials", "num_done")),
        *((name, ctypes.c_int64) for name in ("query_stride", "out_stride", "block_stride", "slot_stride")),
        *((name, ctypes.c_int64) for name in ("head_stride", "scale_block_stride", "scale_slot_stride")),
        *((name, ctypes.c_int64) for name in ("num_kv_heads", "group", "head_dim", "format")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch is cut into pieces that threads compute, and memory for what they have in common.

    The same for all layers of a shape under one window, one after the other.
    """

    structure: PlanStructure
    arrays: tuple[NDArray[np.int32], ...]  # what the structure points to
    partials: NDArray[np.float32]
    num_done: NDArray[np.int32]  # zeros, between layers


def serves(query: Tensor, key_cache: Tensor) -> bool:
    """Whether the library is there and knows these shapes and formats."""
    return (
        native.library() is not None
        and not query.is_cuda
        and query.dtype in (torch.float32, torch.bfloat16)
        and key_cache.dtype in FORMATS
        and key_cache.stride(-1) == 1
        and query.shape[-1] <= _MAX_HEAD_DIM
    )


def make_plan(
    batch: RaggedBatch, block_size: int, sliding_window: int | None, num_kv_heads: int, group: int, head_dim: int
) -> Plan:
    """`group`: query heads of a kv head."""
    pieces, num_partials = _pieces(batch, sliding_window, group)
    tables = np.ascontiguousarray(batch.block_tables, np.int32)
    structure = PlanStructure(
        tables.ctypes.data, pieces.ctypes.data, len(pieces), tables.shape[1], block_size, sliding_window or 0
    )
    padded = -(-head_dim // _LANES) * _LANES
    return Plan(
        structure,
        (tables, pieces),
        np.empty(num_partials * num_kv_heads * group * (padded + 2), np.float32),
        np.zeros(num_partials * num_kv_heads, np.int32),
    )


def _pieces(batch: RaggedBatch, sliding_window: int | None, group: int) -> tuple[NDArray[np.int32], int]:
    """int32 [num_pieces, 9], the fields of `struct piece`, and the number of partials.

    Several queries of a sequence are cut into pieces of neighbours, each with all that these see. A decode has a piece
    for each split of its context.
    """
    query_lens, contexts, starts = batch.query_lens, batch.context_lens, batch.query_starts
    size = max(1, _ROWS // group)
    num_tiles = np.where(query_lens > 1, -(-query_lens // size), 0)
    seq, tile = _counted(num_tiles)
    token = np.minimum(size, query_lens[seq] - tile * size)
    position = contexts[seq] - query_lens[seq] + tile * size
    splits = _splits(position, position + token, sliding_window)
    none = np.zeros_like(seq)
    chunks = np.stack((seq, starts[seq] + tile * size, token, position, *splits, none - 1, none, none), axis=1)
    chunks = chunks[np.argsort(splits[0] - splits[1], kind="stable")]  # the longest first: threads end together

    first_split, end_split = _splits(contexts - 1, contexts, sliding_window)
    num_splits = np.where(query_lens == 1, end_split - first_split, 0)
    seq, index = _counted(num_splits)
    split = first_split[seq] + index
    is_whole = num_splits[seq] == 1
    partial = np.where(is_whole, -1, np.cumsum(~is_whole) - 1)
    decodes = (seq, starts[seq], np.ones_like(seq), contexts[seq] - 1, split, split + 1)
    decodes = np.stack((*decodes, partial, partial - index, num_splits[seq]), axis=1)
    return np.concatenate((chunks, decodes)).astype(np.int32), int((~is_whole).sum())


def _counted(counts: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each index as often as `counts` says, and the number of its repetition: [0, 0, 2], [0, 1, 0] for [2, 0, 1]."""
    indices = np.repeat(np.arange(len(counts)), counts)
    return indices, np.arange(len(indices)) - np.repeat(np.cumsum(counts) - counts, counts)


def _splits(
    position: NDArray[Any], end: NDArray[Any], sliding_window: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The splits [first, end) that hold what queries at the positions [position, end) see."""
    first_seen = np.maximum(position - sliding_window + 1, 0) if sliding_window else np.zeros_like(position)
    return first_seen // _SPLIT, -(-end // _SPLIT)


def attention_structure(
    key_cache: Tensor, value_cache: Tensor, kv_scales: tuple[Tensor, Tensor] | None, group: int
) -> AttentionStructure:
    """What is the same in every step, but for what scores are made with."""
    scales: tuple[Any, ...] = kv_scales or (None, None)
    structure = AttentionStructure()
    structure.keys, structure.values = key_cache.data_ptr(), value_cache.data_ptr()
    structure.key_scales, structure.value_scales = (None if s is None else s.data_ptr() for s in scales)
    structure.block_stride, structure.slot_stride, structure.head_stride = key_cache.stride()[:3]
    if kv_scales is not None:
        structure.scale_block_stride, structure.scale_slot_stride = scales[0].stride()[:2]
    structure.num_kv_heads, structure.head_dim = key_cache.shape[2:]
    structure.group, structure.format = group, FORMATS[key_cache.dtype]
    return structure


def attend(
    query: Tensor,  # [num_tokens, num_kv_heads, group, head_dim]
    key_cache: Tensor,
    value_cache: Tensor,
    plan: Plan,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [num_kv_heads, group, 1]
    kv_scales: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Of all sequences of the batch that `plan` was made of; as `query`, contiguous."""
    wide, sinks = query.float().contiguous(), None if sinks is None else sinks.float().contiguous()
    out = torch.empty(query.shape)
    structure = attention_structure(key_cache, value_cache, kv_scales, query.shape[2])
    structure.partials, structure.num_done = plan.partials.ctypes.data, plan.num_done.ctypes.data
    structure.query, structure.out = wide.data_ptr(), out.data_ptr()
    structure.query_stride = structure.out_stride = query[0].numel()
    structure.sinks = None if sinks is None else sinks.data_ptr()
    structure.scale, structure.softcap = scale, softcap or 0.0
    native.library().attend(ctypes.byref(plan.structure), ctypes.byref(structure))
    return out.to(query.dtype)
