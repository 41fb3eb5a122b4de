"""The memory behind the blocks.

One tensor [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]: a block of all layers is one contiguous
extent, so that moving it is one copy of megabytes.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


class KVCache:
    """Keys and values of all layers. Its memory is touched as blocks are first written."""

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ):
        shape = (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)
        self.blocks: Tensor = torch.empty(shape, dtype=dtype)
        # Per layer the views (keys, values), each [num_blocks, block_size, num_kv_heads, head_dim].
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(
            (self.blocks[:, layer, 0], self.blocks[:, layer, 1]) for layer in range(num_layers)
        )


def block_bytes(bytes_per_token: int, block_size: int) -> int:
    return bytes_per_token * block_size


def num_blocks_for_ram(
    bytes_per_token: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    *,
    share: float = 0.3,
    max_bytes: int | None = None,
) -> int:
    """How many blocks fit into `share` of the available RAM (and `max_bytes`).

    At most what `max_num_seqs` sequences of `max_model_len` tokens can use. Raises ValueError when not even one block
    fits.
    """
    budget = int(available_ram() * share)
    if max_bytes is not None:
        budget = min(budget, max_bytes)
    blocks_per_seq = -(-max_model_len // block_size)
    num_blocks = min(budget // block_bytes(bytes_per_token, block_size), blocks_per_seq * max_num_seqs)
    if num_blocks < 1:
        raise ValueError(
            f"{budget / 2**20:.0f} MiB hold no KV block of {block_bytes(bytes_per_token, block_size) / 2**20:.1f} MiB"
        )
    return num_blocks


def available_ram() -> int:
    """Bytes that can be allocated without swapping, within the limit of the control group if there is one."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _MEMINFO.exists():
        fields = (line.split() for line in _MEMINFO.read_text().splitlines())
        available = next(int(kibibytes) * 1024 for name, kibibytes, *_ in fields if name == "MemAvailable:")
    if _CGROUP_LIMIT.exists() and (limit := _CGROUP_LIMIT.read_text().strip()) != "max":
        available = min(available, max(0, int(limit) - int(_CGROUP_USED.read_text())))
    return available
