"""Moving the KV of whole blocks: copy-on-write within the device pool, swaps between device and host pool.

`naive.py` is the specification. A block is one contiguous extent of its pool, so a copy moves megabytes at a time.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from kernels.chips import use_triton


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies block s of `source` over block t of `target` for each (s, t) of `pairs`, in place.

    source and target [num_blocks, ...], the same dtype and shape but for the number of blocks; they may be one tensor
    when no block is both read and written. On a GPU, copies are queued on the current stream and not waited for; those
    from and to pinned host memory run beside the GPU's work.
    """
    if use_triton(source) and use_triton(target):
        from kernels.copy_blocks import triton_path

        triton_path.copy_blocks(source, target, pairs)
        return
    for s, t, count in _runs(pairs):
        target[t : t + count].copy_(source[s : s + count], non_blocking=True)


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, count) of neighbours that can be copied at once, in the order of `pairs`."""
    first, count = (0, 0), 0
    for s, t in pairs:
        if count and (s, t) == (first[0] + count, first[1] + count):
            count += 1
            continue
        if count:
            yield (*first, count)
        first, count = (s, t), 1
    if count:
        yield (*first, count)
