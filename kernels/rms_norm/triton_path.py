"""RMS normalisation on GPUs: one program per token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Launch, power_of_two


@triton.jit
def _add_rms_norm_kernel(
    out,  # [num_tokens, hidden_size]
    total,  # [num_tokens, hidden_size]: x + residual; None without a residual
    x,  # [num_tokens, hidden_size], by stride
    residual,  # likewise, or None
    weight,  # [hidden_size]
    x_stride,
    residual_stride,
    epsilon,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    mask = dims < HIDDEN
    row = tl.load(x + token * x_stride + dims, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        row += tl.load(residual + token * residual_stride + dims, mask=mask, other=0.0).to(tl.float32)
        rounded = row.to(x.dtype.element_ty)
        tl.store(total + token * HIDDEN + dims, rounded, mask=mask)
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / HIDDEN + epsilon)
    normed = row * scale * tl.load(weight + dims, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + dims, normed.to(out.dtype.element_ty), mask=mask)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """As `kernels.rms_norm.add_rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(out, total, x, residual, weight, epsilon)()
    return out, x if total is None else total


def launch(
    out: Tensor, total: Tensor | None, x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Launch:
    num_tokens, hidden_size = x.shape
    assert x.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    block = power_of_two(hidden_size)
    return Launch(
        kernel=_add_rms_norm_kernel,
        grid=(num_tokens,),
        arguments={
            "out": out,
            "total": total,
            "x": x,
            "residual": residual,
            "weight": weight,
            "x_stride": x.stride(0),
            "residual_stride": 0 if residual is None else residual.stride(0),
            "epsilon": float(epsilon),
        },
        constants={"HIDDEN": hidden_size, "BLOCK": block},
        num_warps=min(16, max(1, block // 512)),
    )
