"""RMS normalisation out of torch operations."""

import torch
from torch import Tensor


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """As `kernels.rms_norm.add_rms_norm`."""
    if residual is not None:
        x = x + residual
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide * scale * weight.float()).to(x.dtype), x
