"""The limits and rules of the engine, as one frozen record."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from worker.engine.tiers import TierPolicy

Capacity = Literal["max_util", "no_evict", "waterline"]
PreemptionMode = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits of the engine; ValueError when one is out of its range. Seats beyond the token budget stay empty.

    `capacity` says when a waiting sequence may take a seat, and whether running ones may lose theirs:

    - max_util: when its known tokens fit beside what the seated ones are promised, and the watermark stays free.
    - no_evict: when its blocks to completion fit. Nobody is ever preempted.
    - waterline: as max_util, with `high_mark` in place of the watermark, and beside running ones only while as many
      wait as `waiting_served_ratio` times the running, or after `max_waiting_steps` steps without a prefill (as TGI).
    """

    num_blocks: int  # in the device pool
    block_size: int = 16  # tokens
    max_num_seqs: int  # seats
    max_num_batched_tokens: int  # token budget of a step
    max_model_len: int  # tokens of prompt and output together
    num_host_blocks: int = 0  # in the host pool; 0: nothing is swapped
    capacity: Capacity = "max_util"
    preemption: PreemptionMode = "auto"  # by cost, or forced; a swap without room on the host is a recompute
    watermark: float = 0.02  # share of the device pool that admissions leave free while something runs
    high_mark: float = 0.9  # share of the device pool that admissions may fill (waterline)
    waiting_served_ratio: float = 0.3  # waiting to running (waterline)
    max_waiting_steps: int = 20  # without a prefill, while somebody waits (waterline)
    prefix_caching: bool = True
    max_prefix_probes: int = 128  # waiting sequences looked at in a step
    max_prefix_waits: int = 16  # steps that a sequence waits for a prefix which another one computes
    look_ahead: int = 8  # sequences that do not fit and may be passed over in a step
    max_overtaken: int = 32  # once so many were seated past a sequence that does not fit, nobody is any more
    max_pauses: int = 16  # steps in a row in which a decode gives its token to the prefill of a higher class; 0: never
    arrival_share: float = 0.02  # of a tier's TTFT target: how long the prefill of others may make an arrival wait
    finish_soon: int = 2  # a sequence with at most so many tokens to go is not preempted
    tiers: Mapping[str, TierPolicy] = field(default_factory=dict)  # lane -> tier

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_host_blocks", "max_pauses"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("watermark", "high_mark", "arrival_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share, from 0 to 1, got {getattr(self, name)}")

    @property
    def max_seats(self) -> int:
        """Each seated sequence needs a token of the budget once it decodes; one is left for who comes."""
        return min(self.max_num_seqs, max(1, self.max_num_batched_tokens - 1))

    @property
    def num_watermark_blocks(self) -> int:
        """Blocks that an admission leaves free while something runs."""
        if self.capacity == "waterline":
            return self.num_blocks - int(self.high_mark * self.num_blocks)
        return int(self.watermark * self.num_blocks) if self.capacity == "max_util" else 0

    def max_preemptions(self, lane: str) -> int:
        """How often a sequence of that lane may be displaced; then it is pinned."""
        tier = self.tiers.get(lane)
        return _DEFAULT_TIER.max_preemptions if tier is None else tier.max_preemptions

    def arrival_wait(self, lane: str) -> float | None:
        """Seconds that steps with prefills of that lane should last: a tier with a tighter TTFT target may arrive."""
        own = self.tiers[lane].ttft if lane in self.tiers else None
        targets = [
            tier.ttft for tier in self.tiers.values() if tier.ttft is not None and (own is None or tier.ttft < own)
        ]
        return self.arrival_share * min(targets) if targets else None

    def has_tpot(self, lane: str) -> bool:
        """Whether that lane has a target for its time per output token."""
        tier = self.tiers.get(lane)
        return tier is not None and tier.tpot is not None

    def may_preempt(self, lane: str) -> bool:
        """Whether a waiting sequence of that lane may displace running ones of lower classes."""
        tier = self.tiers.get(lane)
        return self.capacity != "no_evict" and (tier is None or tier.may_preempt)


_DEFAULT_TIER = TierPolicy(name="")
