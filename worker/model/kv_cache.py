"""The memory behind the blocks.

One tensor [num_blocks, numbers of a block]: a block of all layers is one contiguous extent, so that moving it is one
copy of megabytes. In it stand, layer after layer, keys [block_size, num_kv_heads, head_dim] and values of that shape.
Of a quantised cache it is bytes, and before a layer's keys and values stand their scales [block_size, num_kv_heads].
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels import huge_pages
from kernels.quantised import LARGEST
from worker.model.errors import ModelError

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


_SCALE_BYTES = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a layer keeps of a token: a key and a value, each [num_kv_heads, head_dim]."""

    num_kv_heads: int
    head_dim: int  # of the longer of the two; the other is padded with zeros

    @property
    def size(self) -> int:
        """How many numbers that is."""
        return 2 * self.num_kv_heads * self.head_dim

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """In a cache of `dtype`, its scales included."""
        return self.size * dtype.itemsize + (2 * self.num_kv_heads * _SCALE_BYTES if dtype in LARGEST else 0)


class KVCache:
    """Keys and values of all layers. Its memory is touched as blocks are first written."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        shapes: Sequence[KVShape],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        """`shapes`: of the layers, which may differ."""
        quantised = dtype in LARGEST
        sizes = [block_size * (s.bytes_per_token(dtype) if quantised else s.size) for s in shapes]
        # A layer's scales begin at whole floats.
        sizes = [-(-size // _SCALE_BYTES) * _SCALE_BYTES for size in sizes] if quantised else sizes
        stored_dtype = torch.uint8 if quantised else dtype
        num_bytes = num_blocks * sum(sizes) * stored_dtype.itemsize
        if torch.device(device).type == "cpu":
            # Attention reads a context's blocks wherever they lie: pages of 4 KiB cost it more than their bytes.
            memory = huge_pages.allocate(num_bytes)
        else:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.blocks: Tensor = memory.view(stored_dtype).view(num_blocks, sum(sizes))
        # Per layer the views (keys, values), each [num_blocks, block_size, num_kv_heads, head_dim], and of a quantised
        # cache those of their scales, float32 [num_blocks, block_size, num_kv_heads].
        layers, scales = [], []
        for shape, part in zip(shapes, self.blocks.split(sizes, dim=1), strict=True):
            if quantised:
                num_bytes = 2 * block_size * shape.num_kv_heads * _SCALE_BYTES
                kv_scales = part[:, :num_bytes].view(torch.float32)
                kv_scales = kv_scales.view(num_blocks, 2, block_size, shape.num_kv_heads)
                scales.append((kv_scales[:, 0], kv_scales[:, 1]))
                part = part[:, num_bytes : num_bytes + block_size * shape.size].view(dtype)
            else:
                scales.append(None)
            kv = part.view(num_blocks, 2, block_size, shape.num_kv_heads, shape.head_dim)
            layers.append((kv[:, 0], kv[:, 1]))
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(layers)
        self.scales: tuple[tuple[Tensor, Tensor] | None, ...] = tuple(scales)


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

    At most what `max_num_seqs` sequences of `max_model_len` tokens can use. Raises ModelError when not even one block
    fits.
    """
    budget = int(available_ram() * share)
    if max_bytes is not None:
        budget = min(budget, max_bytes)
    blocks_per_seq = -(-max_model_len // block_size)
    num_blocks = min(budget // block_bytes(bytes_per_token, block_size), blocks_per_seq * max_num_seqs)
    if num_blocks < 1:
        raise ModelError(
            f"the memory for the KV cache, {_text(budget)} (--kv-memory-share {share:g} of what is free), holds no KV "
            f"block of {_text(block_bytes(bytes_per_token, block_size))}: take a larger --kv-memory-share or "
            "a smaller --block-size"
        )
    return num_blocks


def _text(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes} bytes"


def available_ram() -> int:
    """Bytes that can be allocated without swapping, within the limit of the control group if there is one."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _MEMINFO.exists():
        fields = (line.split() for line in _MEMINFO.read_text().splitlines())
        available = next(int(kibibytes) * 1024 for name, kibibytes, *_ in fields if name == "MemAvailable:")
    if _CGROUP_LIMIT.exists() and (limit := _CGROUP_LIMIT.read_text().strip()) != "max":
        available = min(available, max(0, int(limit) - int(_CGROUP_USED.read_text())))
    return available
