"""Tiers and tenants of the configuration in the engine's terms: the policy's queue and admission. Knows no torch."""

from collections.abc import Callable

from schemas.topics import MAX_PRIORITY, Tier
from worker.config import Tenant, WorkerConfig
from worker.engine.admission import Admission, TierLimits
from worker.engine.policies import make_policy
from worker.engine.policies.base import PolicyConfig, PolicyQueue
from worker.engine.predictor import LengthPredictor
from worker.engine.quota import Quotas
from worker.engine.step_model import StepModel
from worker.engine.tiers import TenantPolicy, TierPolicy

_DEFAULT_TENANT = "default"


def tier_policies(config: WorkerConfig) -> dict[str, TierPolicy]:
    """By lane."""
    return {name: _tier_policy(tier) for name, tier in config.tiers.items()}


def make_queue(config: WorkerConfig, model: StepModel) -> PolicyQueue:
    """The waiting queue of the configured policy. `model` says how long a prefill takes."""
    return make_policy(
        config.policy,
        tier_policies(config),
        _tenant_policies(config),
        PolicyConfig(
            top_class=config.priority_class(MAX_PRIORITY),
            default_tenant=_tenant_policy(_DEFAULT_TENANT, config.default_tenant),
            prefill_seconds=lambda num_tokens: model.prefill_seconds(num_tokens, config.max_num_batched_tokens),
        ),
    )


def make_admission(
    config: WorkerConfig, model: StepModel, queue: PolicyQueue, load: Callable[[], tuple[int, int]]
) -> Admission:
    """Admission beside that queue. `load`: what a step decodes now, as (decodes, context tokens)."""
    quotas = Quotas(
        _tenant_policies(config),
        _tenant_policy(_DEFAULT_TENANT, config.default_tenant),
        burst_seconds=config.quota_burst_seconds,
    )
    return Admission(
        tier_policies(config),
        quotas,
        {name: _tier_limits(tier) for name, tier in config.tiers.items()},
        model,
        chunk=config.max_num_batched_tokens,
        predictor=LengthPredictor(),
        load=load,
        share_seats=queue.share,
    )


def _tier_policy(tier: Tier) -> TierPolicy:
    return TierPolicy(
        name=tier.name,
        ttft=None if tier.ttft_ms is None else tier.ttft_ms / 1000,
        tpot=None if tier.tpot_ms is None else tier.tpot_ms / 1000,
        weight=tier.weight,
        may_preempt=tier.may_preempt,
        max_preemptions=tier.max_preemptions,
    )


def _tier_limits(tier: Tier) -> TierLimits:
    return TierLimits(
        max_queued_tokens=tier.max_queued_tokens,
        refuse_unreachable=tier.refuse_unreachable,
        max_delay=tier.max_quota_delay_ms / 1000,
    )


def _tenant_policies(config: WorkerConfig) -> dict[str, TenantPolicy]:
    return {name: _tenant_policy(name, tenant) for name, tenant in config.tenants.items()}


def _tenant_policy(name: str, tenant: Tenant) -> TenantPolicy:
    return TenantPolicy(
        name=name,
        weight=tenant.weight,
        max_running=tenant.max_running,
        requests_per_s=tenant.requests_per_s,
        tokens_per_s=tenant.tokens_per_s,
    )
