"""The kernels of paged attention.

One program computes a tile: the query heads of one kv head, for one query (a decode) or several neighbours (a part of
a prefill chunk), packed into the rows of one matrix so that every key that is read serves all of them and tensor cores
apply. It walks over the visible tokens, block by block of the table, with a running softmax (Dao et al.,
FlashAttention, 2022). A decode's context is cut into splits of fixed length, each a program of its own, and a second
kernel merges them by their log-sum-exps (Flash-Decoding, 2023). Where splits begin depends on a sequence's own position
and window alone, so what else is in the batch does not change one bit of the result.
"""

import triton
import triton.language as tl

from kernels.quantised_triton import from_fp8_bits

# In place of minus infinity: differences of two of them stay numbers.
_LEAST = tl.constexpr(-1.0e30)
_LOG2_E = tl.constexpr(1.4426950408889634)

# How the cache is stored: as the queries are; int8; float8 e4m3; float8 e4m3 on a chip that does not know it.
PLAIN = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)
FP8_BITS = tl.constexpr(3)


@triton.jit
def _decode(x, FORMAT: tl.constexpr, DOT: tl.constexpr):
    """Numbers of the cache as operands of a dot product, but for their scale (and 256 for FP8_BITS)."""
    if FORMAT == FP8_BITS:
        x = from_fp8_bits(x)
    return x.to(DOT)


@triton.jit
def _decode_scale(x, FORMAT: tl.constexpr):
    return x * 256.0 if FORMAT == FP8_BITS else x


@triton.jit
def _apply_sink(out, lse, sink):
    """A sink takes its part of the softmax and adds nothing. `lse` in base 2, `sink` a logit; both [rows]."""
    share = tl.exp2(tl.minimum(sink * _LOG2_E - lse, 126.0))  # of the sink to all else, still a number
    return out / (1.0 + share)[:, None]


