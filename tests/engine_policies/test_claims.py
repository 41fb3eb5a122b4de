"""The composite order against a naive model: classes, fair shares, and claims of a class that has waited too long."""

import random

import pytest

from tests.engine_policies.world import World
from worker.engine.policies import PolicyConfig, make_policy
from worker.engine.request import Sequence
from worker.engine.tiers import TenantPolicy

QUANTA = {0: 8.0, 1: 4.0, 2: 2.0}
TENANTS = {name: TenantPolicy(name=name, weight=weight) for name, weight in {"a": 1.0, "b": 2.0, "c": 4.0}.items()}
Counters = dict[tuple[int, str], float]  # of a class's tenants; "" is the class below, by its claim


class ModelWorld(World):
    """A world that also keeps the composite's order in dictionaries, and searches everything."""

    def __init__(self) -> None:
        super().__init__(make_policy("composite", config=PolicyConfig(tenants=TENANTS)))
        self.counters: Counters = {}
        self.last_left: dict[int, str] = {}
        self.charged_to: dict[int, list[tuple[int, str]]] = {}
        self.aged: set[int] = set()  # of the waiting

    def active(self, own: int, waiting: list[Sequence]) -> list[str]:
        """Who competes for turns of a class: its tenants with fresh work, and the class below if it claims any."""
        fresh = [seq for seq in waiting if seq.request.priority_class == own and not self.has_started(seq)]
        claiming = [seq for seq in waiting if seq.request.priority_class == own - 1 and seq.seq_id in self.aged]
        return sorted({seq.request.tenant for seq in fresh}) + [""] * (own <= 2 and len(claiming) > 0)

    def lift(self, own: int, who: str, waiting: list[Sequence]) -> None:
        active = self.active(own, waiting)
        if who not in active:
            others = active or [self.last_left.get(own, "nobody")]
            least = min(self.counters.get((own, other), 0.0) for other in others)
            self.counters[own, who] = max(self.counters.get((own, who), 0.0), least)

    def age(self) -> None:
        """Those who reach their quantum keep up a claim from now on, in the order in which they reach it."""
        reached = {
            seq_id: seq.request.arrival + QUANTA[seq.request.priority_class] for seq_id, seq in self.waiting.items()
        }
        for seq_id in sorted(reached, key=lambda seq_id: (reached[seq_id], seq_id)):
            if reached[seq_id] <= self.now and seq_id not in self.aged:
                own = self.waiting[seq_id].request.priority_class
                if own < 2:
                    self.lift(own + 1, "", list(self.waiting.values()))
                self.aged.add(seq_id)

    def leave(self, seq: Sequence, before: list[Sequence]) -> None:
        self.aged.discard(seq.seq_id)
        own, after = seq.request.priority_class, [other for other in before if other is not seq]
        # (Who has started, and stands ahead, is no flow that could be the last.)
        for level, name in ((own, seq.request.tenant), (own + 1, "")):
            if name in self.was_active[level] and name not in self.active(level, after):
                self.last_left[level] = name

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.age()
        self.queue.head(self.now)

    def push(self, **fields: object) -> Sequence:
        before = list(self.waiting.values())
        self.lift(fields["priority_class"], fields["tenant"], before)
        seq = super().push(**fields)
        self.age()
        return seq

    def note_before(self) -> list[Sequence]:
        waiting = list(self.waiting.values())
        self.was_active = {own: self.active(own, waiting) for own in range(4)}
        return waiting

    def admit(self, seq: Sequence, num_uncached: int | None = None) -> None:
        before = self.note_before()
        own = seq.request.priority_class
        weight = TENANTS[seq.request.tenant].weight
        accounts = [(own, seq.request.tenant)] + [(own + 1, "")] * ("" in self.active(own + 1, before))
        if not self.has_started(seq):
            for account in accounts:
                self.counters[account] = self.counters.get(account, 0.0) + seq.num_prompt / weight
        self.charged_to[seq.seq_id] = accounts
        started = dict(self.started)
        super().admit(seq)
        now_started, self.started = self.started, started
        self.leave(seq, before)
        self.started = now_started

    def cancel(self, seq: Sequence) -> None:
        before, started = self.note_before(), dict(self.started)
        super().cancel(seq)
        now_started, self.started = self.started, started
        self.leave(seq, before)
        self.started = now_started

    def displace(self, seq: Sequence) -> None:
        super().displace(seq)
        self.age()

    def token(self, seq: Sequence) -> None:
        super().token(seq)
        for account in self.charged_to[seq.seq_id]:
            self.counters[account] += 2.0 / TENANTS[seq.request.tenant].weight

    def turn(self, own: int, waiting: list[Sequence], counters: Counters) -> Sequence | None:
        """Whose turn it is among those of a class."""
        mine = [seq for seq in waiting if seq.request.priority_class == own]
        ahead = [seq for seq in mine if self.has_started(seq)]
        if ahead:
            return min(ahead, key=lambda seq: (seq.request.arrival, seq.seq_id))
        heads = [
            min((seq for seq in mine if seq.request.tenant == name), key=self.in_flow)
            for name in self.active(own, mine)
            if name
        ]
        return min(heads, key=lambda seq: (counters[own, seq.request.tenant], seq.seq_id), default=None)

    def in_flow(self, seq: Sequence) -> tuple[float, ...]:
        request = seq.request
        if seq.seq_id in self.aged:
            return (0.0, request.arrival, seq.seq_id)
        return (1.0, -request.priority, request.arrival, seq.seq_id)

    def order(self, limit: int) -> list[int]:
        """The ids of those that go next, each charged its prompt."""
        waiting, counters, found = list(self.waiting.values()), dict(self.counters), []
        while waiting and len(found) < limit:
            seq, accounts = self.first_of(waiting, counters)
            if not self.has_started(seq):
                for account in accounts:
                    counters[account] += seq.num_prompt / TENANTS[seq.request.tenant].weight
            waiting.remove(seq)
            found.append(seq.seq_id)
        return found

    def first_of(self, waiting: list[Sequence], counters: Counters) -> tuple[Sequence, list[tuple[int, str]]]:
        for own in (2, 1, 0):
            top = self.turn(own, waiting, counters)
            if top is not None and self.has_started(top):
                return top, []
            below = self.turn(own - 1, waiting, counters) if "" in self.active(own, waiting) else None
            account = None if top is None else (own, top.request.tenant)
            if below is not None and (
                account is None or (counters[own, ""], below.seq_id) < (counters[account], top.seq_id)
            ):
                return below, [(own - 1, below.request.tenant), (own, "")]
            if account is not None:
                return top, [account]
        raise AssertionError("nobody waits")


