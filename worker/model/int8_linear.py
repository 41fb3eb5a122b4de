"""Linear layers with weights of 8 bits: `--weights int8`.

Weights are rounded once, with a scale per output channel; inputs as they come, with a scale per token. Products are
exact in 32 bits, so that a token's result does not depend on its batch. oneDNN multiplies.
"""

import platform
from pathlib import Path

import torch
from torch import Tensor, nn

from kernels.quantise_rows import quantise_rows


class Int8Linear(nn.Module):
    """x [..., in_features] -> [..., out_features], nearly as nn.Linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        """weight [out_features, in_features] is rounded into a copy."""
        super().__init__()
        weight = weight.float()
        self.out_features, self.in_features = weight.shape
        # A row of zeros has any scale.
        self._scales = weight.abs().amax(dim=1).clamp_(min=1e-30) / 127
        rounded = (weight / self._scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)
        self._bias = None if bias is None else bias.float()
        self._largest = 127 if _has_vnni() else 63

    def forward(self, x: Tensor) -> Tensor:
        rows, scales = quantise_rows(x.reshape(-1, self.in_features), self._largest)
        out = torch.ops.onednn.qlinear_pointwise(
            rows,
            1.0,
            self._largest + 1,
            self._packed,
            self._scales,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        out.mul_(scales[:, None])
        if self._bias is not None:
            out.add_(self._bias)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)


def why_not_int8() -> str | None:
    """Why this machine has no fast products of 8 bits; None: it has."""
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"products of 8 bits are fast on x86 only, not on {platform.machine()}"
    return None


def _has_vnni() -> bool:
    """Whether the CPU adds products of 8 bits in 32. Without it pairs are added in 16, and inputs get 7 bits."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "vnni" in cpuinfo.read_text()
