"""Each policy against a naive sort, in seeded random worlds."""

import random
from collections.abc import Callable

import pytest

from tests.engine_policies.world import World
from worker.engine.policies import POLICIES, make_policy
from worker.engine.policies.base import PolicyConfig
from worker.engine.request import Sequence
from worker.engine.tiers import TenantPolicy, TierPolicy

INF = float("inf")
TIERS = {
    "interactive": TierPolicy(name="interactive", ttft=3.0),
    "standard": TierPolicy(name="standard"),
}
CONFIG = PolicyConfig(
    tiers=TIERS,
    tenants={"few": TenantPolicy(name="few", max_running=2), "one": TenantPolicy(name="one", max_running=1)},
    age_guard=9.0,
    quantum=2.0,
    top_class=2,
    prefill_seconds=lambda num_tokens: 0.25 * num_tokens,
)
NaiveKey = Callable[[World, Sequence], tuple]


def fcfs(world: World, seq: Sequence) -> tuple:
    return (not world.has_started(seq), seq.request.arrival)


def aged(world: World, seq: Sequence) -> tuple | None:
    request = seq.request
    own = request.priority_class
    quantum = {0: 8.0, 1: 4.0, 2: 2.0}[own]
    if world.now - request.arrival >= quantum and own < 2:
        return (-(own + 1), 1, 0, request.arrival)
    if world.has_started(seq):
        return (-own, 0, 0, request.arrival)
    if world.now - request.arrival >= quantum:
        return (-own, 1, 0, request.arrival)
    return None


def priority(world: World, seq: Sequence) -> tuple:
    request = seq.request
    return aged(world, seq) or (-request.priority_class, 1, 1, -request.priority, request.arrival)


def due(seq: Sequence) -> float:
    request = seq.request
    dates = [request.deadline] if request.deadline is not None else []
    if request.lane == "interactive":
        dates.append(request.arrival + 3.0)
    return min(dates, default=INF)


def must_start(seq: Sequence) -> float:
    return due(seq) - 0.25 * seq.num_tokens


def edf(world: World, seq: Sequence) -> tuple:
    arrival = seq.request.arrival
    if world.has_started(seq):
        return (0, arrival)
    if world.now - arrival >= 9.0:
        return (1, arrival)
    slack = must_start(seq) - world.now
    return (2, slack, arrival) if slack > 0 else (3, arrival)


def composite(world: World, seq: Sequence) -> tuple:
    """Of one tenant in the top class."""
    request = seq.request
    by_date = due(seq) if must_start(seq) > world.now else INF
    return aged(world, seq) or (-2, 1, 1, -request.priority, by_date, request.arrival)


def srtf(world: World, seq: Sequence) -> tuple:
    """No answer has ended in these worlds when this is asked, so the predictor knows nothing: max_tokens decides."""
    arrival = seq.request.arrival
    if world.has_started(seq):
        return (0, arrival)
    if world.now - arrival >= 9.0:
        return (1, arrival)
    return (2, max(1.0, min(128.0, seq.request.max_tokens)) + 0.05 * seq.num_tokens, arrival)


def expected(world: World, key: NaiveKey, limit: int) -> list[int]:
    """The first `limit` by a sort of everything; a tenant gets no more than its limit leaves."""
    room = {"few": 2 - world.num_seated("few"), "one": 1 - world.num_seated("one")}
    found: list[int] = []
    for seq in sorted(world.waiting.values(), key=lambda seq: (key(world, seq), seq.seq_id)):
        tenant = seq.request.tenant
        if room.get(tenant, INF) > 0 and len(found) < limit:
            room[tenant] = room.get(tenant, INF) - 1
            found.append(seq.seq_id)
    return found


def act(
    world: World, rng: random.Random, tenants: list[str], *, ends: bool, classes: tuple[int, ...] = (0, 1, 2)
) -> None:
    """One random event, of those that a scheduler may cause."""
    kind = rng.choices(
        ["push", "head", "look", "displace", "end", "cancel", "wait", "token"], [6, 3, 1, 2, 3, 1, 3, 3]
    )[0]
    seated = list(world.seated.values())
    if kind == "push":
        world.push(
            tenant=rng.choice(tenants),
            lane=rng.choice(["interactive", "standard", "unknown"]),
            priority=rng.randrange(3),
            priority_class=rng.choice(classes),
            prompt=rng.randrange(1, 5),
            max_tokens=rng.randrange(1, 9),
            deadline=rng.choice([None, world.now + rng.randrange(1, 12)]),
            arrival=world.now - rng.choice([0, 0, 0, 1]),
        )
    elif kind == "head":
        world.admit_head()
    elif kind == "look":
        ahead = list(world.queue.first(world.now, 4))
        if ahead:
            world.admit(rng.choice(ahead))
    elif kind == "displace" and seated:
        world.displace(rng.choice(seated))
    elif kind == "end" and seated and ends:
        world.finish(rng.choice(seated))
    elif kind == "cancel" and world.waiting:
        world.cancel(rng.choice(list(world.waiting.values())))
    elif kind == "wait":
        world.now += rng.choice([0.25, 0.5, 1.0])
    elif kind == "token" and seated:
        world.token(rng.choice(seated))


