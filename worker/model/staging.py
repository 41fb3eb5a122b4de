"""A step's numbers on their way to the device: packed into a pinned buffer, moved by one copy, read where they land."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.model.device import Accelerator
from worker.model.streams import Mark, Stream

# Triton compiles for pointers that are multiples of 16; one kernel is to serve all.
_ALIGNMENT = 256


class Staging:
    """Two buffers of a fixed size and place, on the host and on the device. Use it from one thread."""

    def __init__(self, num_bytes: int, accelerator: Accelerator):
        self._streams = accelerator.streams
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=accelerator.device)
        self._host = accelerator.pinned(num_bytes, dtype=torch.uint8)
        self._bytes = self._host.numpy()
        self._moved: Mark | None = None

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        """Queues the copy of `arrays` and returns them as tensors on the device, good until the next call.

        Where one lies follows from the shapes and types of those before it, and from nothing else: what is captured on
        the tensors of one call may be replayed on those of another.
        """
        places, end = [], 0
        for name, array in arrays.items():
            places.append((name, end, array))
            end = _aligned(end + array.nbytes)
        assert end <= len(self._bytes), "a step larger than its staging buffer"
        if self._moved is not None:
            # The last copy may still read the buffer if its step has failed; else it is over.
            self._streams.synchronize(self._moved)
        tensors = {}
        for name, begin, array in places:
            part = slice(begin, begin + array.nbytes)
            self._bytes[part] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            dtype = _TORCH[array.dtype]
            tensors[name] = self._device[part].view(dtype).view(array.shape)
        self._streams.run(Stream.COMPUTE, lambda: self._device[:end].copy_(self._host[:end], non_blocking=True))
        self._moved = self._streams.mark(Stream.COMPUTE)
        return tensors


def staged_bytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    """How large a buffer they take."""
    return sum(_aligned(array.nbytes) for array in arrays.values())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
}
