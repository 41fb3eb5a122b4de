"""Tiers and tenants of a simulation: built in, or from a TOML file, and which tier a request belongs to."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from worker.engine.admission import TierLimits
from worker.engine.tiers import TenantPolicy, TierPolicy
from worker.sim.trace import Arrival

DEFAULT_TIER = "standard"
_LIMITS = tuple(f.name for f in fields(TierLimits))


@dataclass(frozen=True, slots=True)
class Levels:
    """Service levels. Of a tier beside its policy: its class (larger is more urgent) and default deadline (seconds)."""

    tiers: Mapping[str, TierPolicy]
    classes: Mapping[str, int]
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)
    deadlines: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, TierLimits] = field(default_factory=dict)
    tier_of_tenant: Mapping[str, str] = field(default_factory=dict)

    def tier_of(self, arrival: Arrival) -> str:
        """The trace's word, else the tier that names the tenant, else `standard`, else the least urgent."""
        if arrival.tier is not None:
            return arrival.tier
        fallback = DEFAULT_TIER if DEFAULT_TIER in self.tiers else min(self.tiers, key=self.classes.__getitem__)
        return self.tier_of_tenant.get(arrival.tenant, fallback)


BUILT_IN = Levels(
    tiers={
        "interactive": TierPolicy(name="interactive", ttft=1.0, tpot=0.05, weight=4.0),
        "standard": TierPolicy(name="standard", ttft=5.0, tpot=0.1, weight=2.0),
        "batch": TierPolicy(name="batch", weight=1.0, may_preempt=False),
    },
    classes={"interactive": 2, "standard": 1, "batch": 0},
)


def load_levels(path: Path) -> Levels:
    """Reads a file of tables `[tiers.NAME]` and `[tenants.NAME]`, with the fields of TierPolicy and TenantPolicy.

    A tier has besides: the fields of TierLimits (`max_queued_tokens` and so on), `class` (without it the first tier of
    the file is the most urgent), `deadline` (seconds after arrival) and `tenants` (those whose requests are of this
    tier when the trace does not say). Raises ValueError, OSError.
    """
    try:
        document = tomllib.loads(path.read_text())
        return _levels(document.get("tiers", {}), document.get("tenants", {}))
    except (tomllib.TOMLDecodeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _levels(tiers: dict[str, dict[str, Any]], tenants: dict[str, dict[str, Any]]) -> Levels:
    if not tiers:
        raise ValueError("there is no [tiers.NAME]")
    policies: dict[str, TierPolicy] = {}
    classes: dict[str, int] = {}
    deadlines: dict[str, float] = {}
    limits: dict[str, TierLimits] = {}
    tier_of_tenant: dict[str, str] = {}
    for rank, (name, table) in enumerate(tiers.items()):
        keys = dict(table)
        classes[name] = int(keys.pop("class", len(tiers) - 1 - rank))
        if "deadline" in keys:
            deadlines[name] = float(keys.pop("deadline"))
        for tenant in keys.pop("tenants", ()):
            if tenant in tier_of_tenant:
                raise ValueError(f"tenant {tenant} is in the tiers {tier_of_tenant[tenant]} and {name}")
            tier_of_tenant[tenant] = name
        limits[name] = TierLimits(**{key: keys.pop(key) for key in _LIMITS if key in keys})
        policies[name] = _policy(TierPolicy, "tiers", name, keys)
    shares = {name: _policy(TenantPolicy, "tenants", name, table) for name, table in tenants.items()}
    return Levels(policies, classes, shares, deadlines, limits, tier_of_tenant)


def _policy(kind: Any, section: str, name: str, keys: dict[str, Any]) -> Any:
    known = [f.name for f in fields(kind) if f.name != "name"]
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise ValueError(f"[{section}.{name}] knows no {', '.join(unknown)}; there are {', '.join(known)}")
    return kind(name=name, **keys)


def with_unknown_tiers(levels: Levels, arrivals: Sequence[Arrival]) -> Levels:
    """Built-in levels, with a tier of the least urgent class and no targets for each further name of the trace."""
    names = dict.fromkeys(a.tier for a in arrivals if a.tier is not None and a.tier not in levels.tiers)
    tiers = {**levels.tiers, **{name: TierPolicy(name=name) for name in names}}
    classes = {**levels.classes, **dict.fromkeys(names, 0)}
    return replace(levels, tiers=tiers, classes=classes)
