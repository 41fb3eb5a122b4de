"""What copy_blocks means, element by element of nothing but indexing."""

from collections.abc import Sequence

from torch import Tensor


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    before = source.clone()
    for s, t in pairs:
        target[t] = before[s]
