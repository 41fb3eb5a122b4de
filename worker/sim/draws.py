"""Engines of the fuzzed world, drawn at random: tiny pools and few seats, so that everything is scarce."""

import random
from dataclasses import replace

from worker.engine.admission import Admission
from worker.engine.config import SchedulerConfig
from worker.engine.cost import SWAP_SHARE, CostModel
from worker.engine.policies import POLICIES, make_policy
from worker.engine.policies.base import PolicyConfig
from worker.engine.protocols import PrefillBudget
from worker.engine.quota import Quotas
from worker.engine.scheduler import Scheduler
from worker.engine.step_model import StepBudget, StepCost, StepModel
from worker.engine.tiers import TenantPolicy, TierPolicy

LANES = ("batch", "standard", "interactive")  # a lane's index is its class
TENANTS = ("ann", "bob", "eve")
_MIN_SLOTS = 24  # of a pool: some requests fit
_SWAPPING = 0.5  # of worlds: whoever is displaced is swapped, over many steps


def draw_engine(rng: random.Random) -> tuple[Scheduler, Admission]:
    """A scheduler with limits, rules, policy, cost model and step budget drawn, and the quotas in front of it."""
    config = draw_config(rng)
    policy = rng.choice((None, "composite", "composite", *POLICIES))
    tenants = {
        name: TenantPolicy(
            name=name,
            weight=rng.choice((0.5, 1.0, 4.0)),
            max_running=rng.choice((None, None, 1, 3)),
            requests_per_s=rng.choice((None, None, 0.5)),
            tokens_per_s=rng.choice((None, None, 20.0)),
        )
        for name in TENANTS
    }
    aging = PolicyConfig(top_class=len(LANES) - 1, quantum=rng.choice((0.5, 2.0, 8.0)))
    waiting = None if policy is None else make_policy(policy, config.tiers, tenants, aging)
    cost, budget = _draw_cost(rng), _draw_budget(rng)
    paces = random.Random(repr(config))  # of their own, so that a seed's other draws stay what they were
    if paces.random() < _SWAPPING:
        config = replace(config, capacity="max_util", preemption="swap", num_host_blocks=2 * config.num_blocks)
        cost = _draw_paced_cost(paces)
    elif cost is not None and paces.random() < 0.5:
        cost = replace(cost, compute_seconds=_draw_paced_cost(paces, cost.copy_out_seconds_per_block).compute_seconds)
    scheduler = Scheduler(config, waiting, cost, budget)
    quotas = Quotas(tenants, burst_seconds=rng.choice((1.0, 10.0)))
    share_seats = (lambda fraction: None) if waiting is None else waiting.share
    return scheduler, Admission(
        config.tiers, quotas, {}, StepModel(), chunk=config.max_num_batched_tokens, share_seats=share_seats
    )


def draw_config(rng: random.Random) -> SchedulerConfig:
    """Limits and rules."""
    block_size = rng.choice((1, 2, 3, 4, 8))
    num_blocks = rng.randint(max(3, _MIN_SLOTS // block_size), max(32, _MIN_SLOTS // block_size))
    tiers = {
        name: TierPolicy(
            name=name,
            ttft=rng.choice((None, 1.0, 10.0)),
            tpot=rng.choice((None, 1.0)),
            may_preempt=rng.random() < 0.8,
            max_preemptions=rng.choice((0, 1, 3, 3)),
        )
        for name in LANES
    }
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.randint(1, 24),
        max_model_len=2 * num_blocks * block_size + 64,
        num_host_blocks=rng.choice((0, num_blocks // 2, 2 * num_blocks)),
        capacity=rng.choice(("max_util", "max_util", "max_util", "no_evict", "waterline")),
        preemption=rng.choice(("auto", "swap", "recompute")),
        watermark=rng.choice((0.0, 0.02, 0.1, 0.3)),
        high_mark=rng.choice((0.5, 0.9, 1.0)),
        prefix_caching=rng.random() < 0.7,
        max_prefix_probes=rng.choice((1, 4, 128)),
        max_prefix_waits=rng.choice((0, 2, 16)),
        look_ahead=rng.choice((0, 1, 8)),
        max_overtaken=rng.choice((0, 4, 32)),
        max_pauses=rng.choice((0, 1, 3, 16)),
        arrival_share=rng.choice((0.0, 0.05, 1.0)),
        finish_soon=rng.choice((0, 2)),
        tiers=tiers,
    )


def _draw_cost(rng: random.Random) -> CostModel | None:
    if rng.random() < 0.3:
        return None
    copy_s = rng.choice((0.1, 1.0, 10.0))
    return CostModel(
        copy_out_seconds_per_block=copy_s,
        copy_in_seconds_per_block=copy_s,
        prefill_seconds=lambda num_tokens, _num_before: float(num_tokens),
        min_swap_tokens=rng.choice((1, 8)),
    )


def _draw_paced_cost(rng: random.Random, copy_s: float = 1.0) -> CostModel:
    """A step bears one block to six."""
    step_s = rng.choice((1.5, 1.5, 2.5, 3.5, 6.5)) * copy_s / SWAP_SHARE
    return CostModel(
        copy_out_seconds_per_block=copy_s,
        copy_in_seconds_per_block=copy_s * rng.choice((0.5, 1.0)),
        prefill_seconds=lambda num_tokens, _num_before: float(num_tokens),
        compute_seconds=lambda _scheduled: step_s,
    )


def _draw_budget(rng: random.Random) -> PrefillBudget | None:
    if rng.random() < 0.5:
        return None
    return StepBudget(StepModel(prior=StepCost(0.1, 0.1, 0.01, 0.05)))
