"""The block pool's references, states, least recently used order, copy-on-write, and what beam search needs."""

import random
from collections import Counter

import pytest

from worker.engine.block_pool import BlockPool, BlockState
from worker.engine.prefix_cache import block_digest, root_digest


def digest(number: int) -> bytes:
    return block_digest(root_digest(""), (number,))


def test_digests_chain_and_salt() -> None:
    """A digest says all tokens from the start on, and the salt; nothing else."""
    first = block_digest(root_digest("a"), (1, 2))
    assert first == block_digest(root_digest("a"), [1, 2])
    assert first != block_digest(root_digest("b"), (1, 2))
    assert block_digest(first, (3, 4)) != block_digest(block_digest(root_digest("a"), (1, 9)), (3, 4))


def test_freed_is_not_erased() -> None:
    """A freed block with a digest stays findable until it is reused; unknown ones are reused first, then the oldest."""
    pool = BlockPool(4, 16)
    blocks = pool.allocate(4)
    for block_id in blocks[:3]:
        pool.insert_prefix(digest(block_id), block_id)
    pool.free(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (4, 3, 0)
    assert pool.allocate(1) == [blocks[3]]
    assert pool.find_prefix(digest(blocks[0])) == blocks[0]
    assert pool.share([blocks[0]]) == [blocks[0]]  # used again: now the youngest
    pool.free([blocks[0]])
    assert pool.allocate(2) == [blocks[1], blocks[2]]
    assert pool.find_prefix(digest(blocks[1])) is None
    assert pool.find_prefix(digest(blocks[0])) == blocks[0]
    pool.check_integrity()


def test_the_first_block_of_a_digest_keeps_it() -> None:
    """Two blocks of the same content: one is found, the other one is free when it is dropped."""
    pool = BlockPool(2, 16)
    one, two = pool.allocate(2)
    pool.insert_prefix(digest(1), one)
    pool.insert_prefix(digest(1), two)
    pool.free([two])
    assert pool.state(two) is BlockState.FREE
    assert pool.find_prefix(digest(1)) == one


def test_states() -> None:
    """FREE, ACTIVE, DRAINING, CACHED: each block is in one, and the counters say how many."""
    pool = BlockPool(3, 16)
    one, two = pool.allocate(2)
    pool.insert_prefix(digest(1), one)
    pool.drain([one, two])
    assert [pool.state(block_id) for block_id in range(3)].count(BlockState.DRAINING) == 2
    assert (pool.num_free, pool.num_draining, pool.num_used) == (1, 2, 2)
    assert pool.find_prefix(digest(1)) == one
    pool.check_integrity(tables=[], to_copy=[one, two])
    pool.end_draining([two])
    assert (pool.state(one), pool.state(two)) == (BlockState.DRAINING, BlockState.FREE)
    pool.end_draining([one])
    assert (pool.state(one), pool.state(two)) == (BlockState.CACHED, BlockState.FREE)
    assert pool.num_free == 3


def test_row_18_a_draining_block_is_not_reused() -> None:
    """What is to be copied out cannot be allocated until the copy has ended; it can be read meanwhile, not written."""
    pool = BlockPool(2, 16)
    blocks = pool.allocate(2)
    pool.insert_prefix(digest(1), blocks[0])
    pool.drain(blocks[:1])
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 free"):
        pool.allocate(1)
    table = pool.share(blocks[:1])
    assert (pool.state(blocks[0]), pool.num_draining) == (BlockState.ACTIVE, 0)
    assert not pool.writable(blocks[0])
    pool.free(table)
    assert pool.state(blocks[0]) is BlockState.DRAINING
    pool.share(blocks[:1])
    pool.end_draining(blocks[:1])
    assert (pool.state(blocks[0]), pool.num_free) == (BlockState.ACTIVE, 0)


def test_a_free_block_is_not_shared() -> None:
    """Nobody knows what it holds."""
    with pytest.raises(AssertionError, match="block 0 is free: nothing to share"):
        BlockPool(1, 16).share([0])


def test_a_block_of_two_copies_drains_until_both_are_made() -> None:
    """Two tables that shared a block go out: it is free after the second copy."""
    pool = BlockPool(1, 16)
    table = pool.allocate(1)
    fork = pool.share(table)
    pool.drain(table)
    pool.drain(fork)
    pool.end_draining([0])
    assert (pool.state(0), pool.num_free) == (BlockState.DRAINING, 0)
    pool.check_integrity([], to_copy=[0])
    pool.end_draining([0])
    assert pool.num_free == 1


def test_a_shared_block_drains_when_its_last_table_drops_it() -> None:
    """Copied out for one table and dropped by another one in the same step: it is not free before the copy ends."""
    pool = BlockPool(1, 16)
    table = pool.allocate(1)
    fork = pool.share(table)
    pool.drain(table)
    assert pool.state(0) is BlockState.ACTIVE
    pool.free(fork)
    assert (pool.state(0), pool.num_free) == (BlockState.DRAINING, 0)
    pool.end_draining([0])
    assert pool.num_free == 1


def test_fork_and_copy_on_write() -> None:
    """A fork shares all blocks; who writes first gets a copy, and then each has its own."""
    pool = BlockPool(4, 4)
    parent = pool.allocate(2)
    child = pool.share(parent)
    assert child == parent
    assert child is not parent
    assert not pool.writable(parent[1])
    pair = pool.copy_on_write(child, 1)
    assert pair == (parent[1], child[1])
    assert child[0] == parent[0]
    assert pool.writable(parent[1])
    assert pool.copy_on_write(parent, 1) is None
    pool.check_integrity([parent, child])


def test_copy_on_write_of_a_findable_block() -> None:
    """A block that can be found is not written, though nobody else uses it: the finder would get other tokens."""
    pool = BlockPool(2, 4)
    table = pool.allocate(1)
    pool.insert_prefix(digest(1), table[0])
    source, target = pool.copy_on_write(table, 0) or (None, None)
    assert source is not None
    assert table == [target]
    assert pool.state(source) is BlockState.CACHED


def test_beam_search_drops_and_reparents() -> None:
    """Hypotheses fork, the worse ones take over a better one's past, and in the end nothing is held."""
    pool = BlockPool(8, 4)
    best = pool.allocate(3)
    beams = [best, pool.share(best), pool.share(best)]
    for beam in beams:
        pool.copy_on_write(beam, 2)
    pool.check_integrity(beams)
    assert pool.num_used == 5  # two shared, three of their own
    beams[2] = pool.reparent(beams[2], beams[0])
    assert beams[2] == beams[0]
    pool.check_integrity(beams)
    assert pool.num_used == 4
    pool.free(beams.pop(1))
    pool.check_integrity(beams)
    for beam in beams:
        pool.free(beam)
    assert pool.num_used == 0


@pytest.mark.parametrize("seed", range(5))
def test_row_19_random_operations_agree_with_a_naive_model(seed: int) -> None:
    """Whatever is allocated, shared, copied, drained and freed: a count of the tables says the same as the pool."""
    rng = random.Random(seed)
    pool = BlockPool(12, 4)
    tables: list[list[int]] = []
    to_copy: list[int] = []
    content: dict[int, int] = {}  # block -> a number that stands for its tokens
    for number in range(600):
        roll = rng.random()
        if roll < 0.3 and pool.num_free:
            tables.append(pool.allocate(rng.randint(1, pool.num_free)))
            content.update(dict.fromkeys(tables[-1], -1))
        elif roll < 0.45 and tables:
            tables.append(pool.share(rng.choice(tables)))
        elif roll < 0.55 and tables:
            table = rng.choice(tables)
            block_id = rng.choice(table)
            if content[block_id] < 0:
                content[block_id] = number
                pool.insert_prefix(digest(number), block_id)
        elif roll < 0.65 and content:
            known = rng.choice([block_id for block_id in content if content[block_id] >= -1])
            found = pool.find_prefix(digest(content[known])) if content[known] >= 0 else None
            if found is not None:
                assert content[found] == content[known]
                tables.append(pool.share([found]))
        elif roll < 0.8 and tables and pool.num_free:
            table = rng.choice(tables)
            index = rng.randrange(len(table))
            references = sum(t.count(table[index]) for t in tables)
            pair = pool.copy_on_write(table, index)
            if pair is None:
                assert references == 1
            else:
                content[pair[1]] = -1
        elif tables:
            table = tables.pop(rng.randrange(len(tables)))
            is_copied = rng.random() < 0.3
            (pool.drain if is_copied else pool.free)(table)
            to_copy += table if is_copied else []
        if rng.random() < 0.5:
            num_copied = rng.randint(0, len(to_copy))
            pool.end_draining(to_copy[:num_copied])
            del to_copy[:num_copied]
        pool.check_integrity(tables, to_copy)
        counted = Counter(block_id for table in tables for block_id in table)
        assert pool.num_used - pool.num_draining == len(counted)
    pool.end_draining(to_copy)
    for table in tables:
        pool.free(table)
    assert (pool.num_used, pool.num_free) == (0, 12)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda pool: pool._refs.__setitem__(0, -1), "P1: a block has fewer than no references"),
        (lambda pool: pool._refs.__setitem__(0, 0), "P1: 1 blocks have references, 2 counted"),
        (lambda pool: pool._refs.__setitem__(0, 2), "P2: block 0: 2 references, 1 tables"),
        (lambda pool: pool.prefixes.insert(b"x", pool._free[0]), "P3: a free block can be found"),
        (lambda pool: pool.prefixes.forget(2), "P3: a cached block cannot be found"),
        (lambda pool: pool.prefixes._digest_of.__setitem__(2, b"y"), "P4: block 2 is found by"),
        (lambda pool: pool.prefixes._digest_of.__setitem__(1, b"y"), "P4: a digest has two blocks"),
        (lambda pool: pool._num_copies.__setitem__(0, 2), "P5: copies out are miscounted"),
        (lambda pool: pool._num_copies.__setitem__(2, 1), "P5: what drains is not what waits for a copy"),
    ],
)
def test_a_broken_pool_is_named(fault, message: str) -> None:
    """Each invariant of a pool, broken on purpose, is named by check_integrity."""
    pool = BlockPool(5, 4)
    table = pool.allocate(2)
    (cached,) = pool.allocate(1)
    pool.insert_prefix(digest(1), cached)
    pool.free([cached])
    pool.drain(pool.share(table[:1]))
    pool.check_integrity([table], table[:1])
    fault(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity([table], table[:1])
