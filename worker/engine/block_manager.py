"""Block tables of sequences: promises, prefixes, forks, swap, on one device pool and one host pool.

A seated sequence is promised `num_target_blocks`; what it does not hold of them yet is owed. Nobody gets a block that
is owed to somebody else, so a prefill that has begun never runs out of blocks. Blocks that drain count as room, but
cannot be written before they are copied out.

A swap may take many steps. The last blocks of a sequence go out first and come in last, so that at any time what is on
the device is the beginning of its table: it can turn round on the way.
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
        "_outgoing",
        "_outgoing_now",
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
        self.prefetched: dict[int, Sequence] = {}  # those whose KV came in ahead of their seat, by seq_id, until opened
        self._caching = config.prefix_caching
        self._reserve_all = config.capacity == "no_evict"
        self._max_preemptions = config.max_preemptions
        self._producers: dict[bytes, Sequence] = {}  # by digest: who has a seat and will compute that block
        self._outgoing: dict[int, Sequence] = {}  # whose way out has not ended, first come first, by seq_id
        self._outgoing_now: list[int] = []  # device blocks that this step copies out
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
        if seq.out_block_ids:
            return list(seq.out_block_ids)  # has not gone out yet
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
            num_tokens = len(hits) * self.block_size
            seq.num_computed = min(num_tokens, seq.num_saved) if seq.out_block_ids else num_tokens
            seq.num_hashed = seq.num_computed // self.block_size
        seq.num_target_blocks = self.target_blocks(seq)
        self.num_owed += seq.num_target_blocks - len(seq.block_ids)

    def unseat(self, seq: Sequence) -> None:
        """Takes back `seat`: what it promised, and the hits."""
        self._break_promise(seq)
        if seq.seq_id not in self.prefetched:
            self.device.free(reversed(seq.block_ids))
            self._close(seq)

    def settle(self, seq: Sequence) -> None:
        """Its seat is certain: what it holds need not go out."""
        if self._outgoing.pop(seq.seq_id, None) is not None:
            self.device.end_draining(seq.out_block_ids)

    def num_to_restore(self, seq: Sequence) -> int:
        """Blocks of its copy on the host that it still needs on the device."""
        return max(0, len(seq.host_block_ids) - len(seq.block_ids))

    def can_open(self, seq: Sequence) -> bool:
        """Whether what `open` takes, and a block to write to, is free now rather than soon."""
        missing = seq.num_target_blocks - len(seq.block_ids)
        return min(missing, self.num_to_restore(seq) + 1) <= self.device.num_free

    def open(self, seq: Sequence, sibling: Sequence | None) -> tuple[list[BlockCopy], list[BlockCopy]]:
        """Completes the block table of a seated sequence with what is computed already; returns (copies, swap-ins).

        Behind what it has (hits, or what was swapped in ahead) comes the host's copy, or else a fork of the last,
        partial block of its sibling's prompt, copied because both will write it. Sets num_computed.
        """
        copies: list[BlockCopy] = []
        swap_ins: list[BlockCopy] = []
        held = len(seq.block_ids)
        if self.num_to_restore(seq):
            swap_ins = self.swap_in(seq, self.num_to_restore(seq))
        elif sibling is not None:
            copies = self._fork_partial(seq, sibling)
            self.num_owed -= len(seq.block_ids) - held
        self.drop_host(seq, fence=True)
        self.prefetched.pop(seq.seq_id, None)
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
        """Whether the host has its copy already, from its last way out, or has room for one."""
        return bool(seq.num_saved) or 0 < self.device.blocks_for(seq.num_computed) <= self.host.num_free

    def swap_out(self, seq: Sequence) -> None:
        """Like release, with a copy on the host of all that is computed: its device blocks drain, `take_outgoing`.

        Who is displaced on the way in has that copy, but for what had not gone out when it turned round.
        """
        self._break_promise(seq)
        self.prefetched.pop(seq.seq_id, None)
        if not seq.num_saved:
            num_blocks = self.device.blocks_for(seq.num_computed)
            seq.host_block_ids = self.host.allocate(num_blocks)
            seq.num_saved = seq.num_computed
            seq.out_block_ids = seq.block_ids[:num_blocks]
        self.device.free(reversed(seq.block_ids[len(seq.out_block_ids) :]))
        self.device.drain(reversed(seq.out_block_ids))
        if seq.out_block_ids:
            self._outgoing[seq.seq_id] = seq
        self._close(seq)

    def take_outgoing(self, most: int) -> list[tuple[Sequence, list[BlockCopy]]]:
        """The next copies out, at most so many: of who was displaced first, from the last block of each to its first.

        Any block that comes free serves the most urgent one, so the order among victims does not matter to it.
        """
        moves: list[tuple[Sequence, list[BlockCopy]]] = []
        for seq in self._outgoing.values():
            first = max(0, len(seq.out_block_ids) - most)
            sources = seq.out_block_ids[first:]
            if not sources:
                break
            copies = list(map(BlockCopy, sources, seq.host_block_ids[first:]))
            moves.append((seq, copies))
            del seq.out_block_ids[first:]
            self._outgoing_now += reversed(sources)
            most -= len(copies)
        return moves

    def can_prefetch(self, seq: Sequence) -> bool:
        """Whether its KV can be swapped in while it waits, from blocks that nobody else has use for now."""
        if not self.num_to_restore(seq) or seq.seq_id in self._outgoing:
            return False
        missing = self.target_blocks(seq) - len(seq.block_ids) + self.watermark
        return missing <= min(self.room, self.device.num_free)

    def prefetch(self, seq: Sequence, most: int) -> list[BlockCopy]:
        """Swaps a waiting sequence in ahead of its seat. The host's copy stays, so this can be undone at no cost."""
        self.prefetched[seq.seq_id] = seq
        return self.swap_in(seq, most)

    def drop_prefetched(self, num_blocks: int, keep: Sequence) -> None:
        """Takes back what was swapped in ahead, last first, until there is room for num_blocks.

        But not from keep, nor from who has its seat by now and is promised those blocks.
        """
        for seq in reversed([s for s in self.prefetched.values() if s is not keep and not s.num_target_blocks]):
            if self.room >= num_blocks:
                return
            self.release(seq)

    def swap_in(self, seq: Sequence, most: int) -> list[BlockCopy]:
        """The next blocks of its copy on the host, at most so many and as many as are free."""
        first = len(seq.block_ids)
        num_blocks = min(most, self.num_to_restore(seq), self.device.num_free)
        copies = list(map(BlockCopy, seq.host_block_ids[first:], self.grow(seq, num_blocks)))
        seq.num_computed = min(len(seq.block_ids) * self.block_size, seq.num_saved)
        return copies

    def drop_host(self, seq: Sequence, *, fence: bool) -> None:
        """Gives up its copy on the host, and its way there; fence: the step in flight reads or writes it."""
        self.settle(seq)
        seq.out_block_ids = []
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
        self.device.end_draining(self._outgoing_now)
        self._outgoing = {seq_id: seq for seq_id, seq in self._outgoing.items() if seq.out_block_ids}
        self.device.free(self._fenced)
        self.host.free(self._fenced_host)
        self._outgoing_now = []
        self._fenced = []
        self._fenced_host = []

    def check_integrity(self, seated: list[Sequence], waiting: list[Sequence]) -> None:
        """Asserts the pools' invariants and I1 to I4 (README.md). O(blocks)."""
        everyone = (*seated, *waiting)
        to_copy = chain(self._outgoing_now, *(seq.out_block_ids for seq in self._outgoing.values()))
        self.device.check_integrity(chain((seq.block_ids for seq in everyone), (self._fenced,)), to_copy)
        self.host.check_integrity(chain((seq.host_block_ids for seq in everyone), (self._fenced_host,)))
        owed = sum(max(0, seq.num_target_blocks - len(seq.block_ids)) for seq in everyone)
        assert self.num_owed == owed, f"I1: {self.num_owed} blocks owed, {owed} promised and not held"
        coming = self.device.num_free + self.device.num_draining
        assert owed <= coming, f"I1: {owed} blocks owed, {coming} free now or soon"
        for seq in seated:
            index = seq.num_computed // self.block_size
            for block_id in seq.block_ids[index:]:
                assert self.device.writable(block_id), f"I2: sequence {seq.seq_id} would write shared block {block_id}"
            num_out = len(seq.out_block_ids)
            is_back = seq.out_block_ids == seq.block_ids[:num_out] and seq.seq_id not in self._outgoing
            assert is_back, f"I3: sequence {seq.seq_id} has a seat, and has not turned round"
        for seq in waiting:
            name = f"waiting sequence {seq.seq_id}"
            held, num_out = len(seq.block_ids), len(seq.out_block_ids)
            assert (seq.seq_id in self.prefetched) == bool(held), f"I3: {name} has {held} device blocks"
            computed = min(held * self.block_size, seq.num_saved)
            assert seq.num_computed == computed, f"I3: {name} has computed {seq.num_computed} tokens, not {computed}"
            saved = self.host.blocks_for(seq.num_saved)
            assert len(seq.host_block_ids) == saved, f"I3: {name} has {len(seq.host_block_ids)} of {saved} host blocks"
            assert max(held, num_out) <= saved, f"I3: {name} has more on its way than was saved"
            assert not num_out or seq.seq_id in self._outgoing, f"I3: {name} is forgotten on its way out"
            assert not (held and seq.seq_id in self._outgoing), f"I3: {name} is on its way out and in"
            assert not seq.num_target_blocks, f"I3: {name} is promised blocks"
        for digest, seq in self._producers.items():
            computes = seq.num_target_blocks and digest in seq.digests[seq.num_hashed :]
            assert computes, f"I4: sequence {seq.seq_id} does not compute what others wait for"
