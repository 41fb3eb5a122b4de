"""RMS normalisation on CPUs in C (`kernels/native`)."""

import ctypes

import torch
from torch import Tensor

from kernels import native


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether the library is there and knows the format; what is not contiguous is copied."""
    return native.library() is not None and not x.is_cuda and x.dtype == weight.dtype == torch.float32


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As `kernels.rms_norm.rms_norm`, for any number of dimensions."""
    x, weight, out = x.contiguous(), weight.contiguous(), torch.empty(x.shape)
    native.library().rms_norm(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(x.numel() // len(weight)),
        ctypes.c_int64(len(weight)),
        ctypes.c_float(epsilon),
    )
    return out
