"""Whole decoder layers in C (`kernels/native/layers.c`), in one call: float32 activations, on CPUs.

A layer as Llama has it: x += o(attention(rotary(qkv(norm(x))))), then x += down(silu(gate(norm(x))) * up(norm(x)));
with biases, and norms of the heads of queries and keys, where there are some.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import native
from kernels.packed_product import PackedStructure, PackedWeight
from kernels.paged_attention.native_path import FORMATS, AttentionStructure, Plan, attention_structure

_MLP_ROWS = 512  # tokens that go through the feed-forward part at once: what is in between takes much memory


@dataclass(frozen=True, slots=True)
class Norm:
    """y = x / sqrt(mean(x^2) + epsilon) * weight."""

    weight: Tensor  # float32 [size], contiguous
    epsilon: float


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of a layer, and the shape of its attention."""

    input_norm: Norm
    qkv: PackedWeight  # queries [num_kv_heads, group, head_dim], then keys, then values [num_kv_heads, head_dim]
    query_norm: Norm | None
    key_norm: Norm | None
    o: PackedWeight
    post_norm: Norm
    gate_up: PackedWeight
    down: PackedWeight
    num_kv_heads: int
    group: int  # query heads of a kv head
    head_dim: int
    scale: float

    @property
    def fits(self) -> bool:
        """Whether the shapes go together."""
        hidden, heads = self.qkv.in_features, self.num_kv_heads * self.group
        return (
            self.qkv.out_features == (heads + 2 * self.num_kv_heads) * self.head_dim
            and (self.o.in_features, self.o.out_features) == (heads * self.head_dim, hidden)
            and (self.gate_up.in_features, self.gate_up.out_features) == (hidden, 2 * self.down.in_features)
            and self.down.out_features == len(self.input_norm.weight) == len(self.post_norm.weight) == hidden
            and all(norm is None or len(norm.weight) == self.head_dim for norm in (self.query_norm, self.key_norm))
        )


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where a layer keeps keys and values, as `kernels.store_kv` has them: float32, or quantised with scales."""

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None

    @property
    def is_served(self) -> bool:
        return self.keys.dtype in FORMATS and self.keys.dtype != torch.bfloat16 and self.keys.stride(-1) == 1


class _Layer(ctypes.Structure):
    """`struct layer` of layers.h."""

    _fields_ = (
        *((name, PackedStructure) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        *((name + "_epsilon", ctypes.c_float) for name in ("input", "post", "query", "key")),
        ("attention", AttentionStructure),
        ("plan", ctypes.c_int64),
    )


class _Step(ctypes.Structure):
    """`struct step` of layers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "cos", "sin", "block_ids", "offsets")),
        *((name, ctypes.c_void_p) for name in ("plans", "partials", "num_done")),
        *((name, ctypes.c_void_p) for name in ("normed", "qkv", "attended", "gate_up", "activated", "seconds")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "hidden_size", "rotary_dim", "mlp_rows")),
    )


class _Profile:
    seconds: NDArray[np.float64] | None = None


@contextmanager
def profiled() -> Iterator[NDArray[np.float64]]:
    """float64 [3]: seconds in products, in attention and in the rest of all layers, added up until the context ends.

    Of CPU time where there is one thread. For measurements, in the whole process.
    """
    _Profile.seconds = np.zeros(3)
    try:
        yield _Profile.seconds
    finally:
        _Profile.seconds = None


class DecoderLayers:
    """Layers of one shape that follow one another, over one KV cache."""

    def __init__(self, layers: Sequence[DecoderLayer], caches: Sequence[LayerCache]):
        library = native.library()
        assert library is not None
        self._library = library
        self._kept = tuple(layers), tuple(caches)  # what the structures point to
        self._structures = (_Layer * len(layers))(*map(_structure, layers, caches))
        first = layers[0]
        self._hidden_size, self._widths = first.qkv.in_features, (first.qkv.out_features, first.o.in_features)
        self._mlp_size = max(layer.down.in_features for layer in layers)
        self._scratch: list[Tensor] = []

    def run(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, block_ids: Tensor, offsets: Tensor, plans: Sequence[Plan]
    ) -> Tensor:
        """hidden, float32 [num_tokens, hidden_size], after all layers; cos and sin [num_tokens, rotary_dim].

        `block_ids` and `offsets`, int64 [num_tokens]: the slots that keys and values go to. `plans`: of each layer.
        """
        num_tokens = len(hidden)
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        inputs = hidden, cos.contiguous(), sin.contiguous(), block_ids.contiguous(), offsets.contiguous()
        distinct = list({id(plan): plan for plan in plans}.values())
        for structure, plan in zip(self._structures, plans, strict=True):
            structure.plan = next(i for i, known in enumerate(distinct) if known is plan)
        lists = [
            (ctypes.c_void_p * len(distinct))(*addresses)
            for addresses in (
                [ctypes.addressof(plan.structure) for plan in distinct],
                [plan.partials.ctypes.data for plan in distinct],
                [plan.num_done.ctypes.data for plan in distinct],
            )
        ]
        mlp_rows = min(num_tokens, _MLP_ROWS)
        scratch = self._memory(num_tokens, mlp_rows)
        seconds = _Profile.seconds
        step = _Step(
            *(tensor.data_ptr() for tensor in inputs),
            *map(ctypes.addressof, lists),
            *(tensor.data_ptr() for tensor in scratch),
            None if seconds is None else seconds.ctypes.data,
            num_tokens,
            self._hidden_size,
            cos.shape[-1],
            mlp_rows,
        )
        self._library.run_layers(self._structures, ctypes.c_int64(len(self._structures)), ctypes.byref(step))
        return hidden

    def _memory(self, num_tokens: int, mlp_rows: int) -> list[Tensor]:
        """normed, qkv, attended, gate_up, activated. Kept: fresh memory has to be cleared by the system first."""
        sizes = [num_tokens * width for width in (self._hidden_size, *self._widths)]
        sizes += [mlp_rows * width for width in (2 * self._mlp_size, self._mlp_size)]
        if not self._scratch or any(len(kept) < size for kept, size in zip(self._scratch, sizes, strict=True)):
            self._scratch = [torch.empty(size) for size in sizes]
        return self._scratch


def _structure(layer: DecoderLayer, cache: LayerCache) -> _Layer:
    structure = _Layer()
    for name in ("qkv", "o", "gate_up", "down"):
        setattr(structure, name, getattr(layer, name).structure)
    norms = layer.input_norm, layer.post_norm, layer.query_norm, layer.key_norm
    for name, norm in zip(("input", "post", "query", "key"), norms, strict=True):
        if norm is not None:
            setattr(structure, f"{name}_norm", norm.weight.data_ptr())
            setattr(structure, f"{name}_epsilon", norm.epsilon)
    structure.attention = attention_structure(cache.keys, cache.values, cache.scales, layer.group)
    structure.attention.scale = layer.scale
    return structure
