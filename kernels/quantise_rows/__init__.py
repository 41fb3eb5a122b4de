"""Activations in 8 bits, each row with a scale of its own: the input of products with int8 weights. CPU only."""

import ctypes

import torch
from torch import Tensor

from kernels import native
from kernels.quantised import LEAST_SCALE


def quantise_rows(x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """x [num_rows, n] as uint8 around a zero at `largest + 1`, and float32 scales [num_rows].

    A row's largest magnitude becomes `largest` (at most 127). A row with infinities or NaN has the scale NaN.
    """
    library = native.library()
    if library is None:
        return _torch(x, largest)
    x = x.float().contiguous()
    rows, scales = torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x))
    library.quantise_rows(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_void_p(scales.data_ptr()),
        ctypes.c_int64(len(x)),
        ctypes.c_int64(x.shape[1]),
        ctypes.c_int(largest),
    )
    return rows, scales


def _torch(x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    x = x.float()
    scales = x.abs().amax(dim=1) / largest
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    x = x * torch.where(scales > LEAST_SCALE, 1.0 / scales, 0.0)[:, None]
    return x.nan_to_num_(0.0, 0.0, 0.0).round_().add_(largest + 1).to(torch.uint8), scales
