"""The KV write on GPUs: one program per token, all its heads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Launch, power_of_two
from kernels.quantised import LARGEST, LEAST_SCALE
from kernels.quantised_triton import scaled, to_fp8_bits, to_int8


@triton.jit
def _store(
    row,  # pointer to the token's [NUM_HEADS, HEAD_DIM]
    head_stride,
    slot,  # pointer to its slot in the cache
    slot_head_stride,
    scales,  # pointer to its scales, or None
    scale_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    """One token's keys or values into their slot, quantised if there are scales."""
    heads = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    x = tl.load(row + heads[:, None] * head_stride + dims[None, :], mask=mask, other=0.0)
    if scales is not None:
        x, scale = scaled(x.to(tl.float32), LARGEST, LEAST_SCALE)
        tl.store(scales + heads * scale_head_stride, scale, mask=heads < NUM_HEADS)
        x = to_int8(x) if IS_INT8 else to_fp8_bits(x)
    tl.store(slot + heads[:, None] * slot_head_stride + dims[None, :], x, mask=mask)


@triton.jit
def _store_kv_kernel(
    key,  # [num_tokens, num_kv_heads, head_dim], by strides
    value,
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim], by strides
    value_cache,
    key_scales,  # [num_blocks, block_size, num_kv_heads], by strides; None: the cache is not quantised
    value_scales,
    block_ids,  # int64 [num_tokens]
    offsets,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cache_block_stride,
    cache_slot_stride,
    cache_head_stride,
    scale_block_stride,
    scale_slot_stride,
    scale_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    IS_INT8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids + token)
    offset = tl.load(offsets + token)
    slot = block * cache_block_stride + offset * cache_slot_stride
    if key_scales is not None:
        scale = block * scale_block_stride + offset * scale_slot_stride
        key_scales += scale
        value_scales += scale
    _store(
        key + token * key_token_stride,
        key_head_stride,
        key_cache + slot,
        cache_head_stride,
        key_scales,
        scale_head_stride,
        NUM_HEADS,
        HEAD_DIM,
        BLOCK_H,
        BLOCK_D,
        LARGEST,
        LEAST_SCALE,
        IS_INT8,
    )
    _store(
        value + token * value_token_stride,
        value_head_stride,
        value_cache + slot,
        cache_head_stride,
        value_scales,
        scale_head_stride,
        NUM_HEADS,
        HEAD_DIM,
        BLOCK_H,
        BLOCK_D,
        LARGEST,
        LEAST_SCALE,
        IS_INT8,
    )


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_ids: Tensor,
    offsets: Tensor,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """As `kernels.store_kv.store_kv`. Both caches have the same strides, and so have both scales."""
    launch(key, value, key_cache, value_cache, block_ids, offsets, kv_scales)()


def launch(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_ids: Tensor,
    offsets: Tensor,
    kv_scales: tuple[Tensor, Tensor] | None,
) -> Launch:
    num_tokens, num_heads, head_dim = key.shape
    assert key_cache.stride() == value_cache.stride()
    assert key.stride(2) == value.stride(2) == key_cache.stride(3) == 1
    key_scales = value_scales = None
    scale_strides = (0, 0, 0)
    if kv_scales is not None:
        key_scales, value_scales = kv_scales
        assert key_scales.stride() == value_scales.stride()
        scale_strides = key_scales.stride()
    dtype = key_cache.dtype
    if dtype == torch.float8_e4m3fn:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    return Launch(
        kernel=_store_kv_kernel,
        grid=(num_tokens,),
        arguments={
            "key": key,
            "value": value,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "key_scales": key_scales,
            "value_scales": value_scales,
            "block_ids": block_ids,
            "offsets": offsets,
            "key_token_stride": key.stride(0),
            "key_head_stride": key.stride(1),
            "value_token_stride": value.stride(0),
            "value_head_stride": value.stride(1),
            "cache_block_stride": key_cache.stride(0),
            "cache_slot_stride": key_cache.stride(1),
            "cache_head_stride": key_cache.stride(2),
            "scale_block_stride": scale_strides[0],
            "scale_slot_stride": scale_strides[1],
            "scale_head_stride": scale_strides[2],
        },
        constants={
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_H": power_of_two(num_heads),
            "BLOCK_D": power_of_two(head_dim),
            "LARGEST": LARGEST.get(dtype, 0.0),
            "LEAST_SCALE": LEAST_SCALE,
            "IS_INT8": dtype == torch.int8,
        },
    )