@pytest.mark.parametrize("seed", range(40))
def test_the_order_is_that_of_the_model(seed: int):
    """Whatever comes, goes, ages and is displaced: head() and first() are what the model says."""
    rng = random.Random(seed)
    world = ModelWorld()
    num_claimed = 0
    for _ in range(300):
        kind = rng.choices(["push", "admit", "displace", "end", "cancel", "wait", "token"], [6, 4, 2, 3, 1, 3, 3])[0]
        seated, ahead = list(world.seated.values()), list(world.queue.first(world.now, 4))
        if kind == "push":
            world.push(
                tenant=rng.choice("abc"),
                priority_class=rng.randrange(3),
                priority=rng.randrange(3),
                prompt=rng.randrange(1, 9),
                max_tokens=9,
            )
        elif kind == "admit" and ahead:
            world.admit(ahead[0] if rng.random() < 0.8 else rng.choice(ahead))
        elif kind == "cancel" and world.waiting:
            world.cancel(rng.choice(list(world.waiting.values())))
        elif kind == "wait":
            world.wait(rng.choice([0.25, 0.5, 1.0]))
        elif seated:
            {"displace": world.displace, "end": world.finish, "token": world.token}.get(kind, lambda _: None)(
                rng.choice(seated)
            )
        order = world.order(5)
        head = world.queue.head(world.now)
        assert [seq.seq_id for seq in world.queue.first(world.now, 5)] == order
        assert (None if head is None else head.seq_id) == (order[0] if order else None)
        world.queue.check_integrity()
        classes = [seq.request.priority_class for seq in world.waiting.values()]
        num_claimed += head is not None and head.request.priority_class < max(classes)
    assert num_claimed > 0, "no class ever took a turn of the class above"
