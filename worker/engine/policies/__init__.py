"""Policies: in which order the waiting are admitted. Each is one WaitingQueue; `make_policy` builds it by name."""

from collections.abc import Mapping
from dataclasses import replace

from worker.engine.policies.base import PolicyConfig, PolicyQueue
from worker.engine.policies.composite import CompositeQueue
from worker.engine.policies.edf import EdfQueue
from worker.engine.policies.fcfs import FcfsQueue
from worker.engine.policies.priority import PriorityQueue
from worker.engine.policies.srtf import SrtfQueue
from worker.engine.policies.wfq import WfqQueue
from worker.engine.tiers import TenantPolicy, TierPolicy

POLICIES: dict[str, type[PolicyQueue]] = {
    "composite": CompositeQueue,
    "edf": EdfQueue,
    "fcfs": FcfsQueue,
    "priority": PriorityQueue,
    "srtf": SrtfQueue,
    "wfq": WfqQueue,
}
DEFAULT_POLICY = "composite"


def make_policy(
    name: str = DEFAULT_POLICY,
    tiers: Mapping[str, TierPolicy] | None = None,
    tenants: Mapping[str, TenantPolicy] | None = None,
    config: PolicyConfig | None = None,
) -> PolicyQueue:
    """An empty queue of that policy. `tiers` and `tenants` (by lane, by name) win over those of `config`.

    Raises ValueError for a name that is not in POLICIES.
    """
    if name not in POLICIES:
        raise ValueError(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    config = config or PolicyConfig()
    if tiers is not None:
        config = replace(config, tiers=tiers)
    if tenants is not None:
        config = replace(config, tenants=tenants)
    return POLICIES[name](config)