# Widths and windows change from step to step and layer to layer: no compiled kernel of their own for some of them.
@triton.jit(do_not_specialize=["table_stride", "window"])
def attention_kernel(
    out,  # [num_tokens, num_heads, HEAD_DIM]; with splits float32 [num_splits, num_tiles, num_heads, HEAD_DIM]
    lse,  # float32 [num_splits, num_tiles, num_heads], base 2; None: no splits
    query,  # [num_tokens, num_heads, HEAD_DIM], by strides
    keys,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM], by strides
    values,
    key_scales,  # float32 [num_blocks, BLOCK_SIZE, num_kv_heads], by strides; None: not quantised
    value_scales,
    sinks,  # [num_heads], or None
    tiles,  # int32 [num_tiles, 4]: sequence, first token, number of tokens, position of the first
    block_tables,  # int32 [num_seqs, table_stride]
    table_stride,
    query_token_stride,
    query_head_stride,
    block_stride,
    slot_stride,
    head_stride,
    scale_block_stride,
    scale_slot_stride,
    scale_head_stride,
    scale,
    softcap,  # or None
    window,  # or None
    GROUP: tl.constexpr,  # query heads per kv head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,  # tokens of a split, a multiple of BLOCK_N
    FORMAT: tl.constexpr,
    DOT: tl.constexpr,
):
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    seq = tl.load(tiles + tile * 4).to(tl.int64)
    first_token = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    num_tokens = tl.load(tiles + tile * 4 + 2)
    first_position = tl.load(tiles + tile * 4 + 3)

    begin = 0
    if window is not None:
        begin = tl.maximum(first_position - window + 1, 0)
    end = first_position + num_tokens
    if lse is not None:
        split_begin = (begin // SPLIT + split) * SPLIT
        begin = tl.maximum(begin, split_begin)
        end = tl.minimum(end, split_begin + SPLIT)
        if begin >= end:
            return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    row_ok = token < num_tokens
    dim_ok = dims < HEAD_DIM
    position = first_position + token
    q = tl.load(
        query + ((first_token + token) * query_token_stride + head * query_head_stride)[:, None] + dims[None, :],
        mask=row_ok[:, None] & dim_ok[None, :],
        other=0.0,
    ).to(DOT)

    peak = tl.full([BLOCK_M], _LEAST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key_position = start + tl.arange(0, BLOCK_N)
        # Nothing else is read: tables and slots hold anything elsewhere, and 0 * NaN is NaN.
        seen = key_position < end
        block = tl.load(block_tables + seq * table_stride + key_position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        slot = key_position % BLOCK_SIZE
        at = block * block_stride + slot * slot_stride + kv_head * head_stride
        k = tl.load(keys + at[None, :] + dims[:, None], mask=seen[None, :] & dim_ok[:, None], other=0.0)
        scores = tl.dot(q, _decode(k, FORMAT, DOT), input_precision="ieee")
        if key_scales is not None:
            scale_at = block * scale_block_stride + slot * scale_slot_stride + kv_head * scale_head_stride
            scores *= _decode_scale(tl.load(key_scales + scale_at, mask=seen, other=0.0), FORMAT)[None, :]
        if softcap is None:
            scores *= scale * _LOG2_E
        else:
            # tanh(x) = 2 sigmoid(2 x) - 1
            scores = (softcap * _LOG2_E) * (2.0 * tl.sigmoid(scores * (2.0 * scale / softcap)) - 1.0)
        visible = seen[None, :] & (key_position[None, :] <= position[:, None])
        if window is not None:
            visible &= key_position[None, :] > position[:, None] - window
        scores = tl.where(visible, scores, _LEAST)

        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        # A row that has seen nothing yet weighs hidden tokens alike; its first visible one shrinks that to 0.
        total = total * shrink + tl.sum(weights, 1)
        acc *= shrink[:, None]
        v = tl.load(values + at[:, None] + dims[None, :], mask=seen[:, None] & dim_ok[None, :], other=0.0)
        if value_scales is not None:
            weights *= _decode_scale(tl.load(value_scales + scale_at, mask=seen, other=0.0), FORMAT)[None, :]
        acc = tl.dot(weights.to(DOT), _decode(v, FORMAT, DOT), acc, input_precision="ieee")
        peak = new_peak

    acc /= total[:, None]
    row_lse = peak + tl.log2(total)
    num_heads = tl.num_programs(0) * GROUP
    if lse is None:
        if sinks is not None:
            acc = _apply_sink(acc, row_lse, tl.load(sinks + head, mask=row_ok, other=0.0).to(tl.float32))
        at_row = (first_token + token) * num_heads + head
    else:
        at_row = (split.to(tl.int64) * tl.num_programs(1) + tile) * num_heads + head
        tl.store(lse + at_row, row_lse, mask=row_ok)
    tl.store(
        out + (at_row * HEAD_DIM)[:, None] + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=row_ok[:, None] & dim_ok[None, :],
    )


@triton.jit(do_not_specialize=["window"])
def merge_kernel(
    out,  # [num_tokens, num_heads, HEAD_DIM]
    split_out,  # as attention_kernel left them
    split_lse,
    sinks,
    tiles,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr,  # splits merged at a time
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    num_heads = tl.num_programs(0)
    num_tiles = tl.num_programs(1)
    token = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    position = tl.load(tiles + tile * 4 + 3)
    begin = 0
    if window is not None:
        begin = tl.maximum(position - window + 1, 0)
    num_splits = position // SPLIT - begin // SPLIT + 1

    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < HEAD_DIM
    peak = tl.full([1], _LEAST, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        ok = split < num_splits
        row = (split.to(tl.int64) * num_tiles + tile) * num_heads + head
        lse = tl.load(split_lse + row, mask=ok, other=_LEAST)
        x = tl.load(
            split_out + (row * HEAD_DIM)[:, None] + dims[None, :], mask=ok[:, None] & dim_ok[None, :], other=0.0
        )
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.where(ok, tl.exp2(lse - new_peak), 0.0)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(weights[:, None] * x, 0)[None, :]
        peak = new_peak
    acc /= total[:, None]
    if sinks is not None:
        acc = _apply_sink(acc, peak + tl.log2(total), tl.load(sinks + head).to(tl.float32))
    tl.store(
        out + (token * num_heads + head) * HEAD_DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=dim_ok[None, :]
    )
