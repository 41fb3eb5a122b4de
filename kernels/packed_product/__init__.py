"""Linear layers with weights packed for the library in C (`kernels/native/gemm.c`). CPU only, float32 and bfloat16.

`PackedWeight` is made once, with an `Arena` that holds all weights of a model.
"""

import ctypes

import torch
from torch import Tensor

from kernels import huge_pages, native

_FORMATS = {torch.float32: 0, torch.bfloat16: 1}  # as in gemm.h
_CHUNK = 1 << 28  # bytes of address space; memory is taken as it is written
_ALIGNMENT = 64


def serves(dtype: torch.dtype) -> bool:
    """Whether weights of that dtype can be packed here and now."""
    return native.library() is not None and dtype in _FORMATS


class Arena:
    """Memory for weights.

    Reading all weights once takes 1.4 times as long from pages of 4 KiB, and most weights are smaller than a huge page.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of zeros, for as long as it is referred to."""
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = huge_pages.allocate(max(_CHUNK, num_bytes)), 0
        taken = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken


class PackedStructure(ctypes.Structure):
    """As in gemm.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("format", ctypes.c_int64),
    )


class PackedWeight:
    """`structure` is what C takes. A row's product has the same bits in any batch and with any number of threads."""

    def __init__(self, weight: Tensor, bias: Tensor | None, arena: Arena):
        """weight [out_features, in_features], which `serves`, is copied; bias [out_features]."""
        library = native.library()
        assert library is not None
        self.dtype = weight.dtype
        self.out_features, self.in_features = weight.shape
        self._library = library  # stays in use when another is enabled
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self.structure = PackedStructure(
            None, _address(self._bias), None, self.in_features, self.out_features, _FORMATS[weight.dtype]
        )
        self._reference = ctypes.byref(self.structure)
        library.packed_size.restype = ctypes.c_int64
        self._panels = arena.take(library.packed_size(self._reference))
        self.structure.weight = _address(self._panels)
        strides = (ctypes.c_int64(stride) for stride in weight.stride())
        library.pack(self._reference, _address(weight.detach()), *strides, _address(self._panels))

    def multiply(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features] of x's dtype; sums are of float32."""
        rows = x.reshape(-1, self.in_features).float()
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(len(rows), self.out_features)
        self._library.multiply(
            self._reference,
            _address(rows),
            ctypes.c_int64(rows.stride(0)),
            ctypes.c_int64(len(rows)),
            _address(out),
            ctypes.c_int64(self.out_features),
        )
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
