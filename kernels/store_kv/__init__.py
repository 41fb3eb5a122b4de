"""Writing the keys and values of a step into their blocks. `naive.py` is the specification."""

from torch import Tensor

from kernels.chips import use_triton
from kernels.quantised import is_quantised
from kernels.store_kv import native_path, torch_path


def store_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_ids: Tensor,
    offsets: Tensor,
    kv_scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Writes token i to slot (block_ids[i], offsets[i]) of both caches, in place.

    key and value [num_tokens, num_kv_heads, head_dim]; the caches [num_blocks, block_size, num_kv_heads, head_dim],
    any strides; block_ids and offsets int64 [num_tokens], no slot twice. A cache of one byte (`quantised.py`) has
    `kv_scales`, those of keys and of values, float32 [num_blocks, block_size, num_kv_heads], written with it.
    """
    assert is_quantised(key_cache) == (kv_scales is not None), "a cache has scales when it is quantised"
    if kv_scales is None and native_path.serves(key, value, key_cache, value_cache):
        native_path.store_kv(key, value, key_cache, value_cache, block_ids, offsets)
        return
    store = torch_path.store_kv
    if use_triton(key):
        from kernels.store_kv import triton_path

        store = triton_path.store_kv
    store(key, value, key_cache, value_cache, block_ids, offsets, kv_scales)
