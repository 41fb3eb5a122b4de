"""Paged attention for CPUs, out of torch operations.

Sequences with one query (decodes) are sorted by length and cut into groups of similar length: one gather of whole
blocks into a preallocated workspace and one masked SDPA per group. Fresh tensors instead of the workspace cost 1.1
to 3 times the time (page faults), and padding is the price of a group, so both are bounded. A sequence with more
queries (a prefill chunk) has its own gather and SDPA. What depends on the step only is made once per step and
window, and used by every layer. Where the library in C is enabled (`kernels/native`), it does all of that.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from kernels.paged_attention import native_path
from kernels.paged_attention.batch import RaggedBatch
from kernels.quantised import dequantise

# A group is closed when one more sequence would make it gather more than this many bytes of keys (the workspace
# stays in the cache of a core), or would pad the others by more blocks than a group's fixed cost is worth.
_GROUP_BYTES = 1 << 20
_GROUP_PADDING_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class _Group:
    """Decodes that are computed together, each on the same number of gathered slots."""

    size: int
    rows: slice | Tensor  # int64 [size]: their queries in the flattened batch; a slice where they are neighbours
    block_ids: Tensor  # int64 [size * blocks of each]; in place of a block that a sequence lacks, its first
    empty: Tensor  # int64: gathered slots, of all the group's, that hold no visible token
    mask: Tensor  # [size, 1, 1, slots of each]: 0, or -inf where empty


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A sequence with several queries."""

    start: int  # of its queries in the flattened batch
    num_queries: int
    block_ids: Tensor  # int64 [num_blocks]
    first_slot: int  # the first gathered slot that a query sees
    num_keys: int  # from there on
    mask: Tensor | None  # [num_queries, num_keys]; None: causal from the first position


