"""Fair queueing: the VTC bound under greedy backlog, what is charged, and that nobody saves up claims."""

import random
from itertools import combinations

import pytest

from tests.engine.builders import make_request
from tests.engine_policies.world import World
from worker.engine.policies import PolicyQueue, make_policy
from worker.engine.policies.queues import MAX_IDLE_FLOWS
from worker.engine.request import Sequence
from worker.engine.tiers import TenantPolicy, TierPolicy

WEIGHTS = {f"t{i}": weight for i, weight in enumerate([1.0, 1.0, 2.0, 4.0, 1.0, 1.0, 2.0, 4.0])}
POOL_TOKENS = 2000
# docs/scheduling.md: what a tenant's running sequences can still be charged, once it has had its turn.
BOUND = 2.0 * POOL_TOKENS / min(WEIGHTS.values())


def tenants(weights: dict[str, float]) -> dict[str, TenantPolicy]:
    return {name: TenantPolicy(name=name, weight=weight) for name, weight in weights.items()}


class GreedyWorld(World):
    """Every tenant always has work waiting; what runs shares a pool of tokens, and gets a token each per step."""

    def __init__(
        self, queue: PolicyQueue, weights: dict[str, float], seed: int, backlog: int = 3, priority_class: int = 2
    ) -> None:
        super().__init__(queue)
        self.backlog = backlog  # requests that each tenant has waiting at least
        self.priority_class = priority_class
        self.rng = random.Random(seed)
        self.service = dict.fromkeys(weights, 0.0)  # prompt tokens + 2 * output tokens
        self.num_waiting = dict.fromkeys(weights, 0)
        self.num_pool_tokens = 0

    def step(self) -> list[str]:
        """Returns the tenants that were admitted, in order."""
        self.now += 0.01
        for tenant in self.num_waiting:
            while self.num_waiting[tenant] < self.backlog:
                self.num_waiting[tenant] += 1
                # Some tenants ask much, some little: shares must not follow what is asked.
                size = 40 if tenant in ("t0", "t2", "t3") else 200
                self.push(
                    tenant=tenant,
                    priority_class=self.priority_class,
                    prompt=self.rng.randint(1, size),
                    max_tokens=self.rng.randint(1, size),
                )
        admitted = []
        while (head := self.queue.head(self.now)) and self.num_pool_tokens + head.max_num_tokens <= POOL_TOKENS:
            self.num_pool_tokens += head.max_num_tokens
            self.admit(head)
            tenant = head.request.tenant
            self.num_waiting[tenant] -= 1
            self.service[tenant] += head.num_prompt
            admitted.append(tenant)
        for seq in list(self.seated.values()):
            self.token(seq)
            self.service[seq.request.tenant] += 2.0
            if len(seq.output) == seq.request.max_tokens:
                self.num_pool_tokens -= seq.max_num_tokens
                self.finish(seq)
        return admitted

    def normalised(self) -> dict[str, float]:
        return {tenant: service / WEIGHTS.get(tenant, 1.0) for tenant, service in self.service.items()}


# A backlog of 60 requests each takes 30 s and more, so that all of it has waited longer than the quantum of class 0.
FAIR_WORLDS = [("wfq", 3, 2), ("composite", 3, 2), ("composite", 60, 0)]


@pytest.mark.parametrize(("name", "backlog", "priority_class"), FAIR_WORLDS)
@pytest.mark.parametrize("seed", range(3))
def test_service_stays_within_the_vtc_bound(name: str, backlog: int, priority_class: int, seed: int):
    """8 greedy tenants, weights 1, 1, 2, 4 twice: always within U of their share, over any interval within 2U."""
    world = GreedyWorld(make_policy(name, tenants=tenants(WEIGHTS)), WEIGHTS, seed, backlog, priority_class)
    lowest = dict.fromkeys(combinations(WEIGHTS, 2), 0.0)
    highest = dict(lowest)
    for _ in range(4000):
        world.step()
        got = world.normalised()
        share = sum(world.service.values()) / sum(WEIGHTS.values())
        assert max(abs(service - share) for service in got.values()) < BOUND
        for pair in lowest:
            gap = got[pair[0]] - got[pair[1]]
            lowest[pair], highest[pair] = min(lowest[pair], gap), max(highest[pair], gap)
    assert max(highest[pair] - lowest[pair] for pair in lowest) < 2 * BOUND
    assert share > 2 * BOUND, "too short a run to tell"


