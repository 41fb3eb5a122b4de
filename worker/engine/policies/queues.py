"""The parts that every policy is made of: entries, the queue of one tenant, and the queues of one level in order.

Three heaps stand on each other. A *flow* holds what one tenant has waiting at one level; a *level* holds its flows; the
policy holds its levels, strictest first. What leaves is marked and dropped when it surfaces, so no operation searches.
"""

import heapq

from worker.engine.lazy_heap import LazyHeap
from worker.engine.request import Sequence
from worker.engine.tiers import TenantPolicy, TierPolicy

Key = tuple[float, ...]

# Flows without work that a level remembers for their debt; beyond it those that owe least are forgiven.
MAX_IDLE_FLOWS = 1024


class Tenant:
    """A tenant that has work here: how many seats it holds, and its flows that wait for one of them."""

    __slots__ = ("max_running", "num_entries", "num_seated", "parked", "policy")

    def __init__(self, policy: TenantPolicy, share: float) -> None:
        self.policy = policy
        self.max_running = float("inf")
        self.set_share(share)
        self.num_entries = 0
        self.num_seated = 0
        self.parked: list[Flow] = []

    @property
    def room(self) -> float:
        """Seats that it may still take: infinite without a limit, negative after the limit has sunk."""
        return self.max_running - self.num_seated

    def set_share(self, share: float) -> None:
        """This worker grants that part of its limit, rounded down, and at least one seat: nobody is shut out."""
        if self.policy.max_running is not None:
            self.max_running = max(1, int(self.policy.max_running * share))


class Entry:
    """A sequence that the policy knows: waiting, seated, or ended and not yet noticed."""

    __slots__ = (
        "account",
        "claim",
        "flow",
        "has_started",
        "is_seated",
        "latest_start",
        "seq",
        "tenant",
        "ticket",
        "tier",
        "weight",
        "work",
    )

    def __init__(self, seq: Sequence, tenant: Tenant, tier: TierPolicy) -> None:
        self.seq = seq
        self.tenant = tenant
        self.tier = tier
        self.weight = tenant.policy.weight * tier.weight
        self.has_started = bool(seq.output)  # it had a seat, here or in an earlier attempt: its prompt is paid for
        self.is_seated = False
        self.ticket: Ticket | None = None  # its place in the order, while it waits
        self.flow: Flow | None = None  # where it waits, or waited last
        self.account: Flow | None = (
            None  # its tenant's fair flow where its first turn was: what it costs is charged there
        )
        self.claim: Claim | None = None  # by which it took its seat, above its class
        self.latest_start = float("inf")  # when its slack is used up (EDF)
        self.work = 0.0  # predicted, still to do (SRTF)


class Ticket:
    """One place of an entry in the order. A new place is a new ticket, so an old one never comes alive again."""

    __slots__ = ("claim", "entry", "is_live", "key", "until")

    def __init__(self, entry: Entry, key: Key, until: float, claim: "Claim | None") -> None:
        self.entry = entry
        self.key = key
        self.until = until  # when the policy has to be asked again
        self.claim = claim  # that it keeps up, by having waited too long
        self.is_live = True


def is_live(ticket: Ticket) -> bool:
    return ticket.is_live


