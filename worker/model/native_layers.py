"""Decoder layers that are computed by our library in C, all that follow one another in one call.

A small model's layer is some 25 operations of torch and transformers, of tens of microseconds each, beside its
products. What has the parts of a layer of Llama is tried: its calls in a short prompt are recorded and computed again,
and where ours gives the same it takes the layer's place. Families that add something, or compute in another order, keep
their own.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kernels.decoder_layers import DecoderLayer, DecoderLayers, LayerCache, Norm
from worker.model.attention import AttentionLayer, PagedContext
from worker.model.fused_layers import GatedMLP, RMSNorm
from worker.model.kv_cache import KVCache, KVShape
from worker.model.packed_linear import NativeLinear, StackedLinear

_FAR = 1 << 20  # tokens. What positions change is in the cosines that a layer is given, and nowhere else


class NativeLayers(nn.Module):
    """Takes the place of the first of the layers that it computes."""

    def __init__(self, layers: Sequence[DecoderLayer]):
        super().__init__()
        self._layers = tuple(layers)
        self._bound: DecoderLayers | None = None
        self._cache: weakref.ref[KVCache] | None = None

    def forward(
        self,
        hidden_states: Tensor,  # [1, num_tokens, hidden_size]
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor],  # cosines and sines [1, num_tokens, rotary_dim]
        attention_context: PagedContext,
        **_others: Any,
    ) -> Tensor:
        first, plans = attention_context.take_native(len(self._layers), self._layers[0].group)
        cache = attention_context.cache
        if self._bound is None or self._cache is None or self._cache() is not cache:
            calls = range(first, first + len(self._layers))
            caches = [LayerCache(*cache.layers[call], cache.scales[call]) for call in calls]
            self._bound, self._cache = DecoderLayers(self._layers, caches), weakref.ref(cache)
        cos, sin = position_embeddings
        return self._bound.run(hidden_states[0], cos[0], sin[0], *attention_context.slots, plans)[None]


class ComputedBefore(nn.Module):
    """Takes the place of a layer that the `NativeLayers` before it has computed."""

    def forward(self, hidden_states: Tensor, *_: Any, **_others: Any) -> Tensor:
        return hidden_states


@dataclass(frozen=True, slots=True)
class _Call:
    """A layer's call in a forward."""

    hidden: Tensor
    kwargs: dict[str, Any]
    first: int  # of its calls of attention, in that forward
    out: object


def replace_layers(model: PreTrainedModel, attention: Sequence[AttentionLayer], forward: Callable[[], object]) -> int:
    """Puts ours in the place of the layers of `model` that compute the same. Returns how many.

    `forward()` runs the model, once or more, each time over what it has put into the cache before.
    """
    if model.dtype != torch.float32 or not any(isinstance(m, NativeLinear) for m in model.modules()):
        return 0
    candidates = [m for m in model.modules() if _norms(m) is not None and not _is_hooked(m)]
    with _recording(candidates) as calls:
        forward()
    equal = {}
    for module in candidates:
        layer = _layer(module, calls[module], attention)
        if layer is not None and _gives_the_same(module, layer, calls[module]):
            equal[module] = layer
    num_replaced = 0
    for parent in list(model.modules()):
        if isinstance(parent, nn.ModuleList):
            for run in _runs(list(parent), equal, calls):
                _replace(parent, run, equal)
                num_replaced += len(run)
    return num_replaced


def _is_hooked(module: nn.Module) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