def test_first_come_first_served_breaks_the_bound():
    """The bound says something: without fair queueing the same load exceeds it."""
    world = GreedyWorld(make_policy("fcfs"), WEIGHTS, seed=0)
    for _ in range(1500):
        world.step()
    got = world.normalised()
    assert max(got.values()) - min(got.values()) > 2 * BOUND


@pytest.mark.parametrize(("name", "backlog", "priority_class"), FAIR_WORLDS)
@pytest.mark.parametrize("seed", range(5))
def test_a_new_tenant_is_served_within_one_round(name: str, backlog: int, priority_class: int, seed: int):
    """Before a newcomer's first turn no other tenant has more than one."""
    world = GreedyWorld(make_policy(name, tenants=tenants(WEIGHTS)), WEIGHTS, seed, backlog, priority_class)
    for _ in range(1300 + seed):
        world.step()
    ages = [world.now - seq.request.arrival for seq in world.waiting.values()]
    assert backlog == 3 or max(ages) > 8, "nobody has waited long enough to tell"
    world.num_waiting["new"] = 0
    world.service["new"] = 0.0
    turns: list[str] = []
    while "new" not in turns:
        turns += world.step()
    before = turns[: turns.index("new")]
    assert len(before) == len(set(before))


def test_a_tenant_that_was_away_gets_its_share_not_arrears():
    """Who comes back is level with the least served: it does not make up for the time in which it asked for nothing."""
    world = World(make_policy("wfq"))
    for _ in range(50):
        world.push(tenant="busy", prompt=10)
    for _ in range(30):
        world.admit_head()
    for _ in range(10):
        world.push(tenant="back", prompt=10)
    turns = [world.admit_head().request.tenant for _ in range(10)]
    assert turns.count("back") == 5


def test_leaving_does_not_pay_a_debt():
    """A tenant that got much goes behind when it comes back while others still wait."""
    world = World(make_policy("wfq"))
    world.push(tenant="greedy", prompt=1000)
    world.push(tenant="modest", prompt=1)
    world.admit_head()
    world.push(tenant="modest", prompt=1)
    again = world.push(tenant="greedy", prompt=1)
    assert [world.admit_head().request.tenant for _ in range(3)] == ["modest", "modest", "greedy"]
    assert world.has_started(again)


def turns_of(world: World, num_turns: int) -> list[str]:
    return [world.admit_head().request.tenant for _ in range(num_turns)]


def test_cached_prompt_tokens_cost_a_tenth():
    """10 prompts found in the cache count as much as one that is computed."""
    world = World(make_policy("wfq"))
    # The computed ones came first: by arrival alone they would have 20 of the 22 turns.
    for tenant in ("computed", "cached"):
        for _ in range(20):
            world.push(tenant=tenant, prompt=100)
    turns: list[str] = []
    for _ in range(22):
        head = world.queue.head(world.now)
        world.admit(head, num_uncached=0 if head.request.tenant == "cached" else None)
        turns.append(head.request.tenant)
    assert turns.count("computed") == 2


def test_recomputation_is_not_charged():
    """A displaced sequence that computes its prompt again costs its tenant nothing more; its tokens count on."""
    world = World(make_policy("wfq"))
    # Both tenants have work waiting all the time, so that no arrival is lifted and hides what was charged.
    victim, other = world.push(tenant="a", prompt=100), world.push(tenant="b", prompt=100)
    first, second = world.push(tenant="a", prompt=1), world.push(tenant="b", prompt=1)
    assert [world.admit_head(), world.admit_head()] == [victim, other]
    world.displace(victim)
    assert world.admit_head() is victim
    assert list(world.queue.first(world.now, 2)) == [first, second]
    world.token(victim)
    assert list(world.queue.first(world.now, 2)) == [second, first]


