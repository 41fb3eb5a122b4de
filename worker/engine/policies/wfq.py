"""Weighted fair queueing between tenants, by virtual token counters (VTC, arXiv 2401.00588)."""

from worker.engine.policies.base import Place, PolicyQueue
from worker.engine.policies.queues import Entry


class WfqQueue(PolicyQueue):
    """The tenant with the least service for its weight goes next; inside a tenant, first come, first served.

    Two tenants that both have work waiting over some time get services in it which, each divided by its weight, differ
    by at most 2U; docs/scheduling.md derives U.
    """

    is_fair = True

    def place(self, entry: Entry, now: float) -> Place:
        return Place(0, (entry.seq.request.arrival,), is_ahead=entry.has_started)
