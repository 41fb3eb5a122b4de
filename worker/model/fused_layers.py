"""Norms and gated feed-forward layers in fewer operations than transformers takes: much of a small model's step.

Families write them in their own ways (a weight that counts from 0 or from 1, other names for epsilon). What a module
computes is tried on numbers: where one of ours gives the same it takes the module's place, others stay.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels.rms_norm import rms_norm
from kernels.silu_and_mul import silu_and_mul
from worker.model.packed_linear import StackedLinear

_NAMES_OF_EPSILON = ("variance_epsilon", "eps", "epsilon")
_ROWS = 5


class RMSNorm(nn.Module):
    """x [..., size] -> the same, normalised, times the weight [size]."""

    def __init__(self, weight: Tensor, epsilon: float):
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up being one product."""

    def __init__(self, gate_up: nn.Module, down: nn.Module):
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu_and_mul(self.gate_up(x)))


def replace_norms(model: nn.Module) -> int:
    """Puts ours in the place of the RMS norms in float32 that compute the same. Returns how many."""
    return _replace(model, lambda module: _equal_norm(module) if "RMSNorm" in type(module).__name__ else None)


def replace_mlps(model: nn.Module) -> int:
    """Puts ours in the place of gated feed-forward layers in float32 whose first layers have become one product.

    Returns how many.
    """
    return _replace(model, _equal_mlp)


def _replace(model: nn.Module, equal: Callable[[nn.Module], nn.Module | None]) -> int:
    num_replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = equal(child)
            if replacement is not None:
                setattr(parent, name, replacement)
                num_replaced += 1
    return num_replaced


def _equal_mlp(module: nn.Module) -> GatedMLP | None:
    """Ours with the same results, if there is one."""
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not isinstance(gate, StackedLinear) or not isinstance(down, nn.Module) or len(list(module.children())) > 4:
        return None
    stacked = gate.stacked_with(up)
    if stacked is None or module._forward_hooks or module._forward_pre_hooks:
        return None
    mlp = GatedMLP(stacked, down)
    x = torch.randn(_ROWS, stacked.in_features, generator=torch.Generator().manual_seed(0))
    try:
        want = module(x)
        return mlp if torch.allclose(mlp(x), want, rtol=1e-4, atol=1e-5 * float(want.abs().max())) else None
    except Exception:  # it takes something else, or gives more than one output
        return None


def _equal_norm(module: nn.Module) -> RMSNorm | None:
    """Ours with the same results, if there is one."""
    weight = getattr(module, "weight", None)
    epsilons = [e for e in (getattr(module, name, None) for name in _NAMES_OF_EPSILON) if isinstance(e, float)]
    hooked = module._forward_hooks or module._forward_pre_hooks
    is_plain = len(list(module.parameters())) == 1 and not list(module.children()) and not hooked
    if not is_plain or not epsilons or weight is None or weight.ndim != 1 or weight.dtype != torch.float32:
        return None
    # Small numbers too: there epsilon counts.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, len(weight), generator=generator) * torch.logspace(-3, 1, _ROWS)[:, None]
    try:
        want = module(x)
    except Exception:  # it takes more than one input (a gated norm)
        return None
    for candidate in (weight.detach(), 1.0 + weight.detach()):
        norm = RMSNorm(candidate, epsilons[0])
        if want.shape == x.shape and torch.allclose(norm(x), want, rtol=1e-5, atol=1e-6):
            return norm
    return None
