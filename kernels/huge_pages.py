"""Memory in huge pages, where the system has them."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor


def allocate(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] of zeros. Its memory is taken as it is written, and given back with the last reference.

    Raises MemoryError when the system has none to give.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Private: shared memory has other rules for huge pages.
    try:
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:  # Python's own allocations say MemoryError
        raise MemoryError(f"Unable to allocate {num_bytes / 2**30:.1f} GiB") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