class TicketHeap(LazyHeap[Ticket]):
    """A lazy heap that can also be read in order, by taking items out and putting them back."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(is_live)

    def take(self) -> tuple[Key, int, Ticket]:
        """Takes the first item out for a while, in O(log n). It still counts; `put_back` must follow."""
        assert self.peek() is not None, "nothing to take"
        return heapq.heappop(self._entries)

    def put_back(self, item: tuple[Key, int, Ticket]) -> None:
        heapq.heappush(self._entries, item)


class Flow:
    """What one tenant has waiting at one level, and the service that it got there."""

    __slots__ = ("counter", "is_parked", "level", "listing", "num_accounts", "tenant", "tickets")

    def __init__(self, tenant: Tenant, level: "Level") -> None:
        self.tenant = tenant
        self.level = level
        self.tickets = TicketHeap()
        self.counter = 0.0  # virtual counter: weighted service (VTC)
        self.num_accounts = 0  # entries whose cost is charged here
        self.listing: Listing | None = None  # where the level lists it, under a key that is at most its true one
        self.is_parked = False  # it has work, and its tenant has no seat left

    @property
    def first(self) -> Ticket:
        """The next ticket of a flow that has one."""
        ticket = self.tickets.peek()
        assert ticket is not None, "an empty flow has a turn"
        return ticket


class Claim:
    """What a class may take of the turns of the class above while some of it have waited too long.

    It has a part like a tenant's there, with a counter of its own, and its turns go in the order of its own class: so
    how the tenants of a class share what it gets does not depend on how long they have waited.
    """

    __slots__ = ("_at", "_is_active", "ahead", "counter", "fresh", "num_overdue")

    def __init__(self, ahead: "Level", fresh: "Level", at: "Level") -> None:
        """`ahead`, `fresh`: the class's own levels; `at`: the level of the class above."""
        self.ahead, self.fresh = ahead, fresh
        self.counter = 0.0
        self.num_overdue = 0  # entries that wait and have waited too long
        self._is_active = False  # it could take a turn when it was last looked at
        self._at = at
        at.claim = ahead.own_claim = fresh.own_claim = self

    def peek(self) -> Flow | None:
        """The flow of the class whose turn it is; None: it claims none, or its tenants have no seat left."""
        flow = (self.ahead.peek() or self.fresh.peek()) if self.num_overdue else None
        if flow is None:
            self._deactivate()
        return flow

    def activate(self) -> None:
        """It may take turns from now on, if any have waited too long: then it starts as a flow does."""
        if self.num_overdue and self.peek() is None:
            self._at.lift_to_least(self)
            self._is_active = True

    def note_joined(self) -> None:
        """One more has waited too long."""
        if self.num_overdue == 0:
            self._at.lift_to_least(self)
            self._is_active = True
        self.num_overdue += 1

    def note_left(self) -> None:
        """One of them waits no longer."""
        self.num_overdue -= 1
        if self.num_overdue == 0:
            self._deactivate()

    def _deactivate(self) -> None:
        if self._is_active:
            self._is_active = False
            self._at.last_left = self


Listing = tuple[Key, int, Flow]  # key, a number of its own, who is listed