NAIVE = {"fcfs": fcfs, "priority": priority, "edf": edf, "composite": composite, "srtf": srtf}


@pytest.mark.parametrize("name", NAIVE)
@pytest.mark.parametrize("seed", range(25))
def test_the_order_is_that_of_a_naive_sort(name: str, seed: int):
    """At any time head() and first() are what sorting all that wait would give, tenants at their limit left out."""
    rng = random.Random(seed)
    world = World(make_policy(name, config=CONFIG))
    # In the composite, tenants and classes take turns by service (test_claims.py); one of each shows the rest.
    tenants = [rng.choice(["few", "one", "free"])] if name == "composite" else ["few", "one", "free", "other"]
    classes = (2,) if name == "composite" else (0, 1, 2)
    for _ in range(250):
        act(world, rng, tenants, ends=name != "srtf", classes=classes)
        order = expected(world, NAIVE[name], 6)
        head = world.queue.head(world.now)
        assert [seq.seq_id for seq in world.queue.first(world.now, 6)] == order
        assert (None if head is None else head.seq_id) == (order[0] if order else None)
        assert len(world.queue) == len(world.waiting)
        world.queue.check_integrity()


@pytest.mark.parametrize("seed", range(15))
def test_composite_serves_the_highest_class_that_may_run(seed: int):
    """Between many tenants, too: of the highest, or of the next one if some of it have waited their quantum."""
    rng = random.Random(seed)
    world = World(make_policy("composite", config=CONFIG))
    for _ in range(250):
        act(world, rng, ["few", "one", "free", "other"], ends=True)
        head = world.queue.head(world.now)
        waiting = list(world.waiting.values())
        ready = [
            seq.request.priority_class
            for seq in waiting
            if {"few": 2, "one": 1}.get(seq.request.tenant, INF) > world.num_seated(seq.request.tenant)
        ]
        assert (head is None) == (not ready)
        if head is not None and (own := head.request.priority_class) != max(ready):
            assert own == max(ready) - 1
            assert any(seq.request.priority_class == own and (aged(world, seq) or (0,))[0] < -own for seq in waiting)
        world.queue.check_integrity()


class NaiveVtc:
    """VTC as in arXiv 2401.00588, algorithm 2, with counters in a dictionary and everything searched."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.counters = dict.fromkeys(weights, 0.0)
        self.waiting: dict[str, list[Sequence]] = {tenant: [] for tenant in weights}
        self.last_left: str | None = None

    def push(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        if not self.waiting[tenant]:
            active = [t for t, queue in self.waiting.items() if queue]
            floor = min((self.counters[t] for t in active), default=self.counters.get(self.last_left or "", 0.0))
            self.counters[tenant] = max(self.counters[tenant], floor)
        self.waiting[tenant].append(seq)

    def remove(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        self.waiting[tenant].remove(seq)
        if not self.waiting[tenant]:
            self.last_left = tenant

    def charge(self, tenant: str, cost: float) -> None:
        self.counters[tenant] += cost / self.weights[tenant]

    def order(self, limit: int) -> list[int]:
        """Whom the algorithm would admit in turn, each charged for its prompt."""
        counters = dict(self.counters)
        waiting = {t: sorted(q, key=lambda s: (s.request.arrival, s.seq_id)) for t, q in self.waiting.items()}
        found: list[int] = []
        while len(found) < limit and any(waiting.values()):
            tenant = min((t for t, q in waiting.items() if q), key=lambda t: (counters[t], waiting[t][0].seq_id))
            seq = waiting[tenant].pop(0)
            counters[tenant] += seq.num_prompt / self.weights[tenant]
            found.append(seq.seq_id)
        return found


@pytest.mark.parametrize("seed", range(25))
def test_wfq_is_the_published_algorithm(seed: int):
    """head() and first() are those of a naive VTC with the same history, arrivals of the absent lifted as there."""
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 0.5}
    tenants = {name: TenantPolicy(name=name, weight=weight) for name, weight in weights.items()}
    world, naive = World(make_policy("wfq", tenants=tenants)), NaiveVtc(weights)
    for _ in range(400):
        kind = rng.choice(["push", "push", "push", "admit", "admit", "token", "token", "cancel", "wait"])
        if kind == "push":
            naive.push(world.push(tenant=rng.choice(list(weights)), prompt=rng.randrange(1, 9)))
        elif kind == "admit" and (head := world.queue.head(world.now)) is not None:
            world.admit(head)
            naive.remove(head)
            naive.charge(head.request.tenant, head.num_prompt)
        elif kind == "token" and world.seated:
            seq = rng.choice(list(world.seated.values()))
            world.token(seq)
            naive.charge(seq.request.tenant, 2.0)
        elif kind == "cancel" and world.waiting:
            seq = rng.choice(list(world.waiting.values()))
            world.cancel(seq)
            naive.remove(seq)
        elif kind == "wait":
            world.now += 1.0
        order = naive.order(5)
        assert [seq.seq_id for seq in world.queue.first(world.now, 5)] == order
        head = world.queue.head(world.now)
        assert (None if head is None else head.seq_id) == (order[0] if order else None)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_no_policy_changes_a_request(name: str, seed: int):
    """Whatever happens to a sequence, its deadline, arrival, priority and class stay what they were."""
    rng = random.Random(seed)
    world = World(make_policy(name, config=CONFIG))
    seen: dict[int, tuple] = {}
    for _ in range(300):
        act(world, rng, ["few", "free"], ends=True)
        for seq in (*world.waiting.values(), *world.seated.values()):
            request = seq.request
            facts = (request.deadline, request.arrival, request.priority, request.priority_class)
            assert seen.setdefault(seq.seq_id, facts) == facts


@pytest.mark.parametrize("name", POLICIES)
def test_looking_ahead_at_all_that_wait_loses_nobody(name: str):
    """A tenant's whole queue read by first(), after its order has changed under an old listing, is still all there."""
    world = World(make_policy(name))
    later = world.push(arrival=5.0)
    sooner = world.push(arrival=1.0)
    world.cancel(sooner)
    assert world.queue.head(6.0) is later
    for _ in range(2):
        assert list(world.queue.first(6.0, 9)) == [later]
        world.queue.check_integrity()
    assert world.queue.head(6.0) is later


