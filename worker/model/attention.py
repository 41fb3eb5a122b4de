"""Our attention, as transformers calls it.

transformers dispatches every attention layer to a function by name. Ours finds the step it belongs to in a keyword
argument that the models hand through to it: no global state, several runners in one process do not meet.

What a layer may see is asked once, at load, under the name `PROBE`: transformers then gives each layer what our mask
function made of the layer's mask. Under the name `ATTENTION` no mask is built at all; the block tables and what was
found at load, a `Visibility` per layer, say who sees what.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kernels.paged_attention import Plan, RaggedBatch, Workspace, paged_attention
from kernels.store_kv import store_kv
from worker.model.errors import ModelError
from worker.model.kv_cache import KVCache, KVShape

ATTENTION = "carousel"
PROBE = "carousel-probe"
UNCOMPILED = "carousel-uncompiled"

# Tensors that models hand to their attention and that do not change its result. Any other (a bias, the indices of what
# a sparse layer has chosen to see) does, or might.
_WITHOUT_EFFECT = ("position_ids", "logits_to_keep")


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which positions a query sees: all up to its own, the last `sliding_window` of these, or those of its chunk."""

    sliding_window: int | None = None
    chunk_size: int | None = None


class _ProbedMask:
    """Stands for a layer's mask under the name `PROBE`. A model that computes with its masks is found out by it."""

    def __init__(self, mask_function: Callable[..., Tensor], local_size: int | None):
        self._mask_function = mask_function
        self._local_size = local_size

    def visibility(self) -> Visibility:
        """What the mask lets a query see, found by asking for one. Raises ModelError for a mask that we do not know."""
        size = self._local_size or 4
        position = 2 * size  # in its third chunk, with two windows before it
        key_positions = torch.arange(position + size)
        zero = torch.zeros((), dtype=torch.int64)
        try:
            visible = self._mask_function(zero, zero, torch.tensor(position), key_positions).expand_as(key_positions)
        except IndexError as error:
            raise ModelError("its attention mask depends on more than positions") from error
        seen = visible.nonzero()[:, 0].tolist()
        for first, visibility in (
            (0, Visibility()),
            (position - size + 1, Visibility(sliding_window=size)),
            (position, Visibility(chunk_size=size)),
        ):
            if seen == list(range(first, position + 1)):
                return visibility
        raise ModelError("a token does not see all and only the tokens before it, or the last of them")

    def __getattr__(self, name: str) -> Any:
        raise ModelError("it computes masks from what it reads (sparse or dynamic attention)")

    def __getitem__(self, index: Any) -> Any:
        return self.shape

    def __radd__(self, other: Any) -> Any:
        return self.shape


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One call of attention in a forward. A model has as many as it makes calls, in their order."""

    kv_shape: KVShape
    visibility: Visibility
    num_heads: int = 0  # of queries; 0: not asked


class AttentionContext(Protocol):
    """What a forward passes as `attention_context`: who computes its attention layers."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visibility: Visibility | None,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """query [num_tokens, num_heads, key_dim], key [num_tokens, num_kv_heads, key_dim], value [.., value_dim].

        `sinks` [num_heads]; `visibility` under the name `PROBE` only. Returns [num_tokens, num_heads, value_dim].
        """
        ...


def _attention_forward(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, key_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, key_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: _ProbedMask | Tensor | None,
    *,
    attention_context: AttentionContext | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function behind both names. Returns [1, num_tokens, num_heads, value_dim]."""
    if attention_context is None:
        raise ModelError("the model does not hand the arguments of its forward on to its attention layers")
    if isinstance(attention_mask, Tensor):
        raise ModelError("the model builds an attention mask of its own")
    for name, value_of in others.items():
        if isinstance(value_of, Tensor) and name not in _WITHOUT_EFFECT:
            raise ModelError(f"its attention has a term that is not supported: {name}")
    out = attention_context.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        None if attention_mask is None else attention_mask.visibility(),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def probed_mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> _ProbedMask:
    """The mask function behind `PROBE`."""
    return _ProbedMask(mask_function, local_size)


AttentionInterface.register(ATTENTION, _attention_forward)
AttentionInterface.register(PROBE, _attention_forward)
AttentionMaskInterface.register(PROBE, probed_mask)


def leave_attention_uncompiled(model: PreTrainedModel) -> None:
    """Switches a model whose attention is ours to one that torch.compile calls and does not look into.

    It launches kernels of its own, from numbers that differ in every step.
    """
    AttentionInterface.register(UNCOMPILED, torch.compiler.disable(_attention_forward))
    model.set_attn_implementation(UNCOMPILED)


