"""What the scheduler knows of service tiers and tenants: configuration, in the engine's terms."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPolicy:
    """One tier (lane). Times are seconds."""

    name: str
    ttft: float | None = None  # target: time to first token
    tpot: float | None = None  # target: time per output token
    weight: float = 1.0  # of its tenants' service, in fair queueing
    may_preempt: bool = True  # whether a waiting request of it displaces running ones of lower classes
    max_preemptions: int = 3  # how often one request of it may be displaced; then it is pinned


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy:
    """One tenant. None: no limit. Limits are of the deployment; a worker enforces its share."""

    name: str
    weight: float = 1.0
    max_running: int | None = None  # seats
    requests_per_s: float | None = None
    tokens_per_s: float | None = None  # prompt and output
