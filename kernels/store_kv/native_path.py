"""The KV write on CPUs in C (`kernels/native`): a copy of bytes per token."""

import ctypes

from torch import Tensor

from kernels import native


def serves(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether the library is there and a token's heads lie one after the other everywhere."""
    return native.library() is not None and all(
        not x.is_cuda
        and x.dtype == key_cache.dtype
        and x.stride(-1) == 1
        and (x.shape[-2] == 1 or x.stride(-2) == x.shape[-1])
        for x in (key, value, key_cache, value_cache)
    )


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor, offsets: Tensor
) -> None:
    """As `kernels.store_kv.store_kv`, for caches that are not quantised."""
    num_tokens, num_heads, head_dim = key.shape
    block_ids, offsets = block_ids.contiguous(), offsets.contiguous()
    size = key.element_size()
    store = native.library().store_rows
    for x, cache in ((key, key_cache), (value, value_cache)):
        store(
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_int64(x.stride(0) * size),
            ctypes.c_void_p(cache.data_ptr()),
            ctypes.c_int64(cache.stride(0) * size),
            ctypes.c_int64(cache.stride(1) * size),
            ctypes.c_void_p(block_ids.data_ptr()),
            ctypes.c_void_p(offsets.data_ptr()),
            ctypes.c_int64(num_tokens),
            ctypes.c_int64(num_heads * head_dim * size),
        )
