"""Rotary embedding on GPUs: a program per token and some heads, those of the keys after those of the queries."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Launch, power_of_two

_HEADS = 8  # per program


@triton.jit
def _rotary_kernel(
    query,  # [num_tokens, NUM_HEADS, head_dim], by strides
    key,  # [num_tokens, NUM_KV_HEADS, head_dim], by strides
    cos,  # [num_tokens, NUM_ANGLES]
    sin,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_ANGLES: tl.constexpr,
    BLOCK_A: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    num_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    heads = tl.arange(0, HEADS)
    if group < num_groups:
        heads += group * HEADS
        head_ok = heads < NUM_HEADS
        row = query + token * query_token_stride + heads * query_head_stride
    else:
        heads += (group - num_groups) * HEADS
        head_ok = heads < NUM_KV_HEADS
        row = key + token * key_token_stride + heads * key_head_stride
    angle = tl.arange(0, BLOCK_A)
    angle_ok = angle < NUM_ANGLES
    c = tl.load(cos + token * NUM_ANGLES + angle, mask=angle_ok, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * NUM_ANGLES + angle, mask=angle_ok, other=0.0).to(tl.float32)[None, :]
    if INTERLEAVED:
        first = row[:, None] + 2 * angle[None, :]
        second = first + 1
    else:
        first = row[:, None] + angle[None, :]
        second = first + NUM_ANGLES
    mask = head_ok[:, None] & angle_ok[None, :]
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(second, mask=mask, other=0.0).to(tl.float32)
    tl.store(first, (a * c - b * s).to(query.dtype.element_ty), mask=mask)
    tl.store(second, (b * c + a * s).to(query.dtype.element_ty), mask=mask)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """As `kernels.rotary.rotary`."""
    launch(query, key, cos, sin, interleaved=interleaved)()


def launch(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Launch:
    num_tokens, num_heads, _ = query.shape
    num_kv_heads, num_angles = key.shape[1], cos.shape[1]
    assert query.stride(2) == key.stride(2) == 1
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    return Launch(
        kernel=_rotary_kernel,
        grid=(num_tokens, -(-num_heads // _HEADS) + -(-num_kv_heads // _HEADS)),
        arguments={
            "query": query,
            "key": key,
            "cos": cos,
            "sin": sin,
            "query_token_stride": query.stride(0),
            "query_head_stride": query.stride(1),
            "key_token_stride": key.stride(0),
            "key_head_stride": key.stride(1),
        },
        constants={
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "NUM_ANGLES": num_angles,
            "BLOCK_A": power_of_two(num_angles),
            "HEADS": _HEADS,
            "INTERLEAVED": interleaved,
        },
        num_warps=1,
    )
