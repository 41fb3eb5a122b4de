"""Who owns which KV block. Numbers only: the tensors behind them belong to the runner."""

from collections.abc import Iterable


class BlockPool:
    """A fixed number of equal blocks, each free or allocated to one owner.

    Deterministic: blocks come back in the reverse order of their release (a block just freed is likely still in cache).
    """

    __slots__ = ("_allocated", "_free", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is on top at first
        self._allocated = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes num_blocks free blocks, all or none. Asserts that there are as many: callers ask num_free first."""
        assert 0 <= num_blocks <= len(self._free), f"{num_blocks} blocks asked for, {len(self._free)} free"
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._allocated[block_id] = 1
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Gives blocks back. Asserts that each of them is allocated."""
        for block_id in block_ids:
            assert self._allocated[block_id], f"block {block_id} is freed twice"
            self._allocated[block_id] = 0
            self._free.append(block_id)

    def check_integrity(self) -> None:
        """Asserts invariant I1 (README.md): every block is either free or allocated, once."""
        num_allocated = sum(self._allocated)
        assert len(self._free) + num_allocated == self.num_blocks, (
            f"I1: {len(self._free)} free + {num_allocated} allocated blocks, {self.num_blocks} in the pool"
        )
        assert not any(self._allocated[block_id] for block_id in self._free), "I1: an allocated block is free"
        assert len(dict.fromkeys(self._free)) == len(self._free), "I1: a block is free twice"
