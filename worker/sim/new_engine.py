"""How a simulated worker's scheduler and admission are made of profile and service levels, as worker/start.py does."""

from worker.engine.admission import Admission
from worker.engine.config import SchedulerConfig
from worker.engine.cost import CostModel
from worker.engine.policies import DEFAULT_POLICY, POLICIES, make_policy
from worker.engine.policies.base import PolicyConfig
from worker.engine.predictor import LengthPredictor
from worker.engine.quota import Quotas
from worker.engine.scheduler import Scheduler
from worker.engine.step_model import StepBudget, StepCost, StepModel
from worker.sim.levels import Levels
from worker.sim.profile import Profile
from worker.sim.replay import NewEngine


def engine_factory(policy: str = DEFAULT_POLICY) -> NewEngine:
    """Makes the engines of a simulation, with the policy of that name. Raises ValueError when there is none."""
    if policy not in POLICIES:
        raise ValueError(f"there is no policy {policy}; there are {', '.join(POLICIES)}")

    def new(profile: Profile, levels: Levels) -> tuple[Scheduler, Admission, StepModel]:
        model = StepModel(prior=StepCost(profile.base_s, profile.prefill_s, profile.context_s, profile.decode_s))

        def prefill_s(num_tokens: int) -> float:
            return model.prefill_seconds(num_tokens, profile.max_num_batched_tokens)

        waiting = make_policy(
            policy,
            levels.tiers,
            levels.tenants,
            PolicyConfig(top_class=max(levels.classes.values()), prefill_seconds=prefill_s),
        )
        scheduler = Scheduler(scheduler_config(profile, levels), waiting, cost_model(profile, model), StepBudget(model))
        quotas = Quotas(levels.tenants)
        admission = Admission(
            levels.tiers,
            quotas,
            levels.limits,
            model,
            chunk=profile.max_num_batched_tokens,
            predictor=LengthPredictor(),
            load=scheduler.load,
            share_seats=waiting.share,
        )
        return scheduler, admission, model

    return new


def scheduler_config(profile: Profile, levels: Levels) -> SchedulerConfig:
    """No prefix cache: a trace says nothing of what its prompts have in common."""
    return SchedulerConfig(
        num_blocks=profile.num_blocks,
        block_size=profile.block_size,
        max_num_seqs=profile.max_num_seqs,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        max_model_len=profile.max_model_len,
        num_host_blocks=profile.num_host_blocks,
        prefix_caching=False,
        tiers=levels.tiers,
    )


def cost_model(profile: Profile, model: StepModel) -> CostModel:
    """What swap and recompute cost by the profile. A recomputed token reads all the KV before it."""

    def prefill_s(num_tokens: int, num_before: int) -> float:
        return profile.prefill_s * num_tokens + profile.context_s * (num_before + num_tokens)

    return CostModel(
        copy_out_seconds_per_block=profile.swap_s,
        copy_in_seconds_per_block=profile.swap_s,
        prefill_seconds=prefill_s,
        compute_seconds=model.plan_seconds if profile.paced_swaps else None,
    )
