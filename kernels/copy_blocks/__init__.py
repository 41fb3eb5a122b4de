"""Moving the KV of whole blocks: copy-on-write within the device pool, swaps between device and host pool.

`naive.py` is the specification. A block is one contiguous extent of its pool, so a copy moves megabytes at a time.
"""

from collections.abc import Sequence

from torch import Tensor


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies block s of `source` over block t of `target` for each (s, t) of `pairs`, in place.

    source and target [num_blocks, ...], the same dtype and shape but for the number of blocks; they may be one tensor
    when no block is both read and written.
    """
    for s, t in pairs:
        target[t].copy_(source[s])
