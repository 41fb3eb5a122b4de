"""Tiers and tenants of a simulation: built in, or from a TOML file, and which tier a request belongs to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas.topics import MAX_WEIGHT, MIN_WEIGHT
from worker.engine.admission import TierLimits
from worker.engine.tiers import TenantPolicy, TierPolicy
from worker.sim.files import Name, NotNegative, Positive, explain, read_toml
from worker.sim.trace import Arrival

DEFAULT_TIER = "standard"
_STRICT = ConfigDict(strict=True, extra="forbid")
_Weight = Annotated[float, Field(ge=MIN_WEIGHT, le=MAX_WEIGHT)]


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


class _Tier(BaseModel):
    """`[tiers.NAME]`: TierPolicy, TierLimits, and what Levels has besides."""

    model_config = _STRICT
    ttft: Positive | None = None
    tpot: Positive | None = None
    weight: _Weight = 1.0
    may_preempt: bool = True
    max_preemptions: Annotated[int, Field(ge=0)] = 3
    max_queued_tokens: Annotated[int, Field(ge=1)] | None = None
    refuse_unreachable: bool = False
    max_delay: NotNegative = 60.0
    priority_class: int | None = Field(None, alias="class", ge=0, le=100)
    deadline: Positive | None = None
    tenants: list[Name] = []


class _Tenant(BaseModel):
    """`[tenants.NAME]`: TenantPolicy."""

    model_config = _STRICT
    weight: _Weight = 1.0
    max_running: Annotated[int, Field(ge=1)] | None = None
    requests_per_s: Positive | None = None
    tokens_per_s: Positive | None = None


class _File(BaseModel):
    model_config = _STRICT
    tiers: dict[Name, _Tier]
    tenants: dict[Name, _Tenant] = {}

    @model_validator(mode="after")
    def _check_tenants(self) -> Self:
        if not self.tiers:
            raise ValueError("there is no [tiers.NAME]")
        tier_of: dict[str, str] = {}
        for name, tier in self.tiers.items():
            for tenant in tier.tenants:
                if tier_of.setdefault(tenant, name) != name:
                    raise ValueError(f"tenant {tenant!r} is in the tiers {tier_of[tenant]} and {name}")
        return self


def load_levels(path: Path) -> Levels:
    """Reads a file of tables `[tiers.NAME]` and `[tenants.NAME]`, with the fields of TierPolicy and TenantPolicy.

    A tier has besides: the fields of TierLimits (`max_queued_tokens` and so on), `class` (without it the first tier of
    the file is the most urgent), `deadline` (seconds after arrival) and `tenants` (those whose requests are of this
    tier when the trace does not say). Raises ValueError, OSError.
    """
    try:
        file = _File.model_validate(read_toml(path))
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error)}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    tiers, lowest = file.tiers, len(file.tiers) - 1
    return Levels(
        tiers={name: TierPolicy(name=name, **_given(tier, TierPolicy)) for name, tier in tiers.items()},
        classes={
            name: lowest - rank if tier.priority_class is None else tier.priority_class
            for rank, (name, tier) in enumerate(tiers.items())
        },
        tenants={
            name: TenantPolicy(name=name, **_given(tenant, TenantPolicy)) for name, tenant in file.tenants.items()
        },
        deadlines={name: tier.deadline for name, tier in tiers.items() if tier.deadline is not None},
        limits={name: TierLimits(**_given(tier, TierLimits)) for name, tier in tiers.items()},
        tier_of_tenant={tenant: name for name, tier in tiers.items() for tenant in tier.tenants},
    )


def _given(table: BaseModel, kind: type[Any]) -> dict[str, Any]:
    """The fields of a table that `kind` has."""
    return table.model_dump(include={f.name for f in fields(kind)})


def with_unknown_tiers(levels: Levels, arrivals: Sequence[Arrival]) -> Levels:
    """Built-in levels, with a tier of the least urgent class and no targets for each further name of the trace."""
    names = dict.fromkeys(a.tier for a in arrivals if a.tier is not None and a.tier not in levels.tiers)
    tiers = {**levels.tiers, **{name: TierPolicy(name=name) for name in names}}
    classes = {**levels.classes, **dict.fromkeys(names, 0)}
    return replace(levels, tiers=tiers, classes=classes)
