"""What a planner reads off a simulation: one JSON object, the same for the same run, byte for byte."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from schemas.reasons import FinishReason
from worker.engine.tiers import TierPolicy
from worker.sim.levels import Levels
from worker.sim.replay import Served, WorkerRun


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least `share` of them do not exceed (nearest rank); None when there is none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def summarise(runs: Sequence[WorkerRun], levels: Levels) -> dict[str, Any]:
    """The figures of all workers together. Times in milliseconds are rounded to 1 us, other figures to 6 digits.

    - output_tok_s: output tokens by the seconds from the first arrival to the last end.
    - goodput (per tier): requests a second that finished within the tier's TTFT and TPOT targets; without targets, all
      that finished. attainment: their share of the tier's requests.
    - service_tokens (per tenant): prompt tokens of all that got a first token, and output tokens.
    - kv_use_mean: slots filled with tokens of a step's sequences, by all slots, over the time of all steps.
    - max_wait_s: the longest time without a first seat.
    """
    served = [s for run in runs for s in run.served]
    started = min((s.arrival.at for s in served), default=0.0)
    span = max((s.ended_at for s in served if s.ended_at is not None), default=started) - started
    busy_slot_s = sum(run.busy_s * run.num_slots for run in runs)
    return {
        "requests": len(served),
        "finished": sum(s.is_finished for s in served),
        "refused": sum(s.reason is FinishReason.ERROR for s in served),
        "expired": sum(s.reason is FinishReason.DEADLINE for s in served),
        "workers": len(runs),
        "span_s": _round(span),
        "output_tok_s": _per_second(sum(s.num_output for s in served), span),
        "tiers": {
            name: _tier_figures([s for s in served if s.tier == name], policy, span)
            for name, policy in levels.tiers.items()
            if any(s.tier == name for s in served)
        },
        "tenants": {
            name: _tenant_figures([s for s in served if s.arrival.tenant == name])
            for name in sorted({s.arrival.tenant for s in served})
        },
        "preemptions": {
            "swap": sum(run.num_swaps for run in runs),
            "recompute": sum(run.num_recomputes for run in runs),
        },
        "recomputed_tokens": sum(run.num_recomputed_tokens for run in runs),
        "computed_tokens": sum(run.num_computed_tokens for run in runs),
        "kv_use_mean": _round(sum(run.filled_slot_s for run in runs) / busy_slot_s) if busy_slot_s else 0.0,
        "max_wait_s": _round(max((s.wait for s in served), default=0.0)),
        "steps": sum(run.num_steps for run in runs),
    }


def _tier_figures(served: list[Served], policy: TierPolicy, span: float) -> dict[str, Any]:
    good = sum(_meets_targets(s, policy) for s in served)
    return {
        "ttft_ms": _percentiles(s.ttft for s in served),
        "tpot_ms": _percentiles(s.tpot for s in served),
        "goodput": _per_second(good, span),
        "attainment": _round(good / len(served)),
        "requests": len(served),
        "finished": sum(s.is_finished for s in served),
    }


def _tenant_figures(served: list[Served]) -> dict[str, Any]:
    prompts = sum(s.arrival.input_tokens for s in served if s.first_token_at is not None)
    return {
        "service_tokens": prompts + sum(s.num_output for s in served),
        "finished": sum(s.is_finished for s in served),
        "ttft_ms": _percentiles(s.ttft for s in served),
    }


def _meets_targets(served: Served, policy: TierPolicy) -> bool:
    if not served.is_finished:
        return False
    in_time = policy.ttft is None or (served.ttft is not None and served.ttft <= policy.ttft)
    return in_time and (policy.tpot is None or served.tpot is None or served.tpot <= policy.tpot)


def _percentiles(seconds: Iterable[float | None]) -> dict[str, float | None]:
    known = [s for s in seconds if s is not None]
    values = {"p50": percentile(known, 0.5), "p99": percentile(known, 0.99)}
    return {name: None if value is None else round(value * 1e3, 3) for name, value in values.items()}


def _per_second(count: int, span: float) -> float:
    return _round(count / span) if span > 0 else 0.0


def _round(value: float) -> float:
    return round(value, 6)