@contextmanager
def _recording(modules: Sequence[nn.Module]) -> Iterator[dict[nn.Module, list[_Call]]]:
    """Notes the calls of `modules`, until the context ends."""
    calls: dict[nn.Module, list[_Call]] = {module: [] for module in modules}
    begun: list[int] = []

    def before(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        context = kwargs.get("attention_context")
        begun.append(context.num_calls if isinstance(context, PagedContext) else -1)

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        others = dict(kwargs)
        hidden = args[0] if args else others.pop("hidden_states", None)
        first = begun.pop()
        if isinstance(hidden, Tensor):
            calls[module].append(_Call(hidden, others, first, out))

    handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in modules]
    handles += [m.register_forward_hook(after, with_kwargs=True) for m in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _norms(module: nn.Module) -> tuple[Norm, Norm] | None:
    """Of what may be a layer: those before its attention and before its feed-forward part."""
    norms = [getattr(module, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    is_layer = isinstance(getattr(module, "self_attn", None), nn.Module) and isinstance(
        getattr(module, "mlp", None), GatedMLP
    )
    first, second = map(_norm, norms)
    return (first, second) if is_layer and first is not None and second is not None else None


def _norm(module: object) -> Norm | None:
    return Norm(module.weight.contiguous(), module.epsilon) if isinstance(module, RMSNorm) else None


def _layer(module: nn.Module, calls: Sequence[_Call], attention: Sequence[AttentionLayer]) -> DecoderLayer | None:
    """What `module` seems to be; None: something else."""
    attn, mlp, norms = module.self_attn, module.mlp, _norms(module)
    qkv, o, gate_up, down = _qkv(attn), getattr(attn, "o_proj", None), mlp.gate_up, mlp.down
    linears = [linear.packed for linear in (qkv, o, gate_up, down) if isinstance(linear, NativeLinear)]
    query_norm, key_norm = (_norm(getattr(attn, name, None)) for name in ("q_norm", "k_norm"))
    if len(linears) < 4 or not calls or norms is None or any(not 0 <= c.first < len(attention) for c in calls):
        return None
    kv_shape: KVShape = attention[calls[0].first].kv_shape
    num_heads = linears[0].out_features // kv_shape.head_dim - 2 * kv_shape.num_kv_heads
    layer = DecoderLayer(
        input_norm=norms[0],
        qkv=linears[0],
        query_norm=query_norm,
        key_norm=key_norm,
        o=linears[1],
        post_norm=norms[1],
        gate_up=linears[2],
        down=linears[3],
        num_kv_heads=kv_shape.num_kv_heads,
        group=max(1, num_heads // kv_shape.num_kv_heads),
        head_dim=kv_shape.head_dim,
        scale=float(getattr(attn, "scaling", kv_shape.head_dim**-0.5)),
    )
    return layer if layer.fits else None


def _qkv(attn: nn.Module) -> nn.Module | None:
    parts = [getattr(attn, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    first = parts[0]
    return first.stacked_with(*parts[1:]) if isinstance(first, StackedLinear) else None


def _gives_the_same(module: nn.Module, layer: DecoderLayer, calls: Sequence[_Call]) -> bool:
    """Whether all of its calls give with ours what they gave, and positions alone change nothing.

    The calls are computed in their order over the same slots: a later one reads what an earlier one has stored.
    """
    if not all(_is_understood(call, layer) for call in calls):
        return False
    for call in calls:
        moved = dict(call.kwargs)
        if isinstance(moved.get("position_ids"), Tensor):
            moved["position_ids"] = moved["position_ids"] + _FAR
        if not torch.equal(_again(module, call, moved), call.out):
            return False
    ours = NativeLayers([layer])
    for call in calls:
        out, size = _again(ours, call, call.kwargs), float(call.out.abs().max())
        if not torch.allclose(out, call.out, rtol=1e-4, atol=1e-5 * size):
            return False
    return True


def _is_understood(call: _Call, layer: DecoderLayer) -> bool:
    """Whether it has the arguments and the result that ours has."""
    context, rotary = call.kwargs.get("attention_context"), call.kwargs.get("position_embeddings")
    is_rotary = isinstance(rotary, tuple) and all(
        isinstance(part, Tensor)
        and part.dtype == torch.float32
        and part.shape[:-1] == call.hidden.shape[:-1]
        and part.shape[-1] in range(2, layer.head_dim + 1, 2)
        for part in rotary
    )
    is_float32 = call.hidden.dtype == torch.float32 and isinstance(call.out, Tensor)
    return is_rotary and is_float32 and call.out.shape == call.hidden.shape and isinstance(context, PagedContext)


def _again(module: nn.Module, call: _Call, kwargs: dict[str, Any]) -> Tensor:
    """The call as it was, with `module` and `kwargs`."""
    return module(call.hidden, **kwargs | {"attention_context": kwargs["attention_context"].again(call.first)})


def _runs(
    modules: Sequence[nn.Module], equal: dict[nn.Module, DecoderLayer], calls: dict[nn.Module, list[_Call]]
) -> list[list[nn.Module]]:
    """Neighbours in `equal`, each of which computes on what the one before it gave."""
    runs: list[list[nn.Module]] = []
    for before, module in zip((None, *modules), modules, strict=False):
        if module not in equal:
            continue
        if runs and runs[-1][-1] is before and _follows(before, module, equal, calls):
            runs[-1].append(module)
        else:
            runs.append([module])
    return runs


def _follows(
    before: nn.Module, module: nn.Module, equal: dict[nn.Module, DecoderLayer], calls: dict[nn.Module, list[_Call]]
) -> bool:
    first, second = equal[before], equal[module]
    shapes = [(x.num_kv_heads, x.group, x.head_dim, x.qkv.in_features, x.qkv.out_features) for x in (first, second)]
    return (
        shapes[0] == shapes[1]
        and len(calls[before]) == len(calls[module])
        and all(
            b.hidden is a.out
            and b.first == a.first + 1
            and b.kwargs["position_embeddings"] is a.kwargs["position_embeddings"]
            for a, b in zip(calls[before], calls[module], strict=True)
        )
    )


def _replace(parent: nn.ModuleList, run: Sequence[nn.Module], equal: dict[nn.Module, DecoderLayer]) -> None:
    places = list(parent)
    for i, module in enumerate(run):
        ours = ComputedBefore() if i else NativeLayers([equal[m] for m in run])
        # What a model asks its layers for: their kind of attention, for one.
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, str | int | float | bool):
                setattr(ours, name, value)
        parent[places.index(module)] = ours
