"""Keys and values in one byte: int8, or float8 e4m3, each token and head with a scale of its own.

The scale is the largest magnitude over the largest that the format holds. What is not finite makes the scale NaN, and
with it all that is read back: a sequence that has gone wrong must not look healthy because its cache is quantised.
"""

import torch
from torch import Tensor

# The largest number of each format.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# At a smaller scale all is zero: 1 / scale must stay finite.
LEAST_SCALE = 1e-30


def is_quantised(cache: Tensor) -> bool:
    return cache.dtype in LARGEST


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] as `dtype`, and float32 scales [...]."""
    x = x.float()
    scales = x.abs().amax(dim=-1) / LARGEST[dtype]
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    x = x * torch.where(scales > LEAST_SCALE, 1.0 / scales, 0.0)[..., None]
    if dtype == torch.int8:
        x = x.nan_to_num(0.0).add(0.5).floor()
    return x.to(dtype), scales


def dequantise(x: Tensor, scales: Tensor) -> Tensor:
    """float32 of the shape of `x`."""
    return x.float() * scales[..., None]
