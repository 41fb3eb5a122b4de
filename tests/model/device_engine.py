"""An engine over a runner: twelve requests, with all they need or with too little of everything."""

from collections.abc import Callable
from typing import Any

from tests.engine.builders import make_config
from tests.model.test_preemption import COST, requests
from worker.engine.outputs import SampledToken, StepPlan, TokenEvent
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.model.loader import LoadedModel

ROOMY = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 512}
TIGHT = {"num_blocks": 30, "block_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 96, "num_host_blocks": 60}

Tokens = dict[tuple[str, int], list[SampledToken]]
NewRunner = Callable[..., Any]  # takes the limits; what it gives executes plans


def run_engine(
    model: LoadedModel,
    new_runner: NewRunner,
    limits: dict[str, int],
    everything: list[Request] | None = None,
    preemption: str = "swap",
    between: Callable[[Scheduler, Any], None] = lambda scheduler, runner: None,
) -> tuple[Tokens, list[StepPlan]]:
    """All tokens by (request, choice), and the plans. The urgent requests, from the ninth on, arrive at step 12.

    `between` is called after each step.
    """
    scheduler = Scheduler(make_config(**limits, preemption=preemption, max_model_len=model.max_model_len), cost=COST)
    runner = new_runner(**limits)
    everything = everything or requests(model)
    for request in everything[:8]:
        scheduler.add(request)
    tokens: Tokens = {}
    plans: list[StepPlan] = []
    step = 0
    while scheduler.has_work:
        step += 1
        if step == 12:
            for request in everything[8:]:
                scheduler.add(request)
        plan, events = scheduler.schedule(float(step))
        if plan is not None:
            plans.append(plan)
            events = events + scheduler.apply(runner.execute(plan), float(step))
        between(scheduler, runner)
        for event in events:
            if isinstance(event, TokenEvent):
                tokens.setdefault((event.request_id, event.choice), []).append(event.token)
    return tokens, plans