@pytest.mark.parametrize("name", POLICIES)
def test_ties_go_by_arrival_number(name: str):
    """Equal in everything else, the one that came first goes first."""
    world = World(make_policy(name))
    pushed = [world.push(tenant="same") for _ in range(5)]
    assert list(world.queue.first(0.0, 9)) == pushed


@pytest.mark.parametrize("name", POLICIES)
def test_what_started_elsewhere_goes_ahead_of_fresh_work(name: str):
    """A request that comes with accepted tokens (a crash, a hand-over) counts as displaced: it keeps its age."""
    world = World(make_policy(name))
    fresh = world.push(arrival=1.0)
    resumed = Sequence(99, fresh.request, 0)
    resumed.output.append(5)
    world.now = 1.5
    world.queue.push(resumed, world.now)
    assert world.queue.head(world.now) is resumed


def test_urgency_orders_the_running_statically():
    """By class, then priority, then arrival; neither age nor tokens move it."""
    for name in ("composite", "priority"):
        world = World(make_policy(name))
        low = world.push(priority_class=0, priority=9)
        high = world.push(priority_class=2, priority=1)
        higher = world.push(priority_class=2, priority=3)
        before = [world.queue.urgency(seq) for seq in (higher, high, low)]
        assert before == sorted(before)
        world.now = 100.0
        world.admit_head()
        assert [world.queue.urgency(seq) for seq in (higher, high, low)] == before


def test_urgency_of_srtf_and_edf():
    """Running ones are ordered by predicted work and by date, as they stood when they took their turn."""
    world = World(make_policy("srtf"))
    long, short = world.push(max_tokens=50), world.push(max_tokens=5)
    assert world.queue.urgency(short) < world.queue.urgency(long)
    for _ in range(2):
        world.admit_head()
    before = world.queue.urgency(long)
    world.token(long)
    assert world.queue.urgency(long) == before
    world = World(make_policy("edf"))
    later, sooner = world.push(deadline=20.0), world.push(deadline=10.0)
    assert world.queue.urgency(sooner) < world.queue.urgency(later)


def test_unknown_policy_is_refused_with_the_names():
    """A wrong name says which there are."""
    with pytest.raises(ValueError, match="composite, edf, fcfs, priority, srtf, wfq"):
        make_policy("lifo")


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantum": 0.0},
        {"age_guard": -1.0},
        {"tiers": {"t": TierPolicy(name="t", weight=0.0)}},
        {"tenants": {"t": TenantPolicy(name="t", weight=-1.0)}},
        {"tenants": {"t": TenantPolicy(name="t", max_running=0)}},
        {"default_tenant": TenantPolicy(name="default", weight=float("nan"))},
    ],
)
def test_configuration_that_orders_nothing_is_refused(wrong: dict):
    """Weights, limits and times that cannot work raise ValueError."""
    with pytest.raises(ValueError, match="must be"):
        PolicyConfig(**wrong)


def test_the_clock_never_goes_back():
    """A queue that is asked for an earlier time says so."""
    world = World(make_policy("fcfs"))
    world.queue.head(2.0)
    with pytest.raises(AssertionError, match="clock"):
        world.queue.head(1.0)
