"""The KV write as its specification: one token after the other."""

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
    for token, slot in enumerate(zip(block_ids.tolist(), offsets.tolist(), strict=True)):
        if kv_scales is None:
            key_cache[slot] = key[token]
            value_cache[slot] = value[token]
        else:
            key_cache[slot], kv_scales[0][slot] = quantise(key[token], key_cache.dtype)
            value_cache[slot], kv_scales[1][slot] = quantise(value[token], value_cache.dtype)
