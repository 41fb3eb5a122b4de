"""The KV write out of torch operations."""

import torch
from torch import Tensor

from kernels.quantised import quantise


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_ids: Tensor,
    offsets: Tensor,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """As `kernels.store_kv.store_kv`."""
    slots = (block_ids, offsets)
    if kv_scales is None:
        key_cache.index_put_(slots, key)
        value_cache.index_put_(slots, value)
        return
    for x, cache, scales in zip((key, value), (key_cache, value_cache), kv_scales, strict=True):
        quantised, x_scales = quantise(x, cache.dtype)
        scales.index_put_(slots, x_scales)
        # As bytes: torch does not index 8-bit floats.
        cache.view(torch.uint8).index_put_(slots, quantised.view(torch.uint8))
