"""Who uses which KV block, how often, and when it may be reused. Numbers only: the tensors belong to the runner.

Freed is not erased: a block whose content has a digest stays findable until it is reused, least recently used first.
Blocks without a digest are reused before those.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from enum import Enum

from worker.engine.prefix_cache import PrefixCache


class BlockState(Enum):
    """Where a block is. Only ACTIVE ones have references."""

    FREE = "free"  # unknown content
    ACTIVE = "active"  # in a block table
    CACHED = "cached"  # in no table; its content can be found until it is reused
    DRAINING = "draining"  # in no table; it is to be copied out, in this step or a later one


class BlockPool:
    """A fixed number of equal blocks with reference counts, on the device or on the host.

    Deterministic. Every operation is O(1) a block. It allocates all or nothing: callers ask `num_free` first.
    """

    __slots__ = (
        "_cached",
        "_draining",
        "_free",
        "_num_active",
        "_num_copies",
        "_refs",
        "block_size",
        "num_blocks",
        "prefixes",
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self.prefixes = PrefixCache()
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is on top at first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._draining: dict[int, None] = {}
        self._num_copies: dict[int, int] = {}  # still to be made, of those that drain and of some still in a table
        self._num_active = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def num_draining(self) -> int:
        """Blocks that are free once they are copied out."""
        return len(self._draining)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self._num_active + len(self._draining)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def num_references(self, block_id: int) -> int:
        """In how many block tables it is."""
        return self._refs[block_id]

    def state(self, block_id: int) -> BlockState:
        if self._refs[block_id]:
            return BlockState.ACTIVE
        if block_id in self._draining:
            return BlockState.DRAINING
        return BlockState.CACHED if block_id in self._cached else BlockState.FREE

    def states(self) -> bytes:
        """The state of every block, a byte each: its place among the BlockStates. O(blocks)."""
        found = bytearray(map(bool, self._refs))
        for block_id in self._cached:
            found[block_id] = 2
        for block_id in self._draining:
            found[block_id] = 3
        return bytes(found)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes num_blocks free blocks for one table each, all or none. Asserts that there are as many."""
        assert 0 <= num_blocks <= self.num_free, f"{num_blocks} blocks asked for, {self.num_free} free"
        block_ids = []
        for _ in range(num_blocks):
            if self._free:
                block_id = self._free.pop()
            else:
                block_id, _ = self._cached.popitem(last=False)
                self.prefixes.forget(block_id)
            self._refs[block_id] = 1
            block_ids.append(block_id)
        self._num_active += num_blocks
        return block_ids

    def share(self, block_ids: Iterable[int]) -> list[int]:
        """Another table uses these blocks, which hold something: a prefix hit, or a fork. Returns that table.

        What drains is read only until it is copied, so it can be used meanwhile.
        """
        table = list(block_ids)
        for block_id in table:
            if not self._refs[block_id]:
                idle = self._draining if block_id in self._draining else self._cached
                assert block_id in idle, f"block {block_id} is free: nothing to share"
                del idle[block_id]
                self._num_active += 1
            self._refs[block_id] += 1
        return table

    def free(self, block_ids: Iterable[int]) -> None:
        """A table drops these blocks. Asserts that each is in use. Those that nobody else uses are free or cached."""
        for block_id in block_ids:
            self._drop(block_id)
            if not self._refs[block_id]:
                if block_id in self._num_copies:
                    self._draining[block_id] = None
                else:
                    self._put_back(block_id)

    def drain(self, block_ids: Iterable[int]) -> None:
        """Like free, but each is to be copied out first: `end_draining` says when it is."""
        table = list(block_ids)
        for block_id in table:
            self._num_copies[block_id] = self._num_copies.get(block_id, 0) + 1
        self.free(table)

    def end_draining(self, block_ids: Iterable[int]) -> None:
        """A copy of each of these is made, or not wanted any more: what waits for no other one is free, or cached."""
        for block_id in block_ids:
            self._num_copies[block_id] -= 1
            if not self._num_copies[block_id]:
                del self._num_copies[block_id]
                if block_id in self._draining:
                    del self._draining[block_id]
                    self._put_back(block_id)

    def reparent(self, table: list[int], source: Iterable[int]) -> list[int]:
        """A table goes on from another one's blocks (beam search: a hypothesis takes over a better parent's past).

        Returns the new table, which shares source's blocks; the old one's are dropped. A block in both never becomes
        free in between.
        """
        new = self.share(source)
        self.free(reversed(table))
        return new

    def writable(self, block_id: int) -> bool:
        """Whether a table that has it may write it: nobody else uses it or can find it. Else: copy on write."""
        return self._refs[block_id] == 1 and block_id not in self.prefixes

    def copy_on_write(self, table: list[int], index: int) -> tuple[int, int] | None:
        """Makes table[index] writable. Returns (source, target) of the copy that this needs, or None.

        Asserts that a block is free when one is needed. The source keeps its other references, or its digest.
        """
        source = table[index]
        if self.writable(source):
            return None
        (target,) = self.allocate(1)
        table[index] = target
        self.free((source,))
        return source, target

    def insert_prefix(self, digest: bytes, block_id: int) -> None:
        """The content of an active block is computed and will not change: it can be found by its digest now."""
        assert self._refs[block_id], f"block {block_id} is in no table"
        self.prefixes.insert(digest, block_id)

    def find_prefix(self, digest: bytes) -> int | None:
        """A block with that content, None when there is none."""
        return self.prefixes.find(digest)

    def _drop(self, block_id: int) -> None:
        assert self._refs[block_id], f"block {block_id} is freed twice"
        self._refs[block_id] -= 1
        self._num_active -= not self._refs[block_id]

    def _put_back(self, block_id: int) -> None:
        if block_id in self.prefixes:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def check_integrity(
        self, tables: Iterable[Iterable[int]] | None = None, to_copy: Iterable[int] | None = None
    ) -> None:
        """Asserts P1 to P5 (README.md), P2 with all block tables, P5 with all sources of copies out. O(blocks)."""
        num_active = sum(refs > 0 for refs in self._refs)
        assert all(refs >= 0 for refs in self._refs), "P1: a block has fewer than no references"
        assert num_active == self._num_active, f"P1: {num_active} blocks have references, {self._num_active} counted"
        idle = [*self._free, *self._cached, *self._draining]
        assert len(idle) + num_active == self.num_blocks, (
            f"P1: {len(idle)} free, cached or draining and {num_active} active blocks, {self.num_blocks} in the pool"
        )
        assert len(dict.fromkeys(idle)) == len(idle), "P1: a block is in two states"
        assert not any(self._refs[block_id] for block_id in idle), "P1: a block is in a table, and in another state"
        assert all(block_id in self.prefixes for block_id in self._cached), "P3: a cached block cannot be found"
        assert not any(block_id in self.prefixes for block_id in self._free), "P3: a free block can be found"
        self.prefixes.check_integrity()
        waiting = {block_id: None for block_id in self._num_copies if not self._refs[block_id]}
        assert waiting.keys() == self._draining.keys(), "P5: what drains is not what waits for a copy, in no table"
        if to_copy is not None:
            assert self._num_copies == Counter(to_copy), "P5: copies out are miscounted"
        if tables is not None:
            counted = [0] * self.num_blocks
            for table in tables:
                for block_id in table:
                    counted[block_id] += 1
            for block_id, refs in enumerate(self._refs):
                assert refs == counted[block_id], f"P2: block {block_id}: {refs} references, {counted[block_id]} tables"
