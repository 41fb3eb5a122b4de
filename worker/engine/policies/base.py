"""What all policies share: a WaitingQueue whose order comes from one function, `place`.

A policy says where an entry stands: its level (smaller goes first, strictly), whether it stands there as one that has
started already (those go ahead of the fresh of their level, by age), its key inside its tenant's flow, and until when
this holds. Between the fresh flows of a level the order is that of their heads or, in a fair policy, of their virtual
token counters (VTC). A tenant at its `max_running` is passed over.

The scheduler does not say when a sequence ends, so ends are noticed: what left the queue is looked through when the
clock has moved, and the seats of tenants that have a limit at every turn. That costs O(seats), whatever waits.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from worker.engine.policies.queues import Claim, Entry, Flow, Key, Level, Tenant, Ticket, TicketHeap
from worker.engine.policies.turns import ClaimedTurns, Turns
from worker.engine.request import Sequence, SequenceStatus
from worker.engine.tiers import TenantPolicy, TierPolicy

# Ranks inside a flow, smallest first.
OVERDUE = 0.0  # it has waited longer than its age guard: first come, first served
FRESH = 1.0

NEVER = float("inf")

# What service costs, in prompt tokens (VTC, arXiv 2401.00588, sec. 4.1): an output token costs twice a prompt token.
PROMPT_COST = 1.0
OUTPUT_COST = 2.0
CACHED_COST = 0.1  # a cached prompt token: it costs memory, hardly time


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry stands, until the clock says `until` (seconds)."""

    level: int
    key: Key
    until: float = NEVER
    is_ahead: bool = False  # of all fresh work of its level, as one that has started already
    claims: bool = False  # a turn of the level above for its own: it has waited too long


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """What policies know of the deployment. Times are seconds. Raises ValueError for what cannot order anything."""

    tiers: Mapping[str, TierPolicy] = field(default_factory=dict)  # by lane; others get a tier without targets
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)  # by name; others get `default_tenant`'s terms
    default_tenant: TenantPolicy = field(default_factory=lambda: TenantPolicy(name="default"))
    top_class: int = 2  # the highest priority class that is in use
    quantum: float = 2.0  # of aging, in the top class; it doubles with every class below
    age_guard: float = 30.0  # `srtf` and `edf`: who has waited so long goes first come, first served
    prefill_seconds: Callable[[int], float] = lambda num_tokens: 0.0  # for slack; a fitted StepModel has it

    def __post_init__(self) -> None:
        if self.quantum <= 0 or self.age_guard <= 0:
            raise ValueError("quantum and age_guard must be above 0 seconds")
        for tier in self.tiers.values():
            if not tier.weight > 0:
                raise ValueError(f"the weight of tier {tier.name!r} must be above 0, got {tier.weight}")
        for tenant in (*self.tenants.values(), self.default_tenant):
            if not tenant.weight > 0:
                raise ValueError(f"the weight of tenant {tenant.name!r} must be above 0, got {tenant.weight}")
            if tenant.max_running is not None and tenant.max_running < 1:
                raise ValueError(f"max_running of {tenant.name!r} must be at least 1: 0 would wait for ever")