class Level:
    """The flows of one level in order: by virtual token counter (fair), or by their heads.

    A flow's key may grow unseen (its counter rises, its head leaves): that is found out when it surfaces. When it may
    have become smaller, `offer` must be told.
    """

    def __init__(self, number: int, *, is_fair: bool) -> None:
        self.number = number
        self.claim: Claim | None = None  # of the class below
        self.own_claim: Claim | None = None  # on the turns of the class above
        self._is_fair = is_fair  # ordered by counter; else by the heads of the flows
        self._heap: list[Listing] = []
        self._num_listings = 0
        self._num_listed = 0
        self._flows: dict[str, Flow] = {}
        self._max_flows = 2 * MAX_IDLE_FLOWS
        self.last_left: Flow | Claim | None = None  # who could take turns here last

    def flow(self, tenant: Tenant) -> Flow:
        """The tenant's flow at this level, a new one if it has none."""
        flow = self._flows.get(tenant.policy.name)
        if flow is None:
            if len(self._flows) >= self._max_flows:
                self._forget_idle()
            flow = self._flows[tenant.policy.name] = Flow(tenant, self)
        elif flow.tenant is not tenant:
            assert not flow.tickets, "two tenants share a flow"
            flow.tenant = tenant
            flow.is_parked = False
        return flow

    def lift(self, flow: Flow) -> None:
        """A flow without claims becomes active: it starts level with the least served (VTC, arXiv 2401.00588, alg. 2).

        So nobody saves up a claim by being away, and nobody loses a debt by it.
        """
        if self.own_claim is not None:
            self.own_claim.activate()
        if self._is_fair:
            self.lift_to_least(flow)

    def lift_to_least(self, who: Flow | Claim) -> None:
        """Lifts its counter to the least of those that are active here, or to that of who was last."""
        active = [flow.counter for flow in (self.peek(),) if flow is not None]
        if self.claim is not None and self.claim.peek() is not None:
            active.append(self.claim.counter)
        if not active and self.last_left is not None:
            active.append(self.last_left.counter)
        who.counter = max(who.counter, min(active, default=0.0))

    def offer(self, flow: Flow) -> None:
        """A flow's key may have become smaller: lists it under the new one."""
        head = flow.tickets.peek()
        if head is None or flow.is_parked:
            return
        key = self.key(flow, head)
        if flow.listing is None:
            self._num_listed += 1
        elif key >= flow.listing[0]:
            return
        heapq.heappush(self._heap, self._list(flow, key))
        if len(self._heap) > 2 * self._num_listed + 64:
            self._heap = [listing for listing in self._heap if listing[2].listing is listing]
            heapq.heapify(self._heap)

    def note_left(self, flow: Flow) -> None:
        """A ticket of the flow has just died."""
        flow.tickets.note_left()
        if not flow.tickets:
            if not flow.is_parked:
                self.last_left = flow
        elif self._is_fair:
            self.offer(flow)  # among equal counters the new head may have come earlier

    def peek(self) -> Flow | None:
        """The flow whose turn it is."""
        listing = self.peek_listing()
        return None if listing is None else listing[2]

    def peek_turn(self) -> Flow | None:
        """The flow whose turn it is here, which may be one of the class below."""
        flow, lower = self.peek(), None if self.claim is None else self.claim.peek()
        if flow is None or lower is None:
            return flow or lower
        assert self.claim is not None, "nobody claims anything here"
        own_key = (flow.counter, flow.first.key[-1])
        return flow if own_key < (self.claim.counter, lower.first.key[-1]) else lower

    def peek_listing(self) -> Listing | None:
        """The first listing, its key true. Parks flows of tenants without room on the way, each in O(log n)."""
        heap = self._heap
        while heap:
            listing = heap[0]
            flow = listing[2]
            if flow.listing is not listing:
                heapq.heappop(heap)
                continue
            head = flow.tickets.peek()
            if head is None or flow.tenant.room <= 0:
                heapq.heappop(heap)
                flow.listing = None
                self._num_listed -= 1
                if head is not None:
                    flow.is_parked = True
                    flow.tenant.parked.append(flow)
                    self.last_left = flow
                continue
            key = self.key(flow, head)
            if key == listing[0]:
                return listing
            heapq.heapreplace(heap, self._list(flow, key))
        return None

    def take_listing(self) -> Listing:
        """Takes out for a while what `peek_listing` has just shown; `put_back_listing` must follow."""
        return heapq.heappop(self._heap)

    def put_back_listing(self, listing: Listing) -> None:
        heapq.heappush(self._heap, listing)

    def check_integrity(self) -> int:
        """Asserts, in O(n), that whoever has work is listed at most under its true key, or parked; returns the waiting.

        P1: a flow with work is either listed or parked. P2: a listing that counts is in the heap, once. P3: its key is
        at most the true one. P4: a parked flow's tenant knows it. P5: counts are right.
        """
        listed = [listing for listing in self._heap if listing[2].listing is listing]
        assert len(listed) == self._num_listed, "P5: flows listed"
        assert len({listing[2].tenant.policy.name: None for listing in listed}) == len(listed), "P2: listed twice"
        for flow in self._flows.values():
            tickets = flow.tickets
            assert tickets.recount() == len(tickets), "P5: tickets of a flow"
            head = tickets.peek()
            assert head is None or (flow.listing is not None) != flow.is_parked, "P1: work that is not listed, or twice"
            if flow.listing is not None:
                assert any(listing is flow.listing for listing in listed), "P2: a listing is lost"
                assert head is None or flow.listing[0] <= self.key(flow, head), "P3: a key above the true one"
            if flow.is_parked:
                assert flow in flow.tenant.parked, "P4: a parked flow that nobody wakes"
        return sum(len(flow.tickets) for flow in self._flows.values())

    def _list(self, flow: Flow, key: Key) -> Listing:
        """The one listing of a flow that counts from now on."""
        self._num_listings += 1
        flow.listing = (key, self._num_listings, flow)
        return flow.listing

    def key(self, flow: Flow, head: Ticket, charged: float = 0.0) -> Key:
        """The turn of a flow whose first ticket is `head`, had the flow been charged that much more."""
        return (flow.counter + charged, head.key[-1]) if self._is_fair else head.key

    def _forget_idle(self) -> None:
        """Drops the flows without work that owe least; whoever owes no more than the least served loses nothing."""
        idle = [flow for flow in self._flows.values() if not flow.tickets and not flow.num_accounts]
        idle.sort(key=lambda flow: flow.counter)
        for flow in idle[: max(0, len(idle) - MAX_IDLE_FLOWS)]:
            del self._flows[flow.tenant.policy.name]
        self._max_flows = 2 * max(len(self._flows), MAX_IDLE_FLOWS)
