"""Memory in huge pages, where the system has them."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor


def allocate(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] of zeros. Its memory is taken as it is written, and given back with the last reference."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Private: shared memory has other rules for huge pages.
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