def test_what_was_resumed_elsewhere_pays_for_its_tokens():
    """A request that comes with accepted tokens is not charged its prompt; its tokens here count."""
    world = World(make_policy("wfq"))
    resumed = Sequence(99, make_request("resumed", tenant="a", prompt=100), 0)
    resumed.output.append(5)
    world.waiting[99] = resumed
    world.queue.push(resumed, world.now)
    first, second = world.push(tenant="a", prompt=1), world.push(tenant="b", prompt=1)
    assert world.admit_head() is resumed
    assert list(world.queue.first(world.now, 2)) == [first, second]
    world.token(resumed)
    assert list(world.queue.first(world.now, 2)) == [second, first]


def test_tier_weight_multiplies_the_tenants():
    """In a tier of weight 3 a tenant gets three turns for one of a tenant in a tier of weight 1."""
    tiers = {"heavy": TierPolicy(name="heavy", weight=3.0), "light": TierPolicy(name="light")}
    world = World(make_policy("wfq", tiers))
    for lane in tiers:
        for _ in range(40):
            world.push(tenant=lane, lane=lane, prompt=12)
    assert turns_of(world, 20).count("heavy") == 15


def test_batch_work_costs_no_interactive_turn():
    """In the composite a tenant has an account per class."""
    world = World(make_policy("composite"))
    for _ in range(5):
        world.push(tenant="both", priority_class=0, prompt=1000)
    turns_of(world, 5)
    world.push(tenant="both", priority_class=2, prompt=10)
    world.push(tenant="other", priority_class=2, prompt=10)
    assert turns_of(world, 2) == ["both", "other"]


@pytest.mark.parametrize("name", ["wfq", "composite"])
def test_memory_follows_the_work_not_its_history(name: str):
    """After 6,000 tenants that came and went, some turned away, little is left of them."""
    world = World(make_policy(name, tenants={}))
    for i in range(6_000):
        world.now += 1.0
        seq = world.push(tenant=f"tenant{i}", prompt=3, priority_class=i % 3)
        if i % 5 == 0:
            world.cancel(seq)
        else:
            world.admit(seq)
            world.token(seq)
            world.finish(seq)
    queue = world.queue
    queue.head(world.now)
    assert len(queue) == 0
    assert not queue._entries
    assert not queue._departed
    assert not queue._tenants
    assert len(queue._timers._entries) <= 64
    for level in queue._levels.values():
        assert len(level._flows) <= 2 * MAX_IDLE_FLOWS
        assert len(level._heap) <= 64


def test_memory_is_bounded_while_the_clock_stands():
    """10,000 sequences that are cancelled, or end, at one instant leave a bounded rest."""
    world = World(make_policy("fcfs"))
    for i in range(10_000):
        seq = world.push()
        if i % 2:
            world.cancel(seq)
        else:
            world.admit(seq)
            world.finish(seq)
        assert len(world.queue._entries) <= 130


def test_who_still_runs_is_not_forgotten():
    """A tenant that only sits owes for its tokens, however many others came and went meanwhile."""
    world = World(make_policy("wfq"))
    sitting = world.push(tenant="sits", prompt=1)
    world.admit(sitting)
    for i in range(3 * MAX_IDLE_FLOWS):
        world.now += 1.0
        world.push(tenant="present", prompt=1)
        seq = world.push(tenant=f"t{i}", prompt=10)
        world.admit(seq)
        world.finish(seq)
    for _ in range(2 * MAX_IDLE_FLOWS):
        world.token(sitting)
    late = world.push(tenant="sits", prompt=1)
    assert list(world.queue.first(world.now, len(world.queue)))[-1] is late


def test_the_most_indebted_are_remembered():
    """When idle tenants are forgotten, it is those that owe least."""
    world = World(make_policy("wfq"))
    for i in range(3 * MAX_IDLE_FLOWS):
        world.now += 1.0
        world.push(tenant="present", prompt=1)  # somebody always waits, so nobody is lifted to the last one's debt
        seq = world.push(tenant=f"t{i}", prompt=1 if i else 100_000)
        world.admit(seq)
        world.finish(seq)
    late = world.push(tenant="t0", prompt=1)
    assert list(world.queue.first(world.now, len(world.queue)))[-1] is late
