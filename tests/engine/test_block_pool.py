"""The block pool: all or nothing, deterministic, and it notices misuse."""

import pytest

from worker.engine.block_pool import BlockPool


def test_allocates_and_frees() -> None:
    """Blocks handed out are distinct and counted; freed ones can be had again."""
    pool = BlockPool(num_blocks=8, block_size=16)
    first, second = pool.allocate(3), pool.allocate(5)
    assert sorted(first + second) == list(range(8))
    assert (pool.num_free, pool.num_used) == (0, 8)
    pool.free(second)
    pool.check_integrity()
    assert sorted(pool.allocate(5)) == sorted(second)


def test_allocation_is_deterministic() -> None:
    """The same calls give the same blocks."""
    pools = [BlockPool(6, 4) for _ in range(2)]
    history = []
    for pool in pools:
        first = pool.allocate(2)
        second = pool.allocate(3)
        pool.free(first)
        history.append((first, second, pool.allocate(3)))
    assert history[0] == history[1]


def test_allocation_is_all_or_nothing() -> None:
    """Asking for more than is free is an assertion, and takes nothing."""
    pool = BlockPool(4, 16)
    pool.allocate(3)
    with pytest.raises(AssertionError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    assert pool.allocate(0) == []


def test_double_free_is_an_assertion() -> None:
    """A block is given back once."""
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks[:1])


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (131_072, 8192)])
def test_blocks_for(num_tokens: int, num_blocks: int) -> None:
    """Tokens are rounded up to whole blocks; 8192 blocks of 16 hold 131,072 tokens."""
    assert BlockPool(1, 16).blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize("fault", ["lost", "doubled", "shared"])
def test_check_integrity_sees_a_broken_pool(fault: str) -> None:
    """A lost block, a doubled one, and one both free and allocated break P1."""
    pool = BlockPool(4, 16)
    pool.allocate(2)
    if fault == "lost":
        pool._free.pop()
    elif fault == "doubled":
        pool._free[0] = pool._free[1]
    else:
        pool._refs[pool._free[0]], pool._refs[0] = 1, 0
    with pytest.raises(AssertionError, match="P1"):
        pool.check_integrity()
