"""Earliest deadline first, by slack: what has the least time left before it must start."""

from worker.engine.policies.base import FRESH, OVERDUE, Place, PolicyConfig, PolicyQueue
from worker.engine.policies.queues import Entry
from worker.engine.request import Sequence

# Ranks of the fresh, smallest first.
IN_TIME = FRESH
LATE = FRESH + 1  # it cannot make its date any more: it must not make the others late, too


class EdfQueue(PolicyQueue):
    """Least slack first; without a date, after those with one; late ones last. The age guard takes care of both."""

    def on_push(self, entry: Entry) -> None:
        entry.latest_start = latest_start(entry, self.config)

    def place(self, entry: Entry, now: float) -> Place:
        arrival = entry.seq.request.arrival
        guard = arrival + self.config.age_guard
        if entry.has_started:
            return Place(0, (arrival,), is_ahead=True)
        if now >= guard:
            return Place(0, (OVERDUE, arrival))
        if now >= entry.latest_start:
            return Place(0, (LATE, arrival), until=guard)
        return Place(0, (IN_TIME, entry.latest_start, arrival), until=min(guard, entry.latest_start))

    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        return (self._entries[seq.seq_id].latest_start, seq.request.arrival)


def latest_start(entry: Entry, config: PolicyConfig) -> float:
    """When its prefill must start (seconds): the date of its first token, less the prefill; infinite without a date.

    Slack (SLOs-Serve, arXiv 2504.08784) is this less `now`, so time does not change the order by slack.
    """
    return date(entry) - config.prefill_seconds(entry.seq.num_tokens)


def date(entry: Entry) -> float:
    """When its first token is due (seconds): by the tier's TTFT target, or its deadline if that is earlier."""
    request = entry.seq.request
    target = request.arrival + entry.tier.ttft if entry.tier.ttft is not None else float("inf")
    return min(target, request.deadline if request.deadline is not None else float("inf"))