class Workspace:
    """Scratch memory of one runner, and what was derived from the batch of its current step.

    Holds the gathered keys and values of one group or chunk: at most `max_context_len` tokens, or a group's bytes.
    """

    def __init__(
        self,
        max_context_len: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        """`dtype`: of the queries. `device`: of the cache."""
        block_bytes = block_size * num_kv_heads * head_dim * dtype.itemsize
        self.group_blocks = max(1, _GROUP_BYTES // block_bytes)
        num_blocks = max(self.group_blocks, -(-max_context_len // block_size))
        self._kv_shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
        self._kv: Tensor | None = None  # made at the first gather: only the torch path does any
        self._block_size = block_size
        self._dtype = dtype
        self._device = torch.device(device)
        self._batch: RaggedBatch | None = None
        self._made: dict[Hashable, Any] = {}

    def gather(
        self,
        key_cache: Tensor,
        value_cache: Tensor,
        kv_scales: tuple[Tensor, Tensor] | None,
        block_ids: Tensor,
        empty: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the blocks, each [num_blocks * block_size, num_kv_heads, head_dim], `empty` slots zeroed.

        What a slot holds that was never written, or was written by an earlier sequence, may be NaN, and a mask does
        not help against it: 0 * NaN is NaN.
        """
        if self._kv is None:
            self._kv = torch.empty(self._kv_shape, dtype=self._dtype, device=self._device)
        kv = self._kv[:, : len(block_ids)]
        if kv_scales is None:
            torch.index_select(key_cache, 0, block_ids, out=kv[0])
            torch.index_select(value_cache, 0, block_ids, out=kv[1])
        else:
            for target, cache, scales in zip(kv, (key_cache, value_cache), kv_scales, strict=True):
                quantised = cache.view(torch.uint8).index_select(0, block_ids).view(cache.dtype)  # no floats of 8 bits
                target.copy_(dequantise(quantised, scales.index_select(0, block_ids)))
        kv = kv.flatten(1, 2)
        if empty is not None:
            kv.index_fill_(1, empty, 0.0)
        return kv[0], kv[1]

    def begin(self, batch: RaggedBatch, made: Mapping[Hashable, Any]) -> None:
        """Begins a step of which some is made already: by key, what `once` would make."""
        self._batch = batch
        self._made = dict(made)

    def once(self, batch: RaggedBatch, key: Hashable, make: Callable[[], Any]) -> Any:
        """`make()`, called once per step: every layer asks, and needs the same."""
        if self._batch is not batch:
            self._batch = batch
            self._made.clear()
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def native_plan(
        self, batch: RaggedBatch, sliding_window: int | None, num_kv_heads: int, group: int, head_dim: int
    ) -> native_path.Plan:
        """All of `batch` under that window, for the library in C. `group`: query heads of a kv head."""
        shape = (num_kv_heads, group, head_dim)
        make = partial(native_path.make_plan, batch, self._block_size, sliding_window, *shape)
        return self.once(batch, ("native", sliding_window, shape), make)

    def groups(self, batch: RaggedBatch, sliding_window: int | None) -> list[_Group]:
        """The decodes of `batch` under that window, for torch."""
        return self.once(batch, ("groups", sliding_window), partial(self._make_groups, batch, sliding_window))

    def chunks(self, batch: RaggedBatch, sliding_window: int | None) -> list[_Chunk]:
        """The sequences of `batch` with several queries, under that window."""
        return self.once(batch, ("chunks", sliding_window), partial(self._make_chunks, batch, sliding_window))

    def _make_groups(self, batch: RaggedBatch, sliding_window: int | None) -> list[_Group]:
        first_seen = _first_seen(batch, sliding_window)
        first_block = first_seen // self._block_size
        num_blocks = -(-batch.context_lens // self._block_size) - first_block
        starts = batch.query_starts
        decodes = np.flatnonzero(batch.query_lens == 1)
        decodes = decodes[np.argsort(num_blocks[decodes], kind="stable")]
        return [
            self._make_group(batch, seqs, starts, first_seen, first_block, num_blocks)
            for seqs in _split(decodes, num_blocks, self.group_blocks)
        ]

    def _make_chunks(self, batch: RaggedBatch, sliding_window: int | None) -> list[_Chunk]:
        first_seen, starts = _first_seen(batch, sliding_window), batch.query_starts
        return [
            self._make_chunk(batch, seq, int(starts[seq]), int(first_seen[seq]), sliding_window)
            for seq in np.flatnonzero(batch.query_lens > 1).tolist()
        ]

    def _make_group(
        self,
        batch: RaggedBatch,
        seqs: NDArray[np.int64],
        starts: NDArray[np.int64],
        first_seen: NDArray[np.int32],
        first_block: NDArray[np.int32],
        num_blocks: NDArray[np.int32],
    ) -> _Group:
        block_size = self._block_size
        width = int(num_blocks[seqs].max())
        column = np.arange(width)[None, :]
        column = np.where(column < num_blocks[seqs, None], column, 0) + first_block[seqs, None]
        block_ids = batch.block_tables[seqs[:, None], column]
        position = np.arange(width * block_size)[None, :] + first_block[seqs, None] * block_size
        empty = (position < first_seen[seqs, None]) | (position >= batch.context_lens[seqs, None])
        mask = torch.zeros(empty.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(empty), -torch.inf)
        return _Group(
            size=len(seqs),
            rows=_as_slice(starts[seqs], self._device),
            block_ids=torch.from_numpy(block_ids.astype(np.int64).ravel()).to(self._device),
            empty=torch.from_numpy(np.flatnonzero(empty)).to(self._device),
            mask=mask[:, None, None, :].to(self._device),
        )

    def _make_chunk(
        self, batch: RaggedBatch, seq: int, start: int, first_seen: int, sliding_window: int | None
    ) -> _Chunk:
        block_size = self._block_size
        query_len, context_len = int(batch.query_lens[seq]), int(batch.context_lens[seq])
        first_block = first_seen // block_size
        block_ids = batch.block_tables[seq, first_block : -(-context_len // block_size)]
        mask = None
        if query_len < context_len or (sliding_window is not None and sliding_window < context_len):
            position = torch.arange(context_len - query_len, context_len)[:, None]
            key_position = torch.arange(first_seen, context_len)[None, :]
            hidden = key_position > position
            if sliding_window is not None:
                hidden |= key_position <= position - sliding_window
            mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf).to(self._device)
        return _Chunk(
            start=start,
            num_queries=query_len,
            block_ids=torch.from_numpy(block_ids.astype(np.int64)).to(self._device),
            first_slot=first_seen - first_block * block_size,
            num_keys=context_len - first_seen,
            mask=mask,
        )


def _first_seen(batch: RaggedBatch, sliding_window: int | None) -> NDArray[np.int32]:
    """The first position that each sequence's first query sees: at p it sees [p - window + 1, p]."""
    if sliding_window is None:
        return np.zeros_like(batch.context_lens)
    return np.maximum(batch.context_lens - batch.query_lens - sliding_window + 1, 0)


def _as_slice(rows: NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """`rows` as an index: a slice, which copies nothing, where they follow one another."""
    if (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


def _split(seqs: NDArray[np.int64], num_blocks: NDArray[np.int32], max_blocks: int) -> list[NDArray[np.int64]]:
    """Cuts `seqs`, sorted by `num_blocks`, into groups within the bounds on size and padding."""
    groups, first, padding = [], 0, 0
    for i in range(1, len(seqs)):
        size, width = i - first, int(num_blocks[seqs[i]])
        padding += size * (width - int(num_blocks[seqs[i - 1]]))
        if padding > _GROUP_PADDING_BLOCKS or (size + 1) * width > max_blocks:
            groups.append(seqs[first:i])
            first, padding = i, 0
    if len(seqs):
        groups.append(seqs[first:])
    return groups


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
    """As `kernels.paged_attention.paged_attention`."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    query = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if sinks is not None:
        sinks = sinks.to(query.dtype).view(num_kv_heads, -1, 1)
    if native_path.serves(query, key_cache):
        plan = workspace.native_plan(batch, sliding_window, *query.shape[1:])
        terms = {"scale": scale, "softcap": softcap, "sinks": sinks, "kv_scales": kv_scales}
        return native_path.attend(query, key_cache, value_cache, plan, **terms).view(num_tokens, num_heads, head_dim)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    gather = partial(workspace.gather, key_cache, value_cache, kv_scales)
    for group in workspace.groups(batch, sliding_window):
        keys, values = gather(group.block_ids, group.empty)
        shape = (group.size, group.mask.shape[-1], num_kv_heads, head_dim)
        keys, values = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
        # The query heads of one kv head take the place of query positions: no key is repeated.
        out[group.rows] = _attend(query[group.rows], keys, values, group.mask, scale, softcap, sinks)
    for chunk in workspace.chunks(batch, sliding_window):
        keys, values = gather(chunk.block_ids)
        seen = slice(chunk.first_slot, chunk.first_slot + chunk.num_keys)
        rows = slice(chunk.start, chunk.start + chunk.num_queries)
        queries = query[rows].permute(1, 2, 0, 3)  # [num_kv_heads, group, num_queries, head_dim]
        shape = (*queries.shape[:2], chunk.num_keys, head_dim)
        keys = keys[seen].transpose(0, 1)[:, None].expand(shape)
        values = values[seen].transpose(0, 1)[:, None].expand(shape)
        chunk_sinks = None if sinks is None else sinks[:, :, None]
        attended = _attend(queries, keys, values, chunk.mask, scale, softcap, chunk_sinks)
        out[rows] = attended.permute(2, 0, 1, 3)
    return out.view(num_tokens, num_heads, head_dim)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[..., n, dim] x [..., keys, dim] -> [..., n, dim].

    `mask` is added to the scores; None: causal, n == keys. `sinks` broadcast to [..., n, 1].
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
        )
    scores = queries @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype, device=scores.device).triu_(1)
    scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1) @ values
    scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return scores.softmax(dim=-1)[..., :-1] @ values
