"""The activation of gated feed-forward layers (Shazeer: GLU Variants Improve Transformer, SwiGLU). CPU only."""

import ctypes

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels import native


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2 * size], gate first. Returns [..., size]."""
    size = gate_up.shape[-1] // 2
    library = native.library()
    if library is None or gate_up.dtype != torch.float32:
        return F.silu(gate_up[..., :size]) * gate_up[..., size:]
    gate_up = gate_up.contiguous()
    out = torch.empty(*gate_up.shape[:-1], size)
    library.silu_and_mul(
        ctypes.c_void_p(gate_up.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(out.numel() // size),
        ctypes.c_int64(size),
    )
    return out
