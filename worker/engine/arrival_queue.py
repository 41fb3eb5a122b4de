"""The default waiting queue: by class and priority, then first come, first served."""

import heapq
from collections.abc import Iterator

from worker.engine.request import Sequence

_Entry = tuple[tuple[float, ...], int, int, Sequence]


class ArrivalQueue:
    """A WaitingQueue without aging or tenants: class, displaced before fresh, priority, arrival.

    A heap with lazy deletion: who has left is dropped when it surfaces, or when such pile up, so memory stays within a
    constant of twice the waiting. A sequence may come back, with a new ticket.
    """

    __slots__ = ("_entries", "_num_pushed", "_tickets")

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._tickets: dict[int, int] = {}  # by seq_id, of those who wait
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def push(self, seq: Sequence, now: float) -> None:
        assert seq.seq_id not in self._tickets, f"sequence {seq.seq_id} waits already"
        self._num_pushed += 1
        self._tickets[seq.seq_id] = self._num_pushed
        key = (-seq.priority_class, 0 if seq.num_preemptions else 1, *seq.order_key)
        heapq.heappush(self._entries, (key, seq.seq_id, self._num_pushed, seq))

    def remove(self, seq: Sequence) -> None:
        del self._tickets[seq.seq_id]
        if len(self._entries) > 2 * len(self._tickets) + 64:
            self._entries = [entry for entry in self._entries if self._waits(entry)]
            heapq.heapify(self._entries)

    def head(self, now: float) -> Sequence | None:
        entries = self._entries
        while entries and not self._waits(entries[0]):
            heapq.heappop(entries)
        return entries[0][3] if entries else None

    def first(self, now: float, limit: int) -> Iterator[Sequence]:
        # Best first through the heap, which stays as it is: an entry's children are never before it.
        entries = self._entries
        frontier = [(entries[0], 0)] if entries else []
        while frontier and limit > 0:
            entry, index = heapq.heappop(frontier)
            if self._waits(entry):
                limit -= 1
                yield entry[3]
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(entries):
                    heapq.heappush(frontier, (entries[child], child))

    def on_admitted(self, seq: Sequence, num_uncached: int, now: float) -> None:
        """Nothing is charged."""

    def on_tokens(self, seq: Sequence, num_tokens: int) -> None:
        """Nothing is charged."""

    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        return (-seq.priority_class, *seq.order_key)

    def check_integrity(self) -> None:
        """Asserts that each of the waiting is in the heap, once."""
        assert sum(self._waits(entry) for entry in self._entries) == len(self._tickets), "one of the waiting is lost"

    def _waits(self, entry: _Entry) -> bool:
        return self._tickets.get(entry[1]) == entry[2]
