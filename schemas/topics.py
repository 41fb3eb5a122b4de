"""Topic names, tiers and the reply topics' configuration (protocol.md 1). Standard library only."""

import re
from dataclasses import dataclass

LANES = ("interactive", "standard", "batch")
DEFAULT_LANE_PREFIX = "prompts."
DEFAULT_REPLY_PREFIX = "replies."
DEFAULT_GROUP_PREFIX = "carousel."  # a lane's consumer group is this + its topic
DEFAULT_REPLY_TOPIC = "replies.default"
USAGE_TOPIC = "usage"

CANCEL_TTL_MS = 600_000  # how long a cancel that arrives before its request is kept

MIN_PRIORITY, MAX_PRIORITY = 0, 9  # larger is more urgent
MAX_TENANT_CHARS = 64
MIN_WEIGHT, MAX_WEIGHT = 1e-6, 1e6  # of fair queueing: service by weight stays a number to count with

# A stock topic preallocates 10 MiB of index per partition and map; a reply log holds a few hundred records.
REPLY_TOPIC_CONFIG: dict[str, str] = {
    "retention.ms": "3600000",
    "index.interval.bytes": "16777216",
    "segment.index.bytes": "4096",
}

CLIENT_ID_PATTERN = re.compile(r"[0-9a-f]{32}")  # the correlation ids that our client draws

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_RESERVED_LANES = ("control", "dlq")


def is_valid_topic(name: str) -> bool:
    """Kafka's own rule for topic names."""
    return _TOPIC.fullmatch(name) is not None and name not in (".", "..")


def check_tier_name(name: str) -> None:
    """Raises ValueError for what cannot name a tier and its lane."""
    if not is_valid_topic(name) or name in _RESERVED_LANES:
        raise ValueError(f"{name!r} cannot name a tier: it ends a topic's name; {_RESERVED_LANES} are taken")


def lane_topic(lane: str, prefix: str = DEFAULT_LANE_PREFIX) -> str:
    return f"{prefix}{lane}"


def control_topic(prefix: str = DEFAULT_LANE_PREFIX) -> str:
    return f"{prefix}control"


def dlq_topic(prefix: str = DEFAULT_LANE_PREFIX) -> str:
    return f"{prefix}dlq"


def reply_topic(correlation_id: str, prefix: str = DEFAULT_REPLY_PREFIX) -> str:
    """The per-request reply topic of a correlation id."""
    return f"{prefix}{correlation_id}"


@dataclass(frozen=True, slots=True)
class Tier:
    """A class of service: one lane, and what a request gets that says nothing else.

    A header can lower a request's priority inside its lane, never lift it above `priority_cap`: topic ACLs are the
    trust boundary. Raises ValueError for a tier that cannot work.
    """

    name: str  # as in the table's own name
    default_priority: int  # of a request that names none, 0 to 9; larger is more urgent
    priority_cap: int  # the most that a header may ask for
    flush_ms: float = 0.0  # how long tokens after the first may be collected into one record; 0: every step
    default_max_tokens: int = 256  # of a request that names none
    default_deadline_ms: int | None = None  # after the record's timestamp; None: no deadline
    ttft_ms: float | None = None  # target: time to first token
    tpot_ms: float | None = None  # target: time per output token
    may_preempt: bool = True  # whether its waiting requests displace running ones of lower classes
    max_preemptions: int = 3  # how often one of its requests may be displaced; then it is pinned
    weight: float = 1.0  # of its requests in fair queueing, times the tenant's
    tenant: str | None = None  # the lane is this tenant's: the header `tenant` is ignored
    max_queued_tokens: int | None = None  # that may wait, in the deployment; None: what ttft_ms allows, if it is set
    refuse_unreachable: bool = False  # whether a deadline that cannot be met is refused at once
    max_quota_delay_ms: float = 60_000.0  # how long a request without a deadline may wait for its tenant's quota

    def __post_init__(self) -> None:
        check_tier_name(self.name)
        if not MIN_PRIORITY <= self.default_priority <= self.priority_cap <= MAX_PRIORITY:
            raise ValueError(f"tier {self.name!r} needs 0 <= default_priority <= priority_cap <= 9")
        if self.flush_ms < 0 or self.default_max_tokens < 1:
            raise ValueError(f"tier {self.name!r} needs flush_ms >= 0 and default_max_tokens >= 1")
        if not (MIN_WEIGHT <= self.weight <= MAX_WEIGHT and self.max_quota_delay_ms >= 0):
            needs = f"{MIN_WEIGHT} <= weight <= {MAX_WEIGHT} and max_quota_delay_ms >= 0"
            raise ValueError(f"tier {self.name!r} needs {needs}")
        if self.max_queued_tokens is not None and self.max_queued_tokens < 1:
            raise ValueError(f"tier {self.name!r} needs max_queued_tokens >= 1")
        if self.tenant is not None and not 1 <= len(self.tenant) <= MAX_TENANT_CHARS:
            raise ValueError(f"tier {self.name!r} needs a tenant of 1 to {MAX_TENANT_CHARS} characters")

    def priority(self, header: int | None) -> int:
        """The effective priority of a request whose `priority` header is `header` (None: it has none)."""
        return self.default_priority if header is None else min(header, self.priority_cap)

    def next_flush(self, now: float) -> float | None:
        """Until when tokens that come after `now` are collected, on the same clock, in seconds; None: not at all.

        All requests of a tier share these instants, so that their records share produce requests and fetches.
        """
        period = self.flush_ms / 1000
        return (now // period + 1) * period if period else None


DEFAULT_TIERS: dict[str, Tier] = {
    "interactive": Tier("interactive", default_priority=7, priority_cap=9),
    "standard": Tier("standard", default_priority=4, priority_cap=6),
    "batch": Tier("batch", default_priority=1, priority_cap=3, flush_ms=100.0),
}
