"""First come, first served."""

from worker.engine.policies.base import Place, PolicyQueue
from worker.engine.policies.queues import Entry


class FcfsQueue(PolicyQueue):
    """By arrival. What has started already goes first, which is the same order: it keeps its age."""

    def place(self, entry: Entry, now: float) -> Place:
        return Place(0, (entry.seq.request.arrival,), is_ahead=entry.has_started)
