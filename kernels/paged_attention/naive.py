"""Paged attention as its specification: per sequence, dense, obvious."""

import torch
from torch import Tensor

from kernels.paged_attention.batch import RaggedBatch
from kernels.quantised import dequantise


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """softmax(cap(scale * q k^T)) v over the visible positions, computed in the dtype of `query`.

    query [num_tokens, num_heads, head_dim]; key_cache and value_cache [num_blocks, block_size, num_kv_heads,
    head_dim], any strides; head h reads kv head h // (num_heads / num_kv_heads). A query at position p sees the
    positions above p - sliding_window up to p. cap(x) = softcap * tanh(x / softcap). `sinks` [num_heads]: one more
    logit per head, neither scaled nor capped, that takes its share of the softmax and adds nothing. `kv_scales`: of a
    quantised cache, as store_kv wrote them. Returns the shape of `query`.
    """
    if kv_scales is not None:
        key_cache = dequantise(key_cache, kv_scales[0]).to(query.dtype)
        value_cache = dequantise(value_cache, kv_scales[1]).to(query.dtype)
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = query.shape[1] // num_kv_heads
    out = torch.empty_like(query)
    for seq, start in enumerate(batch.query_starts.tolist()):
        query_len, context_len = int(batch.query_lens[seq]), int(batch.context_lens[seq])
        slots = [(int(batch.block_tables[seq, p // block_size]), p % block_size) for p in range(context_len)]
        keys = torch.stack([key_cache[slot] for slot in slots]).repeat_interleave(group, dim=1)  # [context, heads, dim]
        values = torch.stack([value_cache[slot] for slot in slots]).repeat_interleave(group, dim=1)
        queries = query[start : start + query_len]
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(context_len - query_len, context_len)[:, None]
        key_position = torch.arange(context_len)[None, :]
        visible = key_position <= position
        if sliding_window is not None:
            visible &= key_position > position - sliding_window
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(scores)[:, None, None].expand(-1, query_len, 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., :context_len]
        out[start : start + query_len] = torch.einsum("hqk,khd->qhd", weights, values)
    return out
