"""The default: class, then tenant by fair share, then priority, then date."""

from worker.engine.policies.base import FRESH, NEVER, OVERDUE, Place, PolicyQueue
from worker.engine.policies.edf import date, latest_start
from worker.engine.policies.priority import aging_quantum
from worker.engine.policies.queues import Entry
from worker.engine.request import Sequence


class CompositeQueue(PolicyQueue):
    """Strict classes with aging; in a class the tenant with the least service for its weight; in a tenant by priority.

    At equal priority: earliest date first where the tier has a TTFT target or the request a deadline, else, or once it
    cannot be met, first come, first served. (By slack, long prompts would go before short ones that came earlier, and
    the worst waits be longer.) A tenant has an account per class, so batch work costs it no interactive turn.
    """

    is_fair = True

    def on_push(self, entry: Entry) -> None:
        entry.latest_start = latest_start(entry, self.config)

    def place(self, entry: Entry, now: float) -> Place:
        """One that has waited its quantum goes first in its tenant's flow, and its class claims turns of the next one.

        A class rises, not a sequence: else who is new in it would wait for all that are old, whoever pays for them.
        """
        request = entry.seq.request
        level = -request.priority_class
        aged_at = request.arrival + aging_quantum(request.priority_class, self.config)
        is_aged = now >= aged_at
        claims = is_aged and request.priority_class < self.config.top_class
        if entry.has_started:
            return Place(level, (request.arrival,), NEVER if is_aged else aged_at, is_ahead=True, claims=claims)
        if is_aged:
            return Place(level, (OVERDUE, request.arrival), claims=claims)
        is_late = now >= entry.latest_start
        key = (FRESH, float(-request.priority), float("inf") if is_late else date(entry), request.arrival)
        return Place(level, key, until=aged_at if is_late else min(aged_at, entry.latest_start))

    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        request = seq.request
        return (float(-request.priority_class), float(-request.priority), request.arrival)
