"""Strict classes with aging; inside a class by priority, then first come, first served."""

from worker.engine.policies.base import FRESH, OVERDUE, Place, PolicyConfig, PolicyQueue
from worker.engine.policies.queues import Entry
from worker.engine.request import Sequence


def aging_quantum(priority_class: int, config: PolicyConfig) -> float:
    """How long a sequence of that class waits before it is raised (seconds); each class below the top doubles it."""
    return config.quantum * 2.0 ** max(0, config.top_class - priority_class)


def aged_place(entry: Entry, now: float, config: PolicyConfig) -> Place | None:
    """Where a sequence stands by its age or by having started; None: it is fresh and stands in its own class.

    After its quantum it stands one class higher, in the top class in its own, among those who waited as long: first
    come, first served, ahead of the fresh. Nobody is raised by more than one class, and only the order of admission is
    touched: who may displace whom goes by the static class.
    """
    request = entry.seq.request
    own = request.priority_class
    is_aged = now >= request.arrival + aging_quantum(own, config)
    if is_aged and own < config.top_class:
        return Place(-(own + 1), (OVERDUE, request.arrival))
    if entry.has_started:
        until = request.arrival + aging_quantum(own, config) if own < config.top_class else float("inf")
        return Place(-own, (request.arrival,), until=until, is_ahead=True)
    if is_aged:
        return Place(-own, (OVERDUE, request.arrival))
    return None


class PriorityQueue(PolicyQueue):
    """Highest class first, aged ones raised by one class; then priority; then arrival."""

    def place(self, entry: Entry, now: float) -> Place:
        request = entry.seq.request
        key = (FRESH, float(-request.priority), request.arrival)
        until = request.arrival + aging_quantum(request.priority_class, self.config)
        return aged_place(entry, now, self.config) or Place(-request.priority_class, key, until=until)

    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        request = seq.request
        return (float(-request.priority_class), float(-request.priority), request.arrival)
