"""Which implementation serves a tensor, and what its chip can do."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chip:
    """What Triton compiles for. The fields are those of Triton's GPUTarget."""

    backend: str  # "cuda" or "hip"; "interpreter": Triton's, on the CPU
    arch: int | str  # 90 for sm_90, "gfx942"; 0 for the interpreter
    warp_size: int
    max_shared_bytes: int  # that one program may use

    @property
    def has_fp8(self) -> bool:
        """Whether it converts float8_e4m3fn in hardware. gfx942's own 8-bit floats are of another format."""
        return self.backend == "cuda" and isinstance(self.arch, int) and self.arch >= 89

    def __str__(self) -> str:
        return f"sm_{self.arch}" if self.backend == "cuda" else f"{self.arch or self.backend}"


INTERPRETER = Chip("interpreter", 0, 32, 1 << 20)
# Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", maximum per thread
# block; for CDNA 3 its instruction set reference (LDS, 64 KiB).
SM_80 = Chip("cuda", 80, 32, 163 << 10)
SM_89 = Chip("cuda", 89, 32, 99 << 10)
SM_90 = Chip("cuda", 90, 32, 227 << 10)
SM_100 = Chip("cuda", 100, 32, 227 << 10)
GFX942 = Chip("hip", "gfx942", 64, 64 << 10)


@cache
def chip_of(device: torch.device) -> Chip:
    """The chip that a tensor's Triton kernels run on: the GPU, or the interpreter for tensors in host memory."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    if torch.version.hip:
        return Chip("hip", properties.gcnArchName.split(":")[0], properties.warp_size, shared)
    return Chip("cuda", properties.major * 10 + properties.minor, properties.warp_size, shared)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class _Mode:
    interpreted = False


@contextmanager
def interpreted() -> Iterator[None]:
    """Until the context ends, Triton serves tensors in host memory, too: in its interpreter, for tests and dry runs.

    TRITON_INTERPRET=1 must have been there when Triton was imported.
    """
    before, _Mode.interpreted = _Mode.interpreted, True
    try:
        yield
    finally:
        _Mode.interpreted = before


def use_triton(tensor: Tensor) -> bool:
    """The rule of all operations: Triton for tensors on a GPU where Triton is installed, torch for all others."""
    return (tensor.is_cuda or _Mode.interpreted) and _has_triton()
