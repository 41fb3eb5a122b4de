"""The KV write as its specification: one token after the other."""

from torch import Tensor


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor, offsets: Tensor
) -> None:
    """As `kernels.store_kv.store_kv`."""
    for token, slot in enumerate(zip(block_ids.tolist(), offsets.tolist(), strict=True)):
        key_cache[slot] = key[token]
        value_cache[slot] = value[token]