class LayerWorkspaces:
    """The scratch memory of a runner: one `Workspace` for each kind of layer, since a step's plans are kept in it."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        max_context_len: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        """Raises ModelError when attention chunks do not end with blocks."""
        self.block_size = block_size
        self._of: dict[tuple[KVShape, int | None], Workspace] = {}
        for layer in layers:
            shape, chunk_size = layer.kv_shape, layer.visibility.chunk_size
            if chunk_size is not None and chunk_size % block_size:
                raise ModelError(f"attention chunks of {chunk_size} tokens are no whole blocks of {block_size}")
            if (shape, chunk_size) not in self._of:
                longest = min(max_context_len, chunk_size or max_context_len)
                self._of[shape, chunk_size] = Workspace(
                    longest, block_size, shape.num_kv_heads, shape.head_dim, dtype, device
                )

    def begin(self, chunk_size: int | None, batch: RaggedBatch, made: Mapping[Hashable, Any]) -> None:
        """Begins a step whose layers of that chunk size see `batch`; `made`: as `Workspace.begin`."""
        for (_, size), workspace in self._of.items():
            if size == chunk_size:
                workspace.begin(batch, made)

    def of(self, layer: AttentionLayer) -> Workspace:
        return self._of[layer.kv_shape, layer.visibility.chunk_size]


class PagedContext:
    """The attention of one step: writes the step's keys and values into their blocks, then attends over the cache."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        cache: KVCache,
        workspaces: LayerWorkspaces,
        batch: RaggedBatch,
        block_ids: Tensor,
        offsets: Tensor,
        split: Mapping[int, RaggedBatch] | None = None,
    ):
        """`block_ids` and `offsets`, int64 [num_tokens]: the slot of each token.

        split: `batch` by size of attention chunks (`split_at_chunks`), where it is there already.
        """
        self._layers = layers
        self._cache = cache
        self._workspaces = workspaces
        self._slots = block_ids, offsets
        self._batches: dict[int | None, RaggedBatch] = {None: batch, **(split or {})}  # by chunk size
        self._num_calls = 0

    @property
    def num_calls(self) -> int:
        """Of attention, so far."""
        return self._num_calls

    def again(self, num_calls: int) -> Self:
        """The same step as it was after so many calls."""
        context = copy(self)
        context._num_calls = num_calls
        return context

    @property
    def cache(self) -> KVCache:
        return self._cache

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Block ids and offsets, int64 [num_tokens]."""
        return self._slots

    def take_native(self, num_layers: int, group: int) -> tuple[int, list[Plan]]:
        """For who computes the next `num_layers` calls of attention in C: the first of them, and a plan of each.

        `group`: query heads of a kv head.
        """
        first = self._num_calls
        self._num_calls += num_layers
        plans = []
        for layer in self._layers[first : self._num_calls]:
            window, chunk_size = layer.visibility.sliding_window, layer.visibility.chunk_size
            shape = (layer.kv_shape.num_kv_heads, group, layer.kv_shape.head_dim)
            plans.append(self._workspaces.of(layer).native_plan(self._batch_for(chunk_size), window, *shape))
        return first, plans

    @property
    def is_complete(self) -> bool:
        """Whether every layer was computed here."""
        return self._num_calls == len(self._layers)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visibility: Visibility | None,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        layer, (key_cache, value_cache) = self._layers[self._num_calls], self._cache.layers[self._num_calls]
        kv_scales = self._cache.scales[self._num_calls]
        self._num_calls += 1
        head_dim = layer.kv_shape.head_dim
        store_kv(_padded(key, head_dim), _padded(value, head_dim), key_cache, value_cache, *self._slots, kv_scales)
        out = paged_attention(
            _padded(query, head_dim),
            key_cache,
            value_cache,
            self._batch_for(layer.visibility.chunk_size),
            scale=scale,
            workspace=self._workspaces.of(layer),
            sliding_window=layer.visibility.sliding_window,
            softcap=softcap,
            sinks=sinks,
            kv_scales=kv_scales,
        )
        return out[..., : value.shape[-1]]

    def _batch_for(self, chunk_size: int | None) -> RaggedBatch:
        if chunk_size not in self._batches:
            self._batches[chunk_size] = split_at_chunks(self._batches[None], chunk_size, self._workspaces.block_size)
        return self._batches[chunk_size]


def _padded(heads: Tensor, head_dim: int) -> Tensor:
    """`heads` [..., dim] with zeros up to `head_dim`. Zeros change no score, and give zeros in the output."""
    missing = head_dim - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads


def split_at_chunks(batch: RaggedBatch, chunk_size: int, block_size: int) -> RaggedBatch:
    """`batch` as one of more sequences, none of which reaches over a multiple of `chunk_size` (whole blocks).

    Causal attention over the result is chunked attention over `batch`: a token sees its own chunk.
    """
    query_lens, context_lens, tables = [], [], []
    for seq in range(len(batch.query_lens)):
        end = int(batch.context_lens[seq])
        begin = end - int(batch.query_lens[seq])
        while begin < end:
            chunk = begin // chunk_size * chunk_size
            stop = min(end, chunk + chunk_size)
            query_lens.append(stop - begin)
            context_lens.append(stop - chunk)
            tables.append(np.roll(batch.block_tables[seq], -(chunk // block_size)))
            begin = stop
    return RaggedBatch(np.array(query_lens, np.int32), np.array(context_lens, np.int32), np.stack(tables))


def forward(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor, context: AttentionContext, sampling_tokens: Tensor
) -> Tensor:
    """Runs a model whose attention is ours on token_ids and positions, int64 [1, num_tokens].

    Returns logits [1, num_sampling, vocab_size] of the tokens at `sampling_tokens`, int64 [num_sampling]: the output
    head is a fifth of the weights of a small model, and only what is drawn from needs it.
    """
    return model(
        input_ids=token_ids,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=sampling_tokens,
        attention_context=context,
    ).logits
