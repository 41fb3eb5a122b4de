"""A kernel launch as data: run on a GPU or in the interpreter, or compiled ahead of time exactly as it would run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.chips import INTERPRETER, Chip

Argument = Tensor | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One call of a Triton kernel. Calling it runs it, on the current device of its tensors' kind."""

    kernel: Any  # of @triton.jit
    grid: tuple[int, ...]
    arguments: Mapping[str, Argument]
    constants: Mapping[str, Any]  # the kernel's tl.constexpr parameters
    num_warps: int = 4
    num_stages: int = 2

    def __call__(self) -> None:
        if 0 not in self.grid:
            self.kernel[self.grid](
                **self.arguments, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages
            )


def dot_type(dtype: Any, chip: Chip) -> tl.dtype:
    """What the operands of tl.dot are converted to. The interpreter multiplies the bit patterns of bfloat16."""
    name = str(dtype).removeprefix("torch.")
    if chip is INTERPRETER and name == "bfloat16":
        return tl.float32
    return getattr(tl, name)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least both: the shapes that Triton has."""
    return max(triton.next_power_of_2(n), least)
