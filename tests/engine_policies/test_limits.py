"""Tenants' max_running: kept, and nothing idles because of it."""

import random

import pytest

from tests.engine_policies.world import World
from worker.engine.policies import POLICIES, PolicyConfig, make_policy
from worker.engine.tiers import TenantPolicy

LIMITS = {"a": 1, "b": 3, "c": None}
TENANTS = {name: TenantPolicy(name=name, max_running=limit) for name, limit in LIMITS.items()}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_limits_hold_and_nothing_idles(name: str, seed: int):
    """No tenant sits above its limit; head() is None only when every waiting tenant is at its limit."""
    rng = random.Random(seed)
    world = World(make_policy(name, tenants=TENANTS))
    for _ in range(300):
        kind = rng.choice(["push", "push", "admit", "admit", "end", "displace", "cancel", "wait"])
        if kind == "push":
            world.push(tenant=rng.choice("abc"), priority_class=rng.randrange(3), arrival=world.now)
        elif kind == "admit":
            world.admit_head()
        elif kind == "end" and world.seated:
            world.finish(rng.choice(list(world.seated.values())))
        elif kind == "displace" and world.seated:
            world.displace(rng.choice(list(world.seated.values())))
        elif kind == "cancel" and world.waiting:
            world.cancel(rng.choice(list(world.waiting.values())))
        elif kind == "wait":
            world.now += rng.choice([0.0, 1.0, 5.0])
        may_run = {
            seq.request.tenant
            for seq in world.waiting.values()
            if LIMITS[seq.request.tenant] is None or world.num_seated(seq.request.tenant) < LIMITS[seq.request.tenant]
        }
        head = world.queue.head(world.now)
        world.queue.check_integrity()
        assert (head is None) == (not may_run)
        assert head is None or head.request.tenant in may_run
        for tenant, limit in LIMITS.items():
            assert limit is None or world.num_seated(tenant) <= limit


def test_unknown_tenants_have_the_default_terms():
    """A tenant that nobody configured gets the default's weight and limit, for itself."""
    config = PolicyConfig(default_tenant=TenantPolicy(name="default", max_running=1))
    world = World(make_policy("fcfs", config=config))
    first, _, other = world.push(tenant="x"), world.push(tenant="x"), world.push(tenant="y")
    assert list(world.queue.first(0.0, 3)) == [first, other]


def test_a_worker_grants_its_share_of_the_limit():
    """Half of the lanes' partitions: half of the seats, rounded down; a share that rounds to nothing leaves one."""
    world = World(make_policy("fcfs", tenants={"t": TenantPolicy(name="t", max_running=4)}))
    for _ in range(6):
        world.push(tenant="t")
    world.queue.share(0.5)
    assert len(list(world.queue.first(0.0, 6))) == 2
    world.queue.share(0.7)
    assert len(list(world.queue.first(0.0, 6))) == 2
    for _ in range(2):
        world.admit_head()
    assert world.queue.head(0.0) is None
    world.queue.share(1.0)
    world.admit_head()
    world.queue.share(0.01)
    assert world.queue.head(0.0) is None
    for seq in list(world.seated.values()):
        assert world.queue.head(0.0) is None
        world.finish(seq)
    assert len(list(world.queue.first(0.0, 6))) == 1


def test_being_at_the_limit_saves_up_no_claim():
    """A tenant that waited for its own seats is level with the others when it gets one, not ahead of them."""
    tenants = {"capped": TenantPolicy(name="capped", max_running=1)}
    world = World(make_policy("wfq", tenants=tenants))
    for _ in range(10):
        world.push(tenant="capped", prompt=10)
        world.push(tenant="free", prompt=10)
    holder = world.admit_head()
    assert holder.request.tenant == "capped"
    for _ in range(8):
        world.push(tenant="free", prompt=10)
        assert world.admit_head().request.tenant == "free"
    world.finish(holder)
    turns = []
    for _ in range(6):
        seq = world.admit_head()
        turns.append(seq.request.tenant)
        if seq.request.tenant == "capped":
            world.finish(seq)
    assert turns.count("capped") == 3


