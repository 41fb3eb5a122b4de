"""Preemption in the real worker's engine: real blocks move, and nobody sees it in the tokens."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from schemas.reasons import FinishReason
from tests.engine.builders import make_config, make_request
from tests.model.plan_driver import GREEDY
from tests.model.reference import random_prompts
from worker.engine.cost import CostModel
from worker.engine.outputs import FinishEvent, SamplingParams, StepPlan, StepRecord, TokenEvent
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler
from worker.model.loader import LoadedModel, load_model
from worker.model.runner import TorchRunner

COST = CostModel(
    copy_out_seconds_per_block=1e-4, copy_in_seconds_per_block=1e-4, prefill_seconds=lambda n, before: n * 1e-3
)

# One log probability of these requests is 1.5e-4 off when each runs alone, without any preemption.
_SMALL_BATCHES = 1e-3


# By request number: greedy, drawn, and drawn with all that depends on what was generated before.
SAMPLING = (
    SamplingParams(temperature=1.0, logprobs=2),
    GREEDY,
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=0),
    SamplingParams(temperature=1.2, top_p=0.9, presence_penalty=1.5, logit_bias=((66, 3.0), (70, -50.0)), logprobs=3),
    SamplingParams(temperature=0.8, top_k=30, repetition_penalty=0.8, min_tokens=25, logprobs=1),
)


def requests(model: LoadedModel) -> list[Request]:
    """Eight long ones of a low class, then four of a high one; some sampled, some with several choices."""
    prompts = random_prompts((60, 90, 33, 120, 47, 80, 64, 100, 40, 70, 16, 55), 256, seed=3)
    return [
        make_request(
            str(i),
            prompt=prompt,
            sampling=replace(SAMPLING[i % len(SAMPLING)], seed=i),
            max_tokens=40 if i < 8 else 12,
            n=2 if i in (3, 9) else 1,
            eos_token_ids=model.eos_token_ids,
            stop_token_ids=tuple(range(100, 115)) if SAMPLING[i % len(SAMPLING)].min_tokens else (),
            ignore_eos=True,
            priority=1 if i < 8 else 7,
            priority_class=0 if i < 8 else 2,
            new_detokenizer=model.tokenizer.new_detokenizer,
        )
        for i, prompt in enumerate(prompts)
    ]


def paced_cost() -> CostModel:
    """A step copies one block out and one in. What it learns of prices changes nothing."""
    return replace(COST, compute_seconds=lambda _scheduled: 0.0)


def run(
    model: LoadedModel,
    late_step: int = 12,
    everything: list[Request] | None = None,
    cost: CostModel = COST,
    disturb: Callable[[Scheduler, StepPlan | None], None] = lambda scheduler, plan: None,
    **limits: object,
) -> tuple[dict, list[StepRecord], list[FinishEvent]]:
    """SampledTokens per (request, choice), step records and ends; the urgent requests arrive at `late_step`.

    disturb: called before each step (plan: None) and while it is in flight.
    """
    config = make_config(**limits, max_model_len=model.max_model_len)
    scheduler = Scheduler(config, cost=cost)
    runner = TorchRunner(
        model,
        config.num_blocks,
        config.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
        num_host_blocks=config.num_host_blocks,
    )
    everything = everything or requests(model)
    for request in everything[:8]:
        scheduler.add(request)
    tokens, records, ends, step = {}, [], [], 0
    while scheduler.has_work:
        step += 1
        if step == late_step:
            for request in everything[8:]:
                scheduler.add(request)
        disturb(scheduler, None)
        plan, events = scheduler.schedule(float(step))
        if plan is not None:
            outcome = runner.execute(plan)
            disturb(scheduler, plan)
            events = events + scheduler.apply(outcome, float(step))
            records.append(scheduler.last_record)
        scheduler.check_integrity()
        for event in events:
            if isinstance(event, TokenEvent):
                tokens.setdefault((event.request_id, event.choice), []).append(event.token)
            else:
                ends.append(event)
    assert scheduler.stats().num_host_blocks_used == scheduler.stats().num_blocks_used == 0
    return tokens, records, ends


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_row_38_preemption_is_invisible_in_tokens_and_log_probabilities(mode: str):
    """A pool and seats made too small: swapped and recomputed requests give the tokens of an undisturbed run, with
    the same log probabilities and alternatives, whatever they are drawn with."""
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
    reporting = [p for p in preempted if tokens[p.request_id, p.choice][0].top and p.num_tokens > 0]
    assert mode == "auto" or {p.mode for p in reporting} >= {mode}
    assert_same_tokens(tokens, calm)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_swaps_of_a_block_a_step_are_invisible(prefix_caching: bool):
    """Out and in, a block each in a step that computes something: the tokens of an undisturbed run."""
    model = load_model("tiny")
    calm, _, _ = run(model, num_blocks=400, block_size=16, max_num_seqs=16, max_num_batched_tokens=512)
    tight = {"num_blocks": 30, "block_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 96}
    tight |= {"num_host_blocks": 60, "preemption": "swap", "prefix_caching": prefix_caching}
    tokens, records, _ = run(model, cost=paced_cost(), **tight)
    assert sum(p.mode == "swap" for record in records for p in record.preempted) >= 3
    computing = [record for record in records if record.num_decode_tokens + record.num_prefill_tokens]
    assert max(record.num_swap_out_blocks for record in computing) == 1
    assert max(record.num_swap_in_blocks for record in computing) == 1
    assert sum(record.num_swap_out_blocks for record in records) > 10
    assert sum(record.num_swap_in_blocks for record in records) > 10
    assert_same_tokens(tokens, calm, tolerance=_SMALL_BATCHES)


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("way", ["out", "in ahead", "in"])
def test_one_is_cancelled_half_way(way: str, in_flight: bool):
    """In the middle of its way, between two steps or during one: all others say what they say undisturbed."""
    model = load_model("tiny")
    calm, _, _ = run(model, num_blocks=400, block_size=16, max_num_seqs=16, max_num_batched_tokens=512)
    tight = {"num_blocks": 60, "block_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 96}
    tight |= {"num_host_blocks": 60, "preemption": "swap", "prefix_caching": False}
    cancelled: list[str] = []

    def disturb(scheduler: Scheduler, plan: StepPlan | None) -> None:
        blocks = scheduler._blocks
        outgoing = [s for s in blocks._outgoing.values() if 0 < len(s.out_block_ids) < len(s.host_block_ids) - 1]
        ahead = [s for s in blocks.prefetched.values() if len(s.block_ids) > 1 and blocks.num_to_restore(s) > 1]
        seated = [s for s in scheduler.seated if len(s.block_ids) > 1 and blocks.num_to_restore(s) > 1]
        half_way = {"out": outgoing, "in ahead": ahead, "in": seated}[way]
        if half_way and not cancelled and in_flight == (plan is not None):
            cancelled.append(half_way[0].request.request_id)
            scheduler.cancel(cancelled[0], FinishReason.CANCELLED)

    look_ahead = {"look_ahead": 0} if way == "in" else {}
    tokens, _, _ = run(model, cost=paced_cost(), disturb=disturb, **tight, **look_ahead)
    assert len(cancelled) == 1
    others = {key: own for key, own in calm.items() if key[0] != cancelled[0]}
    assert_same_tokens(
        {key: own for key, own in tokens.items() if key[0] != cancelled[0]}, others, tolerance=_SMALL_BATCHES
    )
    for key, own in tokens.items():
        assert [t.token_id for t in own] == [t.token_id for t in calm[key]][: len(own)]


def assert_same_tokens(tokens: dict, calm: dict, tolerance: float = 1e-4) -> None:
    """Log probabilities differ by what other batches do to float32 sums."""
    assert {key: [t.token_id for t in own] for key, own in tokens.items()} == {
        key: [t.token_id for t in own] for key, own in calm.items()
    }
    for key, own in calm.items():
        for mine, theirs in zip(tokens[key], own, strict=True):
            assert mine.logprob == (theirs.logprob and pytest.approx(theirs.logprob, abs=tolerance))
            assert [i for i, _ in mine.top] == [i for i, _ in theirs.top]
            assert [x for _, x in mine.top] == pytest.approx([x for _, x in theirs.top], abs=tolerance)


@pytest.mark.parametrize("num_accepted", [1, 7, 24, 25])
def test_row_38_what_goes_on_from_accepted_tokens_is_the_same(num_accepted: int):
    """As after a crash: each request is given again with the tokens that its caller has, and draws the same rest, with
    the same log probabilities and alternatives."""
    model = load_model("tiny")
    limits = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    calm, _, _ = run(model, **limits)
    resumed = [
        replace(
            request,
            accepted=tuple(
                tuple(t.token_id for t in calm[request.request_id, choice][:num_accepted])
                for choice in range(request.n)
            ),
        )
        for request in requests(model)
    ]
    rest, _, _ = run(model, everything=resumed, **limits)
    going_on = {key: own[num_accepted:] for key, own in calm.items() if own[num_accepted:]}
    assert len(going_on) > 5
    assert sum(bool(own[0].top) for own in going_on.values()) > 2
    assert_same_tokens(rest, going_on)


def test_a_higher_class_displaces_a_lower_one_for_a_seat_in_the_next_step():
    """All seats taken by a low class: an urgent request sits down in the step after it came."""
    model = load_model("tiny")
    limits = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 512}
    _, records, _ = run(model, late_step=8, **limits, num_host_blocks=200)
    urgent = next(record for record in records if "8" in record.admitted)
    assert urgent.step == 8
    assert [p.cause for p in urgent.preempted][:1] == ["seat"]
