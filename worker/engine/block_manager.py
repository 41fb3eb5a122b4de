"""Block tables of sequences: promises, prefixes, forks, swap, on one device pool and one host pool.

A seated sequence is promised `num_target_blocks`; what it does not hold of them yet is owed. Nobody gets a block that
is owed to somebody else, so a prefill that has begun never runs out of blocks. Blocks that drain count as room, but
cannot be written before the step in flight has ended.
"""

from itertools import chain

from worker.engine.block_pool import BlockPool
from worker.engine.config import SchedulerConfig
from worker.engine.outputs import BlockCopy
from worker.engine.prefix_cache import block_digest, root_digest
from worker.engine.request import Sequence


class BlockManager:
    """Owns both pools. `can_x` asks, `x` does all or nothing."""

    __slots__ = (
        "_caching",
        "_fenced",
        "_fenced_host",
        "_max_preemptions",
        "_producers",
        "_reserve_all",
        "block_size",
        "device",
        "host",
        "num_owed",
        "prefetched",
        "watermark",
    )

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = config.block_size
        self.device = BlockPool(config.num_blocks, config.block_size)
        self.host = BlockPool(config.num_host_blocks, config.block_size)
        self.watermark = config.num_watermark_blocks
        self.num_owed = 0  # promised to seated sequences, and not yet in their tables
        self.prefetched: dict[int, Sequence] = {}  # waiting sequences whose KV is on the device again, by seq_id
        self._caching = config.prefix_caching
        self._reserve_all = config.capacity == "no_evict"
        self._max_preemptions = config.max_preemptions
        self._producers: dict[bytes, Sequence] = {}  # by digest: who has a seat and will compute that block
        self._fenced: list[int] = []  # device blocks that the step in flight may still write
        self._fenced_host: list[int] = []  # host blocks that the step in flight copies from or to

    @property
    def room(self) -> int:
        """Blocks, free now or soon, that are owed to nobody."""
        return self.device.num_free + self.device.num_draining - self.num_owed

    def is_pinned(self, seq: Sequence) -> bool:
        """It has been displaced as often as it may be: it gets its blocks to completion, and keeps its seat."""
        return seq.num_preemptions >= self._max_preemptions(seq.request.lane)

    def target_blocks(self, seq: Sequence) -> int:
        """What a sequence is promised with its seat: its known tokens; to completion when it cannot be preempted."""
        if self._reserve_all or self.is_pinned(seq):
            return self.device.blocks_for(seq.max_num_tokens)
        return self.device.blocks_for(seq.num_tokens)

    # Prefixes

    def find_hits(self, seq: Sequence, sibling: Sequence | None = None) -> list[int]:
        """Cached or shared blocks that hold the beginning of its known tokens, generated ones included.

        Never all tokens: the last one is computed again, because that is what samples the next. sibling: another choice
        of the request whose prompt is computed.
        """
        hits: list[int] = []
        if seq.block_ids:
            return hits  # swapped in ahead
        if self._caching:
            for index in range((seq.num_tokens - 1) // self.block_size):
                block_id = self.device.find_prefix(self._digest(seq, index))
                if block_id is None:
                    break
                hits.append(block_id)
        if sibling is not None:
            num_common = min(seq.num_prompt, seq.num_tokens - 1) // self.block_size
            hits += sibling.block_ids[len(hits) : num_common]
        return hits

    def is_being_computed(self, seq: Sequence, num_hits: int) -> bool:
        """Whether a seated sequence of its class or above will compute the first block of seq that is not cached."""
        if not self._caching or num_hits >= (seq.num_tokens - 1) // self.block_size:
            return False
        producer = self._producers.get(self._digest(seq, num_hits))
        return producer is not None and producer.priority_class >= seq.priority_class

    def note_computed(self, seq: Sequence) -> None:
        """Tells the prefix cache of the blocks that have become full."""
        num_full = seq.num_computed // self.block_size if self._caching else 0
        for index in range(seq.num_hashed, num_full):
            digest = self._digest(seq, index)
            if self._producers.get(digest) is seq:
                del self._producers[digest]
            self.device.insert_prefix(digest, seq.block_ids[index])
        seq.num_hashed = max(seq.num_hashed, num_full)

    def _digest(self, seq: Sequence, index: int) -> bytes:
        digests = seq.digests
        size = self.block_size
        while len(digests) <= index:
            start = len(digests) * size
            parent = digests[-1] if digests else root_digest(seq.request.cache_salt)
            digests.append(block_digest(parent, seq.known_tokens(start, start + size)))
        return digests[index]

    def _announce(self, seq: Sequence) -> None:
        """Others may wait for the blocks that it is about to compute."""
        if self._caching:
            for index in range(seq.num_computed // self.block_size, seq.num_tokens // self.block_size):
                self._producers.setdefault(self._digest(seq, index), seq)

    def _retract(self, seq: Sequence) -> None:
        for digest in seq.digests[seq.num_hashed :]:
            if self._producers.get(digest) is seq:
                del self._producers[digest]

    # Seats

    def missing_blocks(self, seq: Sequence, hits: list[int]) -> int:
        """Blocks that a seat for seq takes from the room. Hits that are active already cost nothing."""
        num_shared = sum(self.device.num_references(block_id) > 0 for block_id in hits)
        return self.target_blocks(seq) - len(seq.block_ids) - num_shared

    def seat(self, seq: Sequence, hits: list[int]) -> None:
        """Promises its blocks to a sequence, and gives it the hits. The caller sees that room stays at least 0."""
        if hits:
            seq.block_ids = self.device.share(hits)
            seq.num_computed = len(hits) * self.block_size
            seq.num_hashed = len(hits)
        seq.num_target_blocks = self.target_blocks(seq)
        self.num_owed += seq.num_target_blocks - len(seq.block_ids)

    def unseat(self, seq: Sequence) -> None:
        """Takes back `seat`: what it promised, and the hits."""
        self._break_promise(seq)
        if seq.seq_id not in self.prefetched:
            self.device.free(reversed(seq.block_ids))
            self._close(seq)

    def can_open(self, seq: Sequence) -> bool:
        """Whether what `open` takes, and a block to write to, is free now rather than soon."""
        held = len(seq.block_ids)
        num_restored = max(0, self.host.blocks_for(seq.num_saved) - held)
        return min(seq.num_target_blocks - held, num_restored + 1) <= self.device.num_free

    def open(self, seq: Sequence, sibling: Sequence | None) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Completes the block table of a seated sequence with what is computed already; returns (copies, swap-ins).

        Behind what it has (hits, or what was swapped in ahead) comes the host's copy, or else a fork of the last,
        partial block of its sibling's prompt, copied because both will write it. Sets num_computed.
        """
        copies: list[BlockCopy] = []
        swap_ins: list[BlockCopy] = []
        held = len(seq.block_ids)
        if seq.num_saved > seq.num_computed:
            swap_ins = self._swap_in(seq, held)
        elif sibling is not None:
            copies = self._fork_partial(seq, sibling)
        self.drop_host(seq, fence=True)
        self.prefetched.pop(seq.seq_id, None)
        self.num_owed -= len(seq.block_ids) - held
        self._announce(seq)
        return copies, swap_ins

    def _fork_partial(self, seq: Sequence, sibling: Sequence) -> list[BlockCopy]:
        index = len(seq.block_ids)
        num_common = min(seq.num_prompt, seq.num_tokens - 1)
        if num_common // self.block_size != index or num_common <= seq.num_computed:
            return []
        seq.block_ids += self.device.share((sibling.block_ids[index],))
        pair = self.device.copy_on_write(seq.block_ids, index)
        assert pair is not None, "a block of two tables needs a copy"
        seq.num_computed = num_common
        return [BlockCopy(*pair)]

    def grow(self, seq: Sequence, num_blocks: int) -> list[int]:
        """Appends num_blocks free blocks to its table, owed ones first."""
        block_ids = self.device.allocate(num_blocks)
        self.num_owed -= min(num_blocks, max(0, seq.num_target_blocks - len(seq.block_ids)))
        seq.block_ids += block_ids
        return block_ids

    def release(self, seq: Sequence, *, fence: bool = False) -> None:
        """A sequence gives up everything on the device; fence: the step in flight may still write it."""
        self._break_promise(seq)
        self.prefetched.pop(seq.seq_id, None)
        if fence:
            self._fenced += reversed(seq.block_ids)
        else:
            self.device.free(reversed(seq.block_ids))
        self._close(seq)

    def _break_promise(self, seq: Sequence) -> None:
        self.num_owed -= max(0, seq.num_target_blocks - len(seq.block_ids))
        seq.num_target_blocks = 0
        self._retract(seq)

    def _close(self, seq: Sequence) -> None:
        seq.block_ids = []
        seq.num_computed = 0
        seq.num_hashed = 0

    # Swap

    def can_swap_out(self, seq: Sequence) -> bool:
        return 0 < self.device.blocks_for(seq.num_computed) <= self.host.num_free

    def swap_out(self, seq: Sequence) -> list[BlockCopy]:
        """Like release, with a copy on the host of all that is computed; its device blocks drain in this step."""
        self._break_promise(seq)
        num_blocks = self.device.blocks_for(seq.num_computed)
        seq.host_block_ids = self.host.allocate(num_blocks)
        seq.num_saved = seq.num_computed
        copies = list(map(BlockCopy, seq.block_ids, seq.host_block_ids))
        self.device.free(reversed(seq.block_ids[num_blocks:]))
        self.device.drain(reversed(seq.block_ids[:num_blocks]))
        self._close(seq)
        return copies

    def can_prefetch(self, seq: Sequence) -> bool:
        """Whether its KV can be swapped in while it waits, from blocks that nobody else has use for now."""
        missing = self.target_blocks(seq) + self.watermark
        return bool(seq.num_saved) and not seq.block_ids and missing <= min(self.room, self.device.num_free)

    def prefetch(self, seq: Sequence) -> list[BlockCopy]:
        """Swaps a waiting sequence in ahead of its seat. The host's copy stays, so this can be undone at no cost."""
        copies = self._swap_in(seq, 0)
        self.prefetched[seq.seq_id] = seq
        return copies

    def drop_prefetched(self, num_blocks: int, keep: Sequence) -> None:
        """Takes back what was swapped in ahead, last first, but keep's, until there is room for num_blocks."""
        for seq in reversed([seq for seq in self.prefetched.values() if seq is not keep]):
            if self.room >= num_blocks:
                return
            self.release(seq)

    def _swap_in(self, seq: Sequence, first: int) -> list[BlockCopy]:
        host_block_ids = seq.host_block_ids[first:]
        block_ids = self.device.allocate(len(host_block_ids))
        seq.block_ids += block_ids
        seq.num_computed = seq.num_saved
        return list(map(BlockCopy, host_block_ids, block_ids))

    def drop_host(self, seq: Sequence, *, fence: bool) -> None:
        """Gives up its copy on the host; fence: the step in flight reads or writes it."""
        if fence:
            self._fenced_host += seq.host_block_ids
        else:
            self.host.free(seq.host_block_ids)
        seq.host_block_ids = []
        seq.num_saved = 0

    def truncate_host(self, seq: Sequence, num_blocks: int) -> None:
        """Only the first num_blocks blocks of its copy on the host are valid: what follows is computed again."""
        self.host.free(seq.host_block_ids[num_blocks:])
        del seq.host_block_ids[num_blocks:]
        seq.num_saved = num_blocks * self.block_size

    def end_step(self) -> None:
        """The step in flight has ended: nothing reads or writes any more what it did."""
        self.device.end_draining()
        self.device.free(self._fenced)
        self.host.free(self._fenced_host)
        self._fenced = []
        self._fenced_host = []

    def check_integrity(self, seated: list[Sequence], waiting: list[Sequence]) -> None:
        """Asserts the pools' invariants and I1 to I4 (README.md). O(blocks)."""
        everyone = (*seated, *waiting)
        self.device.check_integrity(chain((seq.block_ids for seq in everyone), (self._fenced,)))
        self.host.check_integrity(chain((seq.host_block_ids for seq in everyone), (self._fenced_host,)))
        owed = sum(max(0, seq.num_target_blocks - len(seq.block_ids)) for seq in everyone)
        assert self.num_owed == owed, f"I1: {self.num_owed} blocks owed, {owed} promised and not held"
        coming = self.device.num_free + self.device.num_draining
        assert owed <= coming, f"I1: {owed} blocks owed, {coming} free now or soon"
        for seq in seated:
            index = seq.num_computed // self.block_size
            for block_id in seq.block_ids[index:]:
                assert self.device.writable(block_id), f"I2: sequence {seq.seq_id} would write shared block {block_id}"
        for seq in waiting:
            name = f"waiting sequence {seq.seq_id}"
            held = len(seq.block_ids)
            assert (seq.seq_id in self.prefetched) == bool(held), f"I3: {name} has {held} device blocks"
            assert held in (0, len(seq.host_block_ids)), f"I3: {name} is swapped in by half"
            saved = self.host.blocks_for(seq.num_saved)
            assert len(seq.host_block_ids) == saved, f"I3: {name} has {len(seq.host_block_ids)} of {saved} host blocks"
            assert not seq.num_target_blocks, f"I3: {name} is promised blocks"
        for digest, seq in self._producers.items():
            computes = seq.num_target_blocks and digest in seq.digests[seq.num_hashed :]
            assert computes, f"I4: sequence {seq.seq_id} does not compute what others wait for"
