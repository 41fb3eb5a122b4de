"""How long anyone can wait: aging and age guards, on a virtual clock."""

import random

import pytest

from tests.engine_policies.world import World
from worker.engine.policies import PolicyConfig, make_policy
from worker.engine.tiers import TierPolicy

SERVICE = 0.125  # seconds a turn: exact in binary, so that clocks do not drift


def serve(world: World) -> None:
    """One turn of a server that serves one sequence at a time."""
    head = world.admit_head()
    if head is not None:
        world.token(head)
        world.finish(head)
    world.now += SERVICE


@pytest.mark.parametrize("name", ["priority", "composite"])
def test_a_sequence_is_raised_after_its_quantum_exactly(name: str):
    """With classes 0 to 2, class 1 goes ahead of fresh work of class 2 after 4 s, class 0 of class 1 after 8 s."""
    for own, quantum in ((1, 4.0), (0, 8.0)):
        world = World(make_policy(name))
        old = world.push(priority_class=own)
        world.now = quantum - 0.001
        fresh = world.push(priority_class=own + 1, priority=9)
        assert world.queue.head(world.now) is fresh
        world.now = quantum
        assert world.queue.head(world.now) is old


@pytest.mark.parametrize("name", ["priority", "composite"])
def test_nobody_rises_by_more_than_one_class(name: str):
    """However long class 0 waits, fresh work of class 2 goes ahead of it."""
    world = World(make_policy(name))
    old = world.push(priority_class=0)
    world.now = 10_000.0
    fresh = world.push(priority_class=2)
    assert list(world.queue.first(world.now, 2)) == [fresh, old]


@pytest.mark.parametrize("name", ["priority", "composite"])
def test_aging_gives_no_victim_rights(name: str):
    """Age touches neither the static class, by which victims are chosen, nor the order of the running."""
    world = World(make_policy(name))
    old = world.push(priority_class=1)
    top = world.push(priority_class=2)
    before = world.queue.urgency(old)
    world.now = 1000.0
    world.queue.head(world.now)
    assert old.request.priority_class == 1
    assert world.queue.urgency(old) == before > world.queue.urgency(top)


@pytest.mark.parametrize("seed", range(10))
def test_the_documented_bound_of_the_top_two_classes(seed: int):
    """Under any overload, the two top classes wait at most their quantum and the turns of those that waited before."""
    rng = random.Random(seed)
    world = World(make_policy("priority"))
    bounds: dict[int, float] = {}
    arrivals: dict[int, float] = {}
    quantum = {1: 4.0, 2: 2.0}
    num_late = 0
    for _ in range(1200):
        # Twice what can be served comes in, most of it in the top class and with the highest priority.
        for _ in range(rng.choice([1, 2, 3])):
            own = rng.choice([2, 2, 2, 1])
            turns_ahead = sum(seq.request.priority_class >= 1 for seq in world.waiting.values())
            seq = world.push(priority_class=own, priority=rng.choice([0, 9, 9, 9]))
            arrivals[seq.seq_id] = world.now
            bounds[seq.seq_id] = world.now + quantum[own] + SERVICE * (turns_ahead + 1)
        served = world.queue.head(world.now)
        assert world.now <= bounds[served.seq_id]
        num_late += world.now - arrivals[served.seq_id] > quantum[served.request.priority_class]
        serve(world)
        assert all(bounds[seq_id] >= world.now for seq_id in world.waiting)
    assert num_late > 100, "the bound was not put to the test"


@pytest.mark.parametrize("seed", range(5))
def test_the_documented_bound_of_a_lower_class(seed: int):
    """Class 0, its queue bounded, waits at most (queue + burst) turns over the share that higher classes leave."""
    rng = random.Random(seed)
    world = World(make_policy("priority"))
    max_queued, load, burst = 40, 0.5, 8
    arrivals: dict[int, float] = {}
    credit = 0.0
    longest = 0.0
    for _ in range(3000):
        credit = min(burst, credit + load)
        while credit >= 1 and rng.random() < 0.5:
            credit -= 1
            world.push(priority_class=2)
        while sum(seq.request.priority_class == 0 for seq in world.waiting.values()) < max_queued:
            seq = world.push(priority_class=0)
            arrivals[seq.seq_id] = world.now
        head = world.queue.head(world.now)
        longest = max(longest, world.now - arrivals.get(head.seq_id, world.now))
        serve(world)
    bound = SERVICE * (max_queued + burst) / (1 - load)
    assert longest <= bound
    assert longest > bound / 3, "nobody had to wait"


@pytest.mark.parametrize("name", ["srtf", "edf"])
def test_the_age_guard_ends_starvation(name: str):
    """A sequence that every newcomer would overtake waits its guard and the turns of those that waited before it."""
    guard = 5.0
    config = PolicyConfig(tiers={"dated": TierPolicy(name="dated", ttft=1.0)}, age_guard=guard)
    world = World(make_policy(name, config=config))
    for _ in range(4):
        world.push(max_tokens=1, lane="dated")
    unlucky = world.push(max_tokens=100)
    while unlucky.seq_id in world.waiting:
        world.push(max_tokens=1, lane="dated")
        serve(world)
        assert world.now <= guard + SERVICE * 6
    assert world.now > guard, "it was never starved"


@pytest.mark.parametrize("name", ["fcfs", "wfq", "priority", "srtf", "edf", "composite"])
def test_displaced_work_goes_ahead_of_fresh_work_of_its_class(name: str):
    """By age among themselves, whatever priority, date or length the fresh ones have."""
    config = PolicyConfig(tiers={"dated": TierPolicy(name="dated", ttft=0.5)})
    world = World(make_policy(name, config=config))
    early, late = world.push(tenant="a", max_tokens=90), world.push(tenant="b", arrival=0.1, max_tokens=90)
    world.admit_head()
    world.admit_head()
    world.now = 0.25
    fresh = world.push(tenant="c", lane="dated", priority=9, max_tokens=1)
    world.displace(late)
    world.displace(early)
    assert list(world.queue.first(world.now, 3)) == [early, late, fresh]


def test_late_ones_do_not_make_others_late():
    """A sequence that has missed its date goes behind those that can still make theirs."""
    for name in ("edf", "composite"):
        config = PolicyConfig(tiers={"dated": TierPolicy(name="dated", ttft=1.0)}, prefill_seconds=lambda n: 0.25)
        world = World(make_policy(name, config=config))
        hopeless = world.push(lane="dated")
        world.now = 0.5
        hopeful = world.push(lane="dated")
        assert list(world.queue.first(world.now, 2)) == [hopeless, hopeful]
        world.now = 0.75
        assert list(world.queue.first(world.now, 2)) == [hopeful, hopeless]
