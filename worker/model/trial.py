"""What a model is tried on at load, so that one we would answer wrongly for is refused with the reason.

`look_at` needs no weights: the model is built on torch's meta device, which computes shapes only. It says what each
attention layer keeps, and refuses most of what cannot be served before anything big is read.

`try_out` takes the loaded model. One forward records what every attention layer may see. A second trial computes a few
tokens in two chunks over a paged cache and compares with the model's own attention: that finds masks that are not
causal, and state that a model keeps outside of attention (a layer with a state space beside it, a convolution).
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kernels.paged_attention import RaggedBatch
from worker.model.attention import (
    ATTENTION,
    PROBE,
    AttentionLayer,
    LayerWorkspaces,
    PagedContext,
    Visibility,
    forward,
)
from worker.model.errors import ModelError
from worker.model.kv_cache import KVCache, KVShape

# A prompt of two chunks that end inside a block.
_CHUNKS = ((0, 7), (7, 12))
_BLOCK_SIZE = 4
_BLOCK_TABLE = (2, 0, 1)

# By how much (of their size) the logits may differ. Rounding makes 1e-6 in float32; in half precision it also makes
# experts change places. A wrong mask or a lost state make 0.3 and more.
_MAX_DIFFERENCE = 1e-3
_MAX_DIFFERENCE_HALF = 0.2


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model takes, before any weight is read."""

    num_weights: int
    kv_numbers_per_token: int | None  # in all layers; None where only a forward over real weights can tell


class AttentionProbe:
    """Records what the layers of a model ask for, and computes nothing (its outputs are zeros)."""

    def __init__(self) -> None:
        self.layers: list[AttentionLayer] = []

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
        shape = KVShape(key.shape[1], max(key.shape[2], value.shape[2]))
        self.layers.append(AttentionLayer(shape, visibility or Visibility(), query.shape[1]))
        return query.new_zeros(*query.shape[:2], value.shape[2])


def look_at(config: PreTrainedConfig) -> ModelSize:
    """The size of a model of that configuration.

    Raises ModelError, with the reason, when what can be known without weights says that it cannot be served.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if config.is_encoder_decoder:
        raise ModelError(_sentence(model_class, "it is half of an encoder-decoder model, and needs the other half"))
    with torch.device("meta"), torch.inference_mode():
        model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.bfloat16)  # changes its argument
        num_weights = sum(weight.numel() for weight in {id(p): p for p in model.parameters()}.values())
        model.set_attn_implementation(ATTENTION)
        try:
            layers = _probe(model)
        except ModelError as error:
            raise ModelError(_sentence(model_class, str(error))) from error
        except Exception:  # it decides by numbers, which a meta tensor does not have
            return ModelSize(num_weights, None)
    return ModelSize(num_weights, sum(layer.kv_shape.size for layer in layers))


def try_out(model: PreTrainedModel) -> tuple[AttentionLayer, ...]:
    """Switches `model` to our attention and tries it. Raises ModelError, with the reason, if it cannot be served."""
    try:
        with torch.inference_mode():
            theirs = _their_logits(model)
            model.set_attn_implementation(PROBE)
            layers = tuple(_probe(model))
            model.set_attn_implementation(ATTENTION)
            _check_difference(theirs, our_logits(model, layers), model.dtype)
    except Exception as error:
        reason = str(error) if isinstance(error, ModelError) else f"a trial run failed ({error!r})"
        raise ModelError(_sentence(type(model), reason)) from error
    return layers


def _sentence(model_class: type, reason: str) -> str:
    return f"{model_class.__name__} cannot be served: {reason}"


def _probe(model: PreTrainedModel) -> list[AttentionLayer]:
    """The attention layers of a model. Raises ModelError when it needs more than attention over a KV cache."""
    if model._is_stateful:
        raise ModelError(
            "it keeps a state beside its keys and values (a state space, linear attention or a convolution), which can "
            "be neither paged nor shared"
        )
    probe = AttentionProbe()
    with torch.device(model.device):
        tokens = torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None]
        logits = forward(model, *tokens, probe, torch.tensor([1]))
    num_layers = model.config.get_text_config().num_hidden_layers
    if not probe.layers:
        raise ModelError("its attention is written inside the model: no layer uses the attention interface")
    if len(probe.layers) < num_layers:
        raise ModelError(
            f"only {len(probe.layers)} of its {num_layers} layers use the attention interface; the others are "
            "something else (a state space, linear attention, a convolution, attention over images)"
        )
    if logits.shape[:2] != (1, 1):
        raise ModelError("its output head cannot be limited to some tokens")
    return probe.layers


def _token_ids(model: PreTrainedModel) -> Tensor:
    """Ids from all over the vocabulary, int64 [1, num_tokens]."""
    num_tokens = _CHUNKS[-1][1]
    return (torch.arange(1, num_tokens + 1) * 7919 % model.config.get_text_config().vocab_size)[None]


def _their_logits(model: PreTrainedModel) -> Tensor:
    """Logits [num_chunks, vocab_size] after each chunk, in one forward with the model's own attention and positions."""
    model.set_attn_implementation("eager")
    logits = model(input_ids=_token_ids(model), use_cache=False).logits[0]
    return logits[[end - 1 for _, end in _CHUNKS]].float()


