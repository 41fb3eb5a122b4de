"""The parts that every policy is made of: entries, the queue of one tenant, and the queues of one level in order.

Three heaps stand on each other. A *flow* holds what one tenant has waiting at one level; a *level* holds its flows; the
policy holds its levels, strictest first. What leaves is marked and dropped when it surfaces, so no operation searches.
"""

import heapq
from collections.abc import Callable

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
        self.latest_start = float("inf")  # when its slack is used up (EDF)
        self.work = 0.0  # predicted, still to do (SRTF)


class Ticket:
    """One place of an entry in the order. A new place is a new ticket, so an old one never comes alive again."""

    __slots__ = ("entry", "is_live", "key", "until")

    def __init__(self, entry: Entry, key: Key, until: float) -> None:
        self.entry = entry
        self.key = key
        self.until = until  # when the policy has to be asked again
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


Listing = tuple[Key, int, Flow]  # key, a number of its own, who is listed


class Level:
    """The flows of one level in order: by virtual token counter (fair), or by their heads.

    A flow's key may grow unseen (its counter rises, its head leaves): that is found out when it surfaces. When it may
    have become smaller, `offer` must be told.
    """

    def __init__(self, number: int, *, is_fair: bool) -> None:
        self.number = number
        self._is_fair = is_fair  # ordered by counter; else by the heads of the flows
        self._heap: list[Listing] = []
        self._num_listings = 0
        self._num_listed = 0
        self._flows: dict[str, Flow] = {}
        self._max_flows = 2 * MAX_IDLE_FLOWS
        self._last_left: Flow | None = None

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
        if self._is_fair:
            least = self.peek() or self._last_left
            if least is not None:
                flow.counter = max(flow.counter, least.counter)

    def offer(self, flow: Flow) -> None:
        """A flow's key may have become smaller: lists it under the new one."""
        head = flow.tickets.peek()
        if head is None or flow.is_parked:
            return
        key = self._key(flow, head)
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
            self._last_left = flow
        elif self._is_fair:
            self.offer(flow)  # among equal counters the new head may have come earlier

    def peek(self) -> Flow | None:
        """The flow whose turn it is. Flows of tenants without room are parked on the way, which costs each O(log n)."""
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
                continue
            key = self._key(flow, head)
            if key == listing[0]:
                return flow
            heapq.heapreplace(heap, self._list(flow, key))
        return None

    def first(self, limit: int, taken_seats: dict[str, int], prompt_cost: Callable[[Entry], float]) -> list[Entry]:
        """The entries that would be admitted next, in turn, at most `limit`, each flow charged for its earlier ones.

        `taken_seats`: per tenant, how many stand in the answer already; it is added to. O(limit log n).
        """
        found: list[Entry] = []
        opened: list[Listing] = []
        taken: list[tuple[Flow, tuple[Key, int, Ticket]]] = []
        turns: list[tuple[Key, int, Flow, float]] = []
        while len(found) < limit:
            flow = self.peek()
            if flow is not None and (not turns or self._heap[0] < turns[0][:3]):
                opened.append(heapq.heappop(self._heap))
                heapq.heappush(turns, (*opened[-1], 0.0))
                continue
            if not turns:
                break
            _, number, flow, charged = heapq.heappop(turns)
            name = flow.tenant.policy.name
            if flow.tenant.room <= taken_seats.get(name, 0):
                continue
            taken.append((flow, flow.tickets.take()))
            entry = taken[-1][1][2].entry
            found.append(entry)
            taken_seats[name] = taken_seats.get(name, 0) + 1
            charged += prompt_cost(entry)
            following = flow.tickets.peek()
            if following is not None:
                heapq.heappush(turns, (self._key(flow, following, charged), number, flow, charged))
        for flow, item in taken:
            flow.tickets.put_back(item)
        for listed in opened:
            heapq.heappush(self._heap, listed)
        return found

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
                assert head is None or flow.listing[0] <= self._key(flow, head), "P3: a key above the true one"
            if flow.is_parked:
                assert flow in flow.tenant.parked, "P4: a parked flow that nobody wakes"
        return sum(len(flow.tickets) for flow in self._flows.values())

    def _list(self, flow: Flow, key: Key) -> Listing:
        """The one listing of a flow that counts from now on."""
        self._num_listings += 1
        flow.listing = (key, self._num_listings, flow)
        return flow.listing

    def _key(self, flow: Flow, head: Ticket, charged: float = 0.0) -> Key:
        """The turn of a flow whose first ticket is `head`, had the flow been charged that much more."""
        return (flow.counter + charged, head.key[-1]) if self._is_fair else head.key

    def _forget_idle(self) -> None:
        """Drops the flows without work that owe least; whoever owes no more than the least served loses nothing."""
        idle = [flow for flow in self._flows.values() if not flow.tickets and not flow.num_accounts]
        idle.sort(key=lambda flow: flow.counter)
        for flow in idle[: max(0, len(idle) - MAX_IDLE_FLOWS)]:
            del self._flows[flow.tenant.policy.name]
        self._max_flows = 2 * max(len(self._flows), MAX_IDLE_FLOWS)
