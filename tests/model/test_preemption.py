"""Preemption in the real worker's engine: real blocks move, and nobody sees it in the tokens."""

import pytest

from tests.engine.builders import make_config, make_request
from tests.model.plan_driver import GREEDY
from tests.model.reference import random_prompts
from worker.engine.cost import CostModel
from worker.engine.outputs import FinishEvent, SamplingParams, StepRecord, TokenEvent
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.model.loader import LoadedModel, load_model
from worker.model.runner import TorchRunner

COST = CostModel(
    copy_out_seconds_per_block=1e-4, copy_in_seconds_per_block=1e-4, prefill_seconds=lambda n, before: n * 1e-3
)


def requests(model: LoadedModel) -> list[Request]:
    """Eight long ones of a low class, then four of a high one; some sampled, some with several choices."""
    prompts = random_prompts((60, 90, 33, 120, 47, 80, 64, 100, 40, 70, 16, 55), 256, seed=3)
    return [
        make_request(
            str(i),
            prompt=prompt,
            sampling=GREEDY if i % 3 else SamplingParams(temperature=1.0, seed=i),
            max_tokens=40 if i < 8 else 12,
            n=2 if i in (3, 9) else 1,
            eos_token_ids=model.eos_token_ids,
            ignore_eos=True,
            priority=1 if i < 8 else 7,
            priority_class=0 if i < 8 else 2,
            new_detokenizer=model.tokenizer.new_detokenizer,
        )
        for i, prompt in enumerate(prompts)
    ]


def run(model: LoadedModel, late_step: int = 12, **limits: object) -> tuple[dict, list[StepRecord], list[FinishEvent]]:
    """Tokens per (request, choice), step records and ends; the urgent requests arrive at `late_step`."""
    config = make_config(**limits, max_model_len=model.max_model_len)
    scheduler = Scheduler(config, cost=COST)
    runner = TorchRunner(
        model,
        config.num_blocks,
        config.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        num_host_blocks=config.num_host_blocks,
    )
    everything = requests(model)
    for request in everything[:8]:
        scheduler.add(request)
    tokens, records, ends, step = {}, [], [], 0
    while scheduler.has_work:
        step += 1
        if step == late_step:
            for request in everything[8:]:
                scheduler.add(request)
        plan, events = scheduler.schedule(float(step))
        if plan is not None:
            events = events + scheduler.apply(runner.execute(plan), float(step))
            records.append(scheduler.last_record)
        scheduler.check_integrity()
        for event in events:
            if isinstance(event, TokenEvent):
                tokens.setdefault((event.request_id, event.choice), []).append(event.token.token_id)
            else:
                ends.append(event)
    return tokens, records, ends


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_preemption_is_invisible_in_the_tokens(mode: str):
    """A pool and seats made too small: swapped and recomputed requests give the tokens of an undisturbed run."""
    model = load_model("tiny")
    roomy = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    tight = {"num_blocks": 30, "block_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 96}
    calm, records, _ = run(model, **roomy)
    assert not any(record.preempted for record in records)
    tokens, records, ends = run(model, **tight, num_host_blocks=0 if mode == "recompute" else 60, preemption=mode)
    preempted = [p for record in records for p in record.preempted]
    assert len(preempted) >= 3
    assert mode == "auto" or {p.mode for p in preempted} >= {mode}
    assert sum(e.stats.swaps + e.stats.recomputes for e in ends) == len(preempted)
    assert tokens == calm


def test_a_higher_class_displaces_a_lower_one_for_a_seat_in_the_next_step():
    """All seats taken by a low class: an urgent request sits down in the step after it came."""
    model = load_model("tiny")
    limits = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 512}
    _, records, _ = run(model, late_step=8, **limits, num_host_blocks=200)
    urgent = next(record for record in records if "8" in record.admitted)
    assert urgent.step == 8
    assert [p.cause for p in urgent.preempted][:1] == ["seat"]