def served(world: World, num_turns: int) -> str:
    """Who has the next turns, one letter each; everyone leaves its seat at once."""
    turns = ""
    for _ in range(num_turns):
        seq = world.admit_head()
        turns += seq.request.tenant
        world.finish(seq)
        world.now += 0.001
    return turns


def push_many(world: World, tenant: str, num_requests: int = 100, **fields: object) -> None:
    for _ in range(num_requests):
        world.push(tenant=tenant, prompt=10, **fields)


def test_a_newcomer_is_level_with_one_that_waits_for_its_own_seat():
    """However long a tenant alone was served within its limit, who comes while it waits for its seat is not ahead."""
    world = World(make_policy("wfq", tenants={"a": TenantPolicy(name="a", max_running=1)}))
    push_many(world, "a")
    served(world, 50)
    holder = world.admit_head()
    assert world.queue.head(world.now) is None
    push_many(world, "n")
    world.finish(holder)
    world.now += 0.001
    assert served(world, 6) == "ananan"


def test_who_gives_up_while_it_waits_for_its_own_seat_was_not_served_last():
    """A newcomer is level with who could go last, not with one that has long been at its limit and then left."""
    world = World(make_policy("wfq", tenants={"a": TenantPolicy(name="a", max_running=1)}))
    push_many(world, "a", 2)
    push_many(world, "b", 20)
    holder = world.admit_head()
    assert served(world, 20) == 20 * "b"
    for seq in list(world.waiting.values()):
        world.cancel(seq)
    world.finish(holder)
    world.now += 0.001
    push_many(world, "n", 20)
    push_many(world, "b", 20)
    assert served(world, 6) == "nbnbnb"


def capped_claim(num_seats: int = 1) -> World:
    """Class 0 of a tenant with one seat, taken; what waits of it has waited too long, and claims turns of class 1."""
    world = World(make_policy("composite", tenants={"l": TenantPolicy(name="l", max_running=num_seats)}))
    push_many(world, "l", priority_class=0)
    world.now = 20.0
    return world


def test_a_claim_at_its_limit_saves_up_no_turns():
    """A class whose tenants wait for their own seats claims nothing; then it starts level with the class above."""
    world = capped_claim()
    holder = world.admit_head()
    push_many(world, "a", priority_class=1)
    assert served(world, 50) == 50 * "a"
    world.finish(holder)
    world.now += 0.001
    assert served(world, 6) == "lalala"


def test_a_claim_at_its_limit_was_not_served_last():
    """It has long waited for its own seat when all of the class above leave: a newcomer is level with those."""
    world = capped_claim()
    world.admit_head()
    push_many(world, "a", 50, priority_class=1)
    assert served(world, 50) == 50 * "a"
    assert world.queue.head(world.now) is None
    push_many(world, "n", 20, priority_class=1)
    push_many(world, "a", 20, priority_class=1)
    assert served(world, 6) == "nanana"


def test_a_newcomer_is_not_ahead_because_of_a_claim_at_its_limit():
    """Who comes to the class above is level with those that have turns there, not with a claim that can take none."""
    world = capped_claim()
    world.admit_head()
    push_many(world, "a", priority_class=1)
    served(world, 50)
    push_many(world, "n", priority_class=1)
    assert served(world, 6) == "ananan"


def test_a_newcomer_is_level_with_a_claim_that_had_the_last_turn():
    """Hardly anybody else was there; the claim waits for its own seat when a newcomer to the class above comes."""
    world = capped_claim()
    holder = world.admit_head()
    assert world.queue.head(world.now) is None
    world.finish(holder)
    world.now += 0.001
    push_many(world, "a", 1, priority_class=1)
    assert sorted(served(world, 51)) == ["a"] + 50 * ["l"]
    holder = world.admit_head()
    assert world.queue.head(world.now) is None
    push_many(world, "n", priority_class=1)
    world.finish(holder)
    world.now += 0.001
    assert sorted(served(world, 6)) == sorted("nlnlnl")
