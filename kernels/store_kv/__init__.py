"""Writing the keys and values of a step into their blocks. `naive.py` is the specification."""

from torch import Tensor


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor, offsets: Tensor
) -> None:
    """Writes token i to slot (block_ids[i], offsets[i]) of both caches, in place.

    key and value [num_tokens, num_kv_heads, head_dim]; the caches [num_blocks, block_size, num_kv_heads, head_dim],
    any strides; block_ids and offsets int64 [num_tokens], no slot twice.
    """
    slots = (block_ids, offsets)
    key_cache.index_put_(slots, key)
    value_cache.index_put_(slots, value)
