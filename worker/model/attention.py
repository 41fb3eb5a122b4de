"""Our attention, as transformers calls it.

transformers dispatches every attention layer to a function by name. Ours finds the step it belongs to in a keyword
argument that the models hand through to it: no global state, several runners in one process do not meet. transformers
builds no mask for a name that has no mask function, and we register none: the block tables say who sees what.
"""

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kernels.paged_attention import RaggedBatch, Workspace, paged_attention
from kernels.store_kv import store_kv
from worker.model.errors import ModelError
from worker.model.kv_cache import KVCache

ATTENTION = "carousel"

# Arguments of the attention interface that change the result in a way that we do not compute.
_NOT_COMPUTED = ("s_aux", "position_bias", "head_mask")


class AttentionContext(Protocol):
    """What a forward passes as `attention_context`: who computes its attention layers."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim] -> as query."""
        ...


def _attention_forward(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_context: AttentionContext | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function behind the name `ATTENTION`. Returns [1, num_tokens, num_heads, head_dim]."""
    if attention_context is None:
        raise ModelError("the model does not hand the arguments of its forward on to its attention layers")
    if attention_mask is not None:
        raise ModelError("the model builds an attention mask of its own")
    for name in _NOT_COMPUTED:
        if others.get(name) is not None:
            raise ModelError(f"its attention has a term that is not supported: {name}")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ModelError("its attention layers do not know their index")
    out = attention_context.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return out[None], None


AttentionInterface.register(ATTENTION, _attention_forward)


class PagedContext:
    """The attention of one step: writes the step's keys and values into their blocks, then attends over the cache."""

    def __init__(self, cache: KVCache, workspace: Workspace, batch: RaggedBatch, block_ids: Tensor, offsets: Tensor):
        self._cache = cache
        self._workspace = workspace
        self._batch = batch
        self._block_ids = block_ids  # int64 [num_tokens], with `_offsets` the slot of each token
        self._offsets = offsets

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        key_cache, value_cache = self._cache.layers[layer]
        store_kv(key, value, key_cache, value_cache, self._block_ids, self._offsets)
        return paged_attention(
            query,
            key_cache,
            value_cache,
            self._batch,
            scale=scale,
            workspace=self._workspace,
            sliding_window=sliding_window,
            softcap=softcap,
        )


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
