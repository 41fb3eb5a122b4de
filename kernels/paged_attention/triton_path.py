"""Paged attention on GPUs: what is launched for a batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.chips import Chip, chip_of
from kernels.launch import Launch, dot_type, power_of_two
from kernels.paged_attention.batch import RaggedBatch
from kernels.paged_attention.tiles import SPLIT, tiles_key, tiles_on
from kernels.paged_attention.torch_path import Workspace
from kernels.paged_attention.triton_kernel import FP8, FP8_BITS, INT8, PLAIN, attention_kernel, merge_kernel

_MERGED_SPLITS = 16


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a program is cut: rows (queries times heads of a group), keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def decode_shape(group: int, block_d: int, dtype: torch.dtype) -> TileShape:
    """For one query: 16 rows are the fewest that tensor cores take."""
    rows = power_of_two(group, 16)
    if dtype == torch.float32:  # no tensor cores: products of larger tiles do not fit the registers
        return TileShape(rows, 16, num_warps=8, num_stages=2)
    return TileShape(rows, 64 if block_d <= 128 else 32, num_warps=4 if rows <= 32 else 8, num_stages=2)


def chunk_shape(group: int, block_d: int, dtype: torch.dtype, kv_dtype: torch.dtype, chip: Chip) -> TileShape:
    """For several queries: the largest that neither spill registers nor overflow shared memory (kernels/aot.py)."""
    if dtype == torch.float32:
        return decode_shape(group, block_d, dtype)
    if chip.backend == "hip" and kv_dtype.itemsize == 1:
        return TileShape(power_of_two(group, 64), 32, num_warps=4, num_stages=2)
    if block_d > 128:
        return TileShape(power_of_two(group, 64), 32, num_warps=8, num_stages=2)
    before_hopper = chip.backend == "cuda" and int(chip.arch) < 90
    return TileShape(power_of_two(group, 128), 32 if before_hopper else 64, num_warps=8, num_stages=2)


def queries_per_tile(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, chip: Chip
) -> int:
    """How many neighbours of a chunk a program computes."""
    group = num_heads // num_kv_heads
    return chunk_shape(group, power_of_two(head_dim, 16), dtype, kv_dtype, chip).rows // group


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
    """As `kernels.paged_attention.paged_attention`. Both caches have the same strides, and so have both scales."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for launch in launches(
        out,
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
        chip=chip_of(query.device),
    ):
        launch()
    return out


def launches(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    workspace: Workspace,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    kv_scales: tuple[Tensor, Tensor] | None,
    chip: Chip,
) -> list[Launch]:
    """What computes `out`, contiguous, in this order."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    group, block_d = num_heads // num_kv_heads, power_of_two(head_dim, 16)
    assert query.stride(2) == key_cache.stride(3) == 1
    assert key_cache.stride() == value_cache.stride()
    chunk = chunk_shape(group, block_d, query.dtype, key_cache.dtype, chip)
    decode = decode_shape(group, block_d, query.dtype)
    size = chunk.rows // group
    tiles = workspace.once(batch, tiles_key(size), lambda: tiles_on(query.device, batch, size))
    num_decodes = tiles.host.num_decodes
    cache_format = _format(key_cache.dtype, chip)
    key_scales, value_scales = kv_scales or (None, None)
    if key_scales is not None:
        assert key_scales.stride() == value_scales.stride()
    if cache_format is FP8_BITS:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    shared = {
        "query": query,
        "keys": key_cache,
        "values": value_cache,
        "key_scales": key_scales,
        "value_scales": value_scales,
        "sinks": sinks,
        "block_tables": tiles.block_tables,
        "table_stride": tiles.block_tables.shape[1],
        "query_token_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "block_stride": key_cache.stride(0),
        "slot_stride": key_cache.stride(1),
        "head_stride": key_cache.stride(2),
        "scale_block_stride": 0 if key_scales is None else key_scales.stride(0),
        "scale_slot_stride": 0 if key_scales is None else key_scales.stride(1),
        "scale_head_stride": 0 if key_scales is None else key_scales.stride(2),
        "scale": float(scale),
        "softcap": None if softcap is None else float(softcap),
        "window": sliding_window,
    }

    def attention(shape: TileShape, table: Tensor, out: Tensor, lse: Tensor | None, num_splits: int) -> Launch:
        return Launch(
            kernel=attention_kernel,
            grid=(num_kv_heads, len(table), num_splits),
            arguments={"out": out, "lse": lse, "tiles": table} | shared,
            constants={
                "GROUP": group,
                "HEAD_DIM": head_dim,
                "BLOCK_SIZE": key_cache.shape[1],
                "BLOCK_M": shape.rows,
                "BLOCK_N": shape.keys,
                "BLOCK_D": block_d,
                "SPLIT": SPLIT,
                "FORMAT": cache_format.value,
                "DOT": dot_type(query.dtype, chip),
            },
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )

    launches = []
    if num_decodes:
        table = tiles.table[:num_decodes]
        num_splits = tiles.host.num_splits(sliding_window)
        if num_splits == 1:
            launches.append(attention(decode, table, out, None, 1))
        else:
            shape = (num_splits, num_decodes, num_heads)
            split_out = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
            split_lse = torch.empty(shape, dtype=torch.float32, device=query.device)
            launches.append(attention(decode, table, split_out, split_lse, num_splits))
            launches.append(
                Launch(
                    kernel=merge_kernel,
                    grid=(num_heads, num_decodes),
                    arguments={
                        "out": out,
                        "split_out": split_out,
                        "split_lse": split_lse,
                        "sinks": sinks,
                        "tiles": table,
                        "window": sliding_window,
                    },
                    constants={
                        "HEAD_DIM": head_dim,
                        "BLOCK_D": block_d,
                        "SPLIT": SPLIT,
                        "BLOCK_S": _MERGED_SPLITS,
                    },
                )
            )
    if len(tiles.table) > num_decodes:
        launches.append(attention(chunk, tiles.table[num_decodes:], out, None, 1))
    return launches


def _format(dtype: torch.dtype, chip: Chip) -> object:
    if dtype == torch.int8:
        return INT8
    if dtype == torch.float8_e4m3fn:
        return FP8 if chip.has_fp8 else FP8_BITS
    return PLAIN
