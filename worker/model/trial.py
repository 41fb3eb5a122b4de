"""What a model is tried on at load, so that one we would answer wrongly for is refused with the reason.

One forward records what every attention layer asks for. A second trial computes a few tokens in two chunks over a
paged cache and compares with the model's own attention: that finds masks that are not causal, and state that a model
keeps outside of attention (a layer with a state space beside it, a convolution).
"""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kernels.paged_attention import RaggedBatch, Workspace
from worker.model.attention import ATTENTION, PagedContext, forward
from worker.model.errors import ModelError
from worker.model.kv_cache import KVCache

# A prompt of two chunks that end inside a block.
_CHUNKS = ((0, 7), (7, 12))
_BLOCK_SIZE = 4
_BLOCK_TABLE = (2, 0, 1)

# By how much (of their size) the logits may differ. Rounding makes 1e-6 in float32; in half precision it also makes
# experts change places. A wrong mask or a lost state make 0.3 and more.
_MAX_DIFFERENCE = 1e-3
_MAX_DIFFERENCE_HALF = 0.2


class AttentionProbe:
    """Records what the layers of a model ask for, and computes nothing (its outputs are zeros)."""

    def __init__(self) -> None:
        self.kv_shapes: dict[int, tuple[int, int]] = {}  # layer -> (num_kv_heads, head_dim)
        self.sliding_windows: dict[int, int | None] = {}
        self.num_calls = 0

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
        if key.shape != value.shape:
            raise ModelError(f"keys of {key.shape[-1]} numbers and values of {value.shape[-1]} are not supported")
        self.num_calls += 1
        self.kv_shapes[layer] = (key.shape[1], key.shape[2])
        self.sliding_windows[layer] = sliding_window
        return torch.zeros_like(query)


def try_out(model: PreTrainedModel) -> AttentionProbe:
    """Switches `model` to our attention and tries it. Raises ModelError, with the reason, if it cannot be served."""
    try:
        with torch.inference_mode():
            theirs = _their_logits(model)
            model.set_attn_implementation(ATTENTION)
            probe = AttentionProbe()
            tokens = torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None]
            logits = forward(model, *tokens, probe, torch.tensor([1]))
            reason = _unsupported(model.config.get_text_config(), probe, logits)
            if reason is None:
                reason = _different(theirs, _our_logits(model, probe), model.dtype)
    except Exception as error:
        reason = str(error) if isinstance(error, ModelError) else f"a trial run failed ({error!r})"
        raise ModelError(_sentence(model, reason)) from error
    if reason is not None:
        raise ModelError(_sentence(model, reason))
    return probe


def _sentence(model: PreTrainedModel, reason: str) -> str:
    return f"{type(model).__name__} cannot be served: {reason}"


def _unsupported(config: PreTrainedConfig, probe: AttentionProbe, logits: Tensor) -> str | None:
    """What makes a model need more than we have, or None."""
    num_layers = config.num_hidden_layers
    if sorted(probe.kv_shapes) != list(range(num_layers)) or probe.num_calls != num_layers:
        return f"{len(probe.kv_shapes)} of its {num_layers} layers use the attention interface of transformers"
    if len(set(probe.kv_shapes.values())) > 1:
        return "its layers have KV heads of different shapes"
    if getattr(config, "attention_chunk_size", None):
        return "it uses chunked local attention"
    if logits.shape[:2] != (1, 1):
        return "its output head cannot be limited to some tokens"
    return None


def _token_ids(model: PreTrainedModel) -> Tensor:
    """Ids from all over the vocabulary, int64 [1, num_tokens]."""
    num_tokens = _CHUNKS[-1][1]
    return (torch.arange(1, num_tokens + 1) * 7919 % model.config.get_text_config().vocab_size)[None]


def _their_logits(model: PreTrainedModel) -> Tensor:
    """Logits [num_chunks, vocab_size] after each chunk, in one forward with the model's own attention."""
    model.set_attn_implementation("eager")
    token_ids = _token_ids(model)
    positions = torch.arange(token_ids.shape[1])[None]
    logits = model(input_ids=token_ids, position_ids=positions, use_cache=False).logits[0]
    return logits[[end - 1 for _, end in _CHUNKS]].float()


def _our_logits(model: PreTrainedModel, probe: AttentionProbe) -> Tensor:
    """The same in a forward per chunk, with ours."""
    num_kv_heads, head_dim = probe.kv_shapes[0]
    cache = KVCache(len(_BLOCK_TABLE), len(probe.kv_shapes), _BLOCK_SIZE, num_kv_heads, head_dim, model.dtype)
    workspace = Workspace(_CHUNKS[-1][1], _BLOCK_SIZE, num_kv_heads, head_dim, model.dtype)
    token_ids, table = _token_ids(model), np.array([_BLOCK_TABLE], np.int32)
    logits = []
    for start, end in _CHUNKS:
        batch = RaggedBatch(np.array([end - start], np.int32), np.array([end], np.int32), table)
        positions = torch.arange(start, end)
        block_ids = torch.tensor(_BLOCK_TABLE)[positions // _BLOCK_SIZE]
        context = PagedContext(cache, workspace, batch, block_ids, positions % _BLOCK_SIZE)
        last = torch.tensor([end - start - 1])
        logits.append(forward(model, token_ids[:, start:end], positions[None], context, last)[0, 0].float())
    return torch.stack(logits)


def _different(theirs: Tensor, ours: Tensor, dtype: torch.dtype) -> str | None:
    """What a difference beyond rounding means, or None."""
    difference = float((ours - theirs).norm() / theirs.norm())
    if difference <= (_MAX_DIFFERENCE if dtype == torch.float32 else _MAX_DIFFERENCE_HALF):
        return None
    return (
        f"its results are others with our attention, by {difference:.0%}: its own is not causal, or it keeps a state "
        "outside of attention"
    )
