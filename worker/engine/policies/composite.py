"""The default: class, then tenant by fair share, then priority, then slack."""

from worker.engine.policies.base import FRESH, Place, PolicyQueue
from worker.engine.policies.edf import latest_start
from worker.engine.policies.priority import aged_place, aging_quantum
from worker.engine.policies.queues import Entry
from worker.engine.request import Sequence


class CompositeQueue(PolicyQueue):
    """Strict classes with aging; in a class the tenant with the least service for its weight; in a tenant by priority.

    At equal priority: least slack first where the tier has a TTFT target or the request a deadline, else, or once that
    is missed, first come, first served. A tenant has an account per class, so batch work costs it no interactive turn.
    """

    is_fair = True

    def on_push(self, entry: Entry) -> None:
        entry.latest_start = latest_start(entry, self.config)

    def place(self, entry: Entry, now: float) -> Place:
        aged = aged_place(entry, now, self.config)
        if aged is not None:
            return aged
        request = entry.seq.request
        is_late = now >= entry.latest_start
        until = request.arrival + aging_quantum(request.priority_class, self.config)
        key = (FRESH, float(-request.priority), float("inf") if is_late else entry.latest_start, request.arrival)
        return Place(-request.priority_class, key, until=until if is_late else min(until, entry.latest_start))

    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        request = seq.request
        return (float(-request.priority_class), float(-request.priority), request.arrival)