def our_logits(
    model: PreTrainedModel, layers: Sequence[AttentionLayer], chunks: Sequence[tuple[int, int]] = _CHUNKS
) -> Tensor:
    """float32 [num_chunks, vocab_size]: the same in a forward per chunk, [start, end) of the tokens, with ours.

    On the model's device, where the result lies, too.
    """
    device = model.device
    cache = KVCache(len(_BLOCK_TABLE), _BLOCK_SIZE, [layer.kv_shape for layer in layers], model.dtype, device)
    workspaces = LayerWorkspaces(layers, _CHUNKS[-1][1], _BLOCK_SIZE, model.dtype, device)
    token_ids, table = _token_ids(model).to(device), np.array([_BLOCK_TABLE], np.int32)
    logits = []
    for start, end in chunks:
        batch = RaggedBatch(np.array([end - start], np.int32), np.array([end], np.int32), table)
        positions = torch.arange(start, end, device=device)
        block_ids = torch.tensor(_BLOCK_TABLE, device=device)[positions // _BLOCK_SIZE]
        context = PagedContext(layers, cache, workspaces, batch, block_ids, positions % _BLOCK_SIZE)
        last = torch.tensor([end - start - 1], device=device)
        logits.append(forward(model, token_ids[:, start:end], positions[None], context, last)[0, 0].float())
    return torch.stack(logits)


def difference(want: Tensor, got: Tensor) -> float:
    """By how much logits differ, of their size."""
    return float((got - want).norm() / want.norm())


def _check_difference(theirs: Tensor, ours: Tensor, dtype: torch.dtype) -> None:
    """Raises ModelError for a difference beyond rounding, and for results that are none."""
    if not (theirs.isfinite().all() and ours.isfinite().all()):
        advice = "Try --dtype bfloat16 or float32" if dtype == torch.float16 else "Copy or download its weights again"
        raise ModelError(
            "its results are not finite: its weights are not (NaN, infinity), or too large to compute with in "
            f"{str(dtype).removeprefix('torch.')}. {advice}"
        )
    if not theirs.any():
        raise ModelError("its results are all zero: its weights are empty. Copy or download them again")
    changed = difference(theirs, ours)
    # Not "above the limit": NaN is above nothing.
    if not changed <= (_MAX_DIFFERENCE if dtype == torch.float32 else _MAX_DIFFERENCE_HALF):
        raise ModelError(
            f"its results are others with our attention, by {changed:.0%}: its own is not causal, it counts "
            "positions in its own way, or it keeps a state outside of attention"
        )
