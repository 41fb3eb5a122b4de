"""Reading the order ahead: the entries that a level would admit next, each flow charged for its earlier ones."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

from worker.engine.policies.queues import Claim, Entry, Flow, Key, Level, Listing, Ticket


class Turn(NamedTuple):
    """Who goes next at a level, and under which key: (counter, arrival number) in a fair level."""

    key: Key
    entry: Entry


class Turns:
    """The turns of one level, read one by one. `close` must follow: it puts back what was taken. O(log n) each."""

    def __init__(self, level: Level, taken_seats: dict[str, int], prompt_cost: Callable[[Entry], float]) -> None:
        """`taken_seats`: per tenant, how many have been read already, at any level; it is added to."""
        self._level = level
        self._taken_seats = taken_seats
        self._prompt_cost = prompt_cost
        self._opened: list[Listing] = []
        self._taken: list[tuple[Flow, tuple[Key, int, Ticket]]] = []
        self._turns: list[tuple[Key, int, Flow, float]] = []

    def peek(self) -> Turn | None:
        """The next turn, or None. Another one may come first once an entry of another level has been taken."""
        level, turns = self._level, self._turns
        while True:
            listing = level.peek_listing()
            if listing is not None and (not turns or listing < turns[0][:3]):
                self._opened.append(level.take_listing())
                heapq.heappush(turns, (*listing, 0.0))
            elif not turns:
                return None
            elif turns[0][2].tenant.room <= self._taken_seats.get(turns[0][2].tenant.policy.name, 0):
                heapq.heappop(turns)
            else:
                key, _, flow, _ = turns[0]
                ticket = flow.tickets.peek()
                assert ticket is not None, "an empty flow has a turn"
                return Turn(key, ticket.entry)

    def take(self) -> Entry:
        """Takes the entry that `peek` has just shown."""
        _, number, flow, charged = heapq.heappop(self._turns)
        item = flow.tickets.take()
        self._taken.append((flow, item))
        entry = item[2].entry
        name = flow.tenant.policy.name
        self._taken_seats[name] = self._taken_seats.get(name, 0) + 1
        charged += self._prompt_cost(entry)
        following = flow.tickets.peek()
        if following is not None:
            heapq.heappush(self._turns, (self._level.key(flow, following, charged), number, flow, charged))
        return entry

    def close(self) -> None:
        for flow, item in self._taken:
            flow.tickets.put_back(item)
        for listing in self._opened:
            self._level.put_back_listing(listing)


class ClaimedTurns:
    """The turns that a class takes at the level of the class above, read one by one."""

    def __init__(self, claim: Claim, ahead: Turns, fresh: Turns, prompt_cost: Callable[[Entry], float]) -> None:
        self._claim = claim
        self._ahead, self._fresh = ahead, fresh
        self._prompt_cost = prompt_cost
        self._num_overdue = claim.num_overdue
        self._charged = 0.0
        self._next = ahead

    def peek(self) -> Turn | None:
        if self._num_overdue == 0:
            return None
        for turns in (self._ahead, self._fresh):
            turn = turns.peek()
            if turn is not None:
                self._next = turns
                return Turn((self._claim.counter + self._charged, float(turn.entry.seq.seq_id)), turn.entry)
        return None

    def take(self) -> Entry:
        """Takes the entry that `peek` has just shown."""
        entry = self._next.take()
        assert entry.ticket is not None, "what was read does not wait"
        self._num_overdue -= entry.ticket.claim is self._claim
        self._charged += self._prompt_cost(entry)
        return entry