class PolicyQueue:
    """The WaitingQueue of a policy; subclasses say the order. Contract of each method: worker/engine/waiting.py."""

    is_fair = False  # whether flows are ordered by VTC, not by their heads

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self._levels: dict[tuple[int, bool], Level] = {}
        self._level_order: list[tuple[int, bool]] = []  # most urgent first
        self._tenants: dict[str, Tenant] = {}
        self._entries: dict[int, Entry] = {}  # by sequence id: all that wait or sit
        self._departed: dict[int, Entry] = {}  # of those, the ones that wait no longer
        self._max_departed = 64
        self._timers = TicketHeap()
        self._limited: dict[int, Entry] = {}  # of those, the seated ones of tenants with a limit
        self._share = 1.0
        self._num_tickets = 0
        self._num_waiting = 0
        self._now = float("-inf")

    def __len__(self) -> int:
        return self._num_waiting

    def place(self, entry: Entry, now: float) -> Place:
        """The order of the policy. Must stay true until `Place.until`, whatever else comes and goes."""
        raise NotImplementedError

    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        return (seq.request.arrival,)

    def on_push(self, entry: Entry) -> None:
        """Freezes what the order takes from the sequence, so that it cannot move while it waits or runs."""

    def on_end(self, entry: Entry) -> None:
        """A sequence that had a seat has ended."""

    def push(self, seq: Sequence, now: float) -> None:
        entry = self._entries.get(seq.seq_id)
        if entry is None:
            entry = self._new_entry(seq)
        else:
            assert entry.ticket is None, f"sequence {seq.seq_id} waits already"
            del self._departed[seq.seq_id]
            self._leave_seat(entry)
        self._num_waiting += 1
        self.on_push(entry)
        self._put(entry, now)

    def remove(self, seq: Sequence) -> None:
        entry = self._entries[seq.seq_id]
        assert entry.ticket is not None, f"sequence {seq.seq_id} does not wait"
        assert entry.flow is not None, "a ticket without a flow"
        claim = entry.flow.level.own_claim
        entry.claim = claim if claim is not None and claim.num_overdue else None
        self._retire(entry.ticket, entry.flow)
        entry.ticket = None
        self._num_waiting -= 1
        self._departed[seq.seq_id] = entry
        if len(self._departed) > self._max_departed:
            self._notice_ends(self._departed)
            self._max_departed = 2 * len(self._departed) + 64

    def head(self, now: float) -> Sequence | None:
        self._advance(now)
        for key in self._level_order:
            flow = self._levels[key].peek_turn()
            if flow is not None:
                return flow.first.entry.seq
        return None

    def first(self, now: float, limit: int) -> Iterator[Sequence]:
        self._advance(now)
        found: list[Entry] = []
        taken_seats: dict[str, int] = {}
        turns = {level: Turns(level, taken_seats, _full_prompt_cost) for level in self._levels.values()}
        for key in self._level_order:
            level = self._levels[key]
            readers: list[Turns | ClaimedTurns] = [turns[level]]
            if (claim := level.claim) is not None:
                readers.append(ClaimedTurns(claim, turns[claim.ahead], turns[claim.fresh], _full_prompt_cost))
            while len(found) < limit:
                following = [(turn.key, i) for i, reader in enumerate(readers) if (turn := reader.peek()) is not None]
                if not following:
                    break
                found.append(readers[min(following)[1]].take())
        for level_turns in turns.values():
            level_turns.close()
        return iter([entry.seq for entry in found])

    def on_admitted(self, seq: Sequence, num_uncached: int, now: float) -> None:
        """Charges the prompt, once: to compute again what a preemption or a crash lost is not the tenant's fault."""
        entry = self._entries[seq.seq_id]
        assert not entry.is_seated, f"sequence {seq.seq_id} has a seat already"
        flow = entry.flow
        assert flow is not None, f"sequence {seq.seq_id} never waited"
        if entry.account is None:
            # Not where it stood ahead of the fresh: nobody's turn goes by a counter there.
            entry.account = self._level(flow.level.number, is_ahead=False).flow(entry.tenant)
            entry.account.num_accounts += 1
        if not entry.has_started:
            num_charged = min(num_uncached, seq.num_prompt)
            self._charge(entry, PROMPT_COST * num_charged + CACHED_COST * (seq.num_prompt - num_charged))
            entry.has_started = True
        entry.is_seated = True
        entry.tenant.num_seated += 1
        if entry.tenant.policy.max_running is not None:
            self._limited[seq.seq_id] = entry

    def on_tokens(self, seq: Sequence, num_tokens: int) -> None:
        if not self.is_fair:
            return
        self._charge(self._entries[seq.seq_id], OUTPUT_COST * num_tokens)

    def check_integrity(self) -> None:
        """Asserts in O(n) that nothing is lost, counted wrong or kept too long: P1 to P5 (Level), and here P6, P7."""
        num_waiting = sum(level.check_integrity() for level in self._levels.values())
        entries = self._entries.values()
        assert num_waiting == self._num_waiting == sum(entry.ticket is not None for entry in entries), "P5: the waiting"
        assert self._timers.recount() == len(self._timers), "P5: timers"
        assert len(self._departed) == len(self._entries) - num_waiting, "P6: an entry neither waits nor has left"
        for tenant in self._tenants.values():
            own = [entry for entry in entries if entry.tenant is tenant]
            assert tenant.num_entries == len(own) > 0, "P7: entries of a tenant"
            assert tenant.num_seated == sum(entry.is_seated for entry in own), "P7: seats of a tenant"

    def _charge(self, entry: Entry, cost: float) -> None:
        assert entry.account is not None, f"sequence {entry.seq.seq_id} never had a seat"
        entry.account.counter += cost / entry.weight
        if entry.claim is not None:
            entry.claim.counter += cost / entry.weight

    def share(self, fraction: float) -> None:
        """This worker grants `fraction` (0 to 1) of every tenant's `max_running` from now on. O(tenants with work)."""
        assert 0 <= fraction <= 1, f"a share of {fraction}"
        self._share = fraction
        for tenant in self._tenants.values():
            tenant.set_share(fraction)
            self._unpark(tenant)

    def _new_entry(self, seq: Sequence) -> Entry:
        request = seq.request
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            policy = self.config.tenants.get(request.tenant)
            tenant = self._tenants[request.tenant] = Tenant(policy or self._default_terms(request.tenant), self._share)
        tenant.num_entries += 1
        tier = self.config.tiers.get(request.lane) or TierPolicy(name=request.lane)
        entry = self._entries[seq.seq_id] = Entry(seq, tenant, tier)
        return entry

    def _default_terms(self, name: str) -> TenantPolicy:
        default = self.config.default_tenant
        return TenantPolicy(name=name, weight=default.weight, max_running=default.max_running)

    def _level(self, number: int, *, is_ahead: bool) -> Level:
        key = (number, not is_ahead)
        level = self._levels.get(key)
        if level is None:
            level = self._levels[key] = Level(number, is_fair=self.is_fair and not is_ahead)
            insort(self._level_order, key)
        return level

    def _put(self, entry: Entry, now: float) -> None:
        """Gives an entry its place, a new one if it has one already, and lists its flow there."""
        old_ticket, old_flow = entry.ticket, entry.flow
        place = self.place(entry, now)
        assert place.until > now, "a place that holds until now would be asked for again for ever"
        level = self._level(place.level, is_ahead=place.is_ahead)
        flow = entry.flow = level.flow(entry.tenant)
        if not flow.tickets:
            level.lift(flow)
        self._num_tickets += 1
        claim = self._claim(place.level) if place.claims else None
        ticket = entry.ticket = Ticket(entry, (*place.key, float(entry.seq.seq_id)), place.until, claim)
        flow.tickets.push(ticket.key, self._num_tickets, ticket)
        if claim is not None:
            claim.note_joined()
        if place.until < NEVER:
            self._timers.push((place.until,), self._num_tickets, ticket)
        if old_ticket is not None:
            # Only now, so that a flow with nothing else does not count as empty in between.
            assert old_flow is not None, "a ticket without a flow"
            self._retire(old_ticket, old_flow)
        level.offer(flow)

    def _claim(self, number: int) -> Claim:
        """The claim of a level's class on the turns of the class above."""
        ahead, fresh = self._level(number, is_ahead=True), self._level(number, is_ahead=False)
        return fresh.own_claim or Claim(ahead, fresh, at=self._level(number - 1, is_ahead=False))

    def _retire(self, ticket: Ticket, flow: Flow) -> None:
        ticket.is_live = False
        flow.level.note_left(flow)
        if ticket.claim is not None:
            ticket.claim.note_left()
        if ticket.until < NEVER:
            self._timers.note_left()

    def _advance(self, now: float) -> None:
        """Notices ends, and moves those whose place has changed with the clock. Asserts that it does not go back."""
        assert now >= self._now, "the clock went back"
        if now > self._now:
            self._notice_ends(self._departed)
        elif self._limited:
            self._notice_ends(self._limited)
        self._now = now
        while (ticket := self._timers.peek()) is not None and ticket.until <= now:
            self._put(ticket.entry, now)

    def _notice_ends(self, among: dict[int, Entry]) -> None:
        ended = SequenceStatus.FINISHED
        for seq_id in [seq_id for seq_id, entry in among.items() if entry.seq.status is ended]:
            entry = self._departed.pop(seq_id)
            del self._entries[seq_id]
            if entry.is_seated:
                self._leave_seat(entry)
                self.on_end(entry)
            if entry.account is not None:
                entry.account.num_accounts -= 1
            entry.tenant.num_entries -= 1
            if not entry.tenant.num_entries:
                del self._tenants[entry.tenant.policy.name]

    def _leave_seat(self, entry: Entry) -> None:
        """Frees the tenant's seat."""
        assert entry.is_seated, f"sequence {entry.seq.seq_id} has no seat to leave"
        tenant = entry.tenant
        entry.is_seated = False
        self._limited.pop(entry.seq.seq_id, None)
        tenant.num_seated -= 1
        self._unpark(tenant)

    def _unpark(self, tenant: Tenant) -> None:
        """The flows that waited for a seat of their tenant are active again; those still without are soon parked."""
        parked, tenant.parked = tenant.parked, []
        for flow in parked:
            flow.is_parked = False
            if flow.tickets:
                flow.level.lift(flow)
                flow.level.offer(flow)


def _full_prompt_cost(entry: Entry) -> float:
    """What admission would charge at most; nothing when it has been charged."""
    return 0.0 if entry.has_started else PROMPT_COST * entry.seq.num_prompt / entry.weight
