"""Admission: now, later, or not, and with which error; and nothing is held for what is over."""

import copy
import random

import pytest

from schemas.reasons import ErrorCode
from tests.engine.builders import make_request
from worker.engine.admission import Admission, Admit, Begun, Delay, Refuse, TierLimits, reserved_tokens
from worker.engine.predictor import LengthPredictor
from worker.engine.quota import Quotas
from worker.engine.step_model import StepCost, StepModel
from worker.engine.tiers import TenantPolicy, TierPolicy

# 1,000 prefill tokens take 1 s; a decode step takes 0.1 s.
COST = StepCost(base=0.1, per_prefill_token=0.0009, per_context_token=0.0, per_decode=0.0)
TIERS = {"standard": TierPolicy(name="standard", ttft=2.0), "batch": TierPolicy(name="batch")}
LIMITS = {"batch": TierLimits(max_queued_tokens=500), "strict": TierLimits(refuse_unreachable=True)}


def make_admission(model: StepModel | None = None, predictor: LengthPredictor | None = None, **rates) -> Admission:
    quotas = Quotas({"t": TenantPolicy(name="t", **rates)}, burst_seconds=1.0)
    model = model or StepModel(prior=COST)
    return Admission(TIERS, quotas, LIMITS, model, chunk=1000, predictor=predictor)


def test_a_request_that_nothing_speaks_against_is_admitted():
    """No quota, no deadline, room in the queue: now."""
    assert make_admission().decide(make_request(), 0.0) == Admit()


def test_quota_delays_until_it_is_covered():
    """The second request of a tenant waits for its tokens; asked again then, it is admitted; before, told the same."""
    admission = make_admission(tokens_per_s=20.0)
    first, second = (make_request(name, tenant="t", prompt=10, max_tokens=10) for name in "ab")
    assert admission.decide(first, 0.0) == Admit()
    assert admission.decide(second, 0.0) == Delay(1.0)
    assert admission.decide(second, 0.5) == Delay(1.0)
    assert admission.decide(second, 1.0) == Admit()


def test_quota_beyond_the_deadline_refuses_with_a_time_to_retry():
    """What the quota would delay past its deadline ends with quota_exceeded, and reserves nothing."""
    admission = make_admission(tokens_per_s=20.0)
    admission.decide(make_request("a", tenant="t", prompt=10, max_tokens=10), 0.0)
    late = make_request("b", tenant="t", prompt=10, max_tokens=10, deadline=0.75)
    refusal = admission.decide(late, 0.0)
    assert (refusal.code, refusal.retry_after_ms) == (ErrorCode.QUOTA_EXCEEDED, 1000)
    assert len(admission.quotas) == 1
    in_time = make_request("c", tenant="t", prompt=10, max_tokens=10, deadline=1.0)
    assert admission.decide(in_time, 0.0) == Delay(1.0)


def test_without_a_deadline_the_delay_is_bounded():
    """A request that says nothing waits at most max_delay for its quota."""
    admission = make_admission(requests_per_s=0.01)
    admission.decide(make_request("a", tenant="t"), 0.0)
    refusal = admission.decide(make_request("b", tenant="t"), 0.0)
    assert (refusal.code, refusal.retry_after_ms) == (ErrorCode.QUOTA_EXCEEDED, 100_000)


def test_a_worker_without_a_share_names_no_time():
    """With no partition of the lanes no waiting would help here."""
    admission = make_admission(requests_per_s=1.0)
    admission.quotas.share(0.0, 0.0)
    refusal = admission.decide(make_request("a", tenant="t"), 0.0)
    assert (refusal.code, refusal.retry_after_ms) == (ErrorCode.QUOTA_EXCEEDED, None)


def test_a_tiers_queue_is_bounded_by_its_ttft_target():
    """2 s at 1,000 tokens a second: 2,000 tokens may wait; then overloaded, until some have started."""
    admission = make_admission()
    for name in "ab":
        assert admission.decide(make_request(name, prompt=1000), 0.0) == Admit()
    assert admission.queued_tokens("standard") == 2000
    refusal = admission.decide(make_request("c", prompt=500), 0.0)
    assert (refusal.code, refusal.retry_after_ms) == (ErrorCode.OVERLOADED, 500)
    assert admission.decide(make_request("d", prompt=100, lane="batch"), 0.0) == Admit()
    admission.started("a")
    assert admission.decide(make_request("c", prompt=500), 0.0) == Admit()


def test_a_configured_bound_wins_and_needs_no_model():
    """Batch work has no target; its bound is a number. Without a model there is no time to tell."""
    admission = make_admission(StepModel())
    assert admission.decide(make_request("a", prompt=400, lane="batch"), 0.0) == Admit()
    refusal = admission.decide(make_request("b", prompt=101, lane="batch"), 0.0)
    assert (refusal.code, refusal.retry_after_ms) == (ErrorCode.OVERLOADED, None)
    assert admission.decide(make_request("c", prompt=100, lane="batch"), 0.0) == Admit()
    for i in range(20):
        assert admission.decide(make_request(f"s{i}", prompt=1000), 0.0) == Admit()


def test_an_empty_queue_takes_a_prompt_above_its_bound():
    """Else it could never run."""
    assert make_admission().decide(make_request(prompt=5000, lane="batch"), 0.0) == Admit()


def test_an_unreachable_deadline_is_refused_at_once():
    """1,000 prompt tokens take 1 s: a deadline in 0.9 s cannot be met, one in 1.1 s can. If the tier says so."""
    admission = make_admission()
    assert admission.decide(make_request("a", prompt=1000, lane="strict", deadline=1.1), 0.0) == Admit()
    admission.started("a")
    refusal = admission.decide(make_request("b", prompt=1000, lane="strict", deadline=0.9), 0.0)
    assert (refusal.code, refusal.retry_after_ms) == (ErrorCode.DEADLINE_UNREACHABLE, None)
    assert admission.decide(make_request("c", prompt=1000, lane="standard", deadline=0.9), 0.0) == Admit()


def test_what_is_due_earlier_counts_as_work_ahead():
    """3,000 queued tokens that are due before it take 3 s; those due after it do not stand in its way."""
    admission = make_admission()
    for i in range(3):
        admission.decide(make_request(f"early{i}", prompt=1000, lane="strict", deadline=10.0), 0.0)
    for i in range(3):
        admission.decide(make_request(f"late{i}", prompt=1000, lane="strict", deadline=90.0), 0.0)
    assert admission.decide(make_request("a", prompt=1000, lane="strict", deadline=13.9), 10.0).code == (
        ErrorCode.DEADLINE_UNREACHABLE
    )
    assert admission.decide(make_request("b", prompt=1000, lane="strict", deadline=14.1), 10.0) == Admit()
    assert admission.decide(make_request("c", prompt=1000, lane="strict", deadline=9.9), 8.0) == Admit()
    assert admission.decide(make_request("d", prompt=1000, lane="strict", deadline=10.0), 8.0) == Admit()


def test_the_predicted_answer_counts_too():
    """11 tokens predicted: 1 s of prefill, which brings the first, and 10 steps of 0.1 s."""
    admission = make_admission(predictor=LengthPredictor(initial=11))
    request = make_request("a", prompt=1000, max_tokens=50, lane="strict", deadline=1.99)
    assert admission.decide(request, 0.0).code == ErrorCode.DEADLINE_UNREACHABLE
    assert admission.decide(make_request("b", prompt=1000, max_tokens=50, lane="strict", deadline=2.01), 0.0) == Admit()


def test_a_deadline_that_has_passed_needs_no_model():
    """Without a fitted model only what is over already is unreachable."""
    admission = make_admission(StepModel())
    assert admission.decide(make_request("a", lane="strict", deadline=5.0), 5.1).code == ErrorCode.DEADLINE_UNREACHABLE
    assert admission.decide(make_request("b", lane="strict", deadline=5.2), 5.1) == Admit()


def test_a_request_with_accepted_tokens_is_always_admitted():
    """No quota, no load, no deadline speaks against what an earlier attempt has begun (protocol.md 5, rule 8)."""
    admission = make_admission(requests_per_s=0.001)
    admission.decide(make_request("full", tenant="t", prompt=5000, lane="batch"), 0.0)
    for lane in ("batch", "strict"):
        resumed = make_request(lane, tenant="t", prompt=500, lane=lane, deadline=0.1, accepted=((1, 2),))
        assert admission.decide(resumed, 5.0) == Admit()
    nothing_accepted = make_request("none", tenant="t", prompt=500, lane="batch", accepted=((),))
    assert isinstance(admission.decide(nothing_accepted, 5.0), Refuse)


def test_what_was_begun_is_admitted_without_quota():
    """Also without tokens, and also after it was delayed: what it had reserved is given back."""
    admission = make_admission(requests_per_s=0.001)
    admission.decide(make_request("first", tenant="t"), 0.0)
    begun = make_request("b", tenant="t", prompt=500, lane="batch", deadline=5000.0)
    assert isinstance(admission.decide(begun, 0.0), Delay)
    assert admission.decide(begun, 0.0, Begun.YES) == Admit()
    assert len(admission.quotas) == 1


def test_what_may_have_been_begun_waits_and_is_not_refused():
    """No load, no deadline and no length of the delay speaks against it; its quota does."""
    admission = make_admission(requests_per_s=0.001)
    admission.decide(make_request("first", tenant="t", prompt=500, lane="batch"), 0.0)
    perhaps = make_request("p", tenant="t", prompt=500, lane="batch")
    assert isinstance(admission.decide(perhaps, 0.0), Refuse)
    assert admission.decide(perhaps, 0.0, Begun.PERHAPS) == Delay(1000.0)
    assert admission.decide(perhaps, 1000.0, Begun.PERHAPS) == Admit()
    late = make_request("l", lane="strict", deadline=1.0)
    assert isinstance(admission.decide(late, 2.0), Refuse)
    assert admission.decide(late, 2.0, Begun.PERHAPS) == Admit()


def test_a_deadline_that_has_passed_is_not_blamed_on_the_quota():
    """Where the tier does not refuse it, it is admitted, to end without a seat; one that would wait is refused."""
    admission = make_admission(requests_per_s=1.0)
    assert admission.decide(make_request("a", tenant="t", deadline=1.0), 2.0) == Admit()
    assert admission.decide(make_request("b", tenant="t", deadline=1.0), 2.0).code == ErrorCode.QUOTA_EXCEEDED


def test_a_share_scales_configured_queues_and_not_measured_ones():
    """A bound in tokens is of the deployment; a TTFT target is this worker's to keep, at its own speed."""
    admission = make_admission()
    admission.share(0.5, 0.0)
    admission.decide(make_request("a", prompt=200, lane="batch"), 0.0)
    assert admission.decide(make_request("b", prompt=50, lane="batch"), 0.0) == Admit()
    assert isinstance(admission.decide(make_request("c", prompt=1, lane="batch"), 0.0), Refuse)
    admission.decide(make_request("d", prompt=1000), 0.0)
    assert admission.decide(make_request("e", prompt=1000), 0.0) == Admit()


def test_a_share_reaches_the_limits_that_others_keep():
    """Seats are the policy's to count: it is told of each new share."""
    told: list[float] = []
    admission = Admission(TIERS, Quotas({}), LIMITS, StepModel(), chunk=1000, share_seats=told.append)
    admission.share(0.5, 0.0)
    admission.share(0.25, 1.0)
    assert told == [0.5, 0.25]


def test_answers_teach_the_predictor():
    """A tenant whose answers were short has short ones predicted; per choice."""
    predictor = LengthPredictor(initial=1000.0)
    admission = make_admission(predictor=predictor)
    for i in range(100):
        request = make_request(f"r{i}", tenant="brief", n=2)
        admission.decide(request, 0.0)
        admission.ended(request, 10, 0.0)
    assert predictor.remaining("brief", 0, 2000) == pytest.approx(5.0, abs=0.5)


def test_what_a_delayed_request_reserved_is_given_back_when_it_is_refused():
    """When its delay is over and the tier is full by then, it is refused, and its tenant can use the quota."""
    admission = make_admission(tokens_per_s=20.0)
    admission.decide(make_request("a", tenant="t", prompt=10, max_tokens=10), 0.0)
    delayed = make_request("b", tenant="t", prompt=10, max_tokens=10)
    assert admission.decide(delayed, 0.0) == Delay(1.0)
    admission.started("a")
    assert admission.decide(make_request("big", prompt=2500), 0.5) == Admit()
    assert admission.decide(delayed, 1.0).code == ErrorCode.OVERLOADED
    assert len(admission.quotas) == 2
    assert admission.quotas.ready_at("t", 20, 1.0) == 1.0


def test_unused_tokens_are_given_back_at_the_end():
    """A tenant pays for what it got: prompt and tokens, not for max_tokens."""
    admission = make_admission(tokens_per_s=100.0)
    request = make_request("a", tenant="t", prompt=10, max_tokens=90)
    admission.decide(request, 0.0)
    admission.started("a")
    admission.ended(request, 5, 0.0)
    assert admission.quotas.ready_at("t", 85, 0.0) == 0.0
    assert admission.quotas.ready_at("t", 86, 0.0) > 0.0


def test_what_ends_before_its_first_token_costs_nothing():
    """Cancelled while it waits, or while it is delayed: all is given back, the request's own slot too."""
    admission = make_admission(tokens_per_s=20.0, requests_per_s=1.0)
    request = make_request("a", tenant="t", prompt=10, max_tokens=10)
    admission.decide(request, 0.0)
    delayed = make_request("b", tenant="t", prompt=10, max_tokens=10)
    assert admission.decide(delayed, 0.0) == Delay(1.0)
    admission.ended(delayed, 0, 0.0)
    admission.ended(request, 0, 0.0)
    assert admission.queued_tokens("standard") == 0
    assert admission.quotas.ready_at("t", 20, 0.0) == 0.0


def test_choices_are_reserved_each():
    """n answers may each have max_tokens."""
    assert reserved_tokens(make_request(prompt=10, max_tokens=7, n=3)) == 31


def test_a_request_is_admitted_once():
    """To decide again for what is admitted is a fault of ours."""
    admission = make_admission()
    admission.decide(make_request(), 0.0)
    with pytest.raises(AssertionError, match="admitted already"):
        admission.decide(make_request(), 0.0)


@pytest.mark.parametrize("wrong", [{"max_queued_tokens": 0}, {"max_delay": -1.0}])
def test_limits_that_let_nothing_in_are_refused(wrong: dict):
    """Bounds below what can work raise ValueError."""
    with pytest.raises(ValueError, match="must be at least"):
        TierLimits(**wrong)


@pytest.mark.parametrize("seed", range(15))
def test_nothing_leaks_and_no_request_is_changed(seed: int):
    """After random decisions, starts and ends in any order nothing is held, and each request is as it came."""
    rng = random.Random(seed)
    admission = make_admission(tokens_per_s=200.0, requests_per_s=5.0)
    now, open_requests, copies = 0.0, {}, {}
    for i in range(300):
        now += rng.choice([0.0, 0.1, 1.0])
        kind = rng.choice(["new", "new", "again", "start", "end"])
        if kind == "new":
            request = make_request(
                f"r{i}",
                tenant=rng.choice(["t", "free"]),
                lane=rng.choice(["standard", "batch", "strict"]),
                prompt=rng.randint(1, 300),
                max_tokens=rng.randint(1, 50),
                deadline=rng.choice([None, now + rng.uniform(-1, 5)]),
                accepted=rng.choice([(), (), ((), ()), ((1,), ())]),
            )
            copies[request.request_id] = copy.copy(request)
            decision = admission.decide(request, now)
            if any(request.accepted):
                assert decision == Admit()
            if not isinstance(decision, Refuse):
                open_requests[request.request_id] = (request, decision)
        elif open_requests:
            request, decision = open_requests[rng.choice(list(open_requests))]
            if kind == "again" and isinstance(decision, Delay):
                decision = admission.decide(request, now)
                open_requests[request.request_id] = (request, decision)
                if isinstance(decision, Refuse):
                    del open_requests[request.request_id]
            elif kind == "start" and decision == Admit():
                admission.started(request.request_id)
            elif kind == "end":
                admission.ended(request, rng.randint(0, request.max_tokens) if decision == Admit() else 0, now)
                del open_requests[request.request_id]
        assert len(admission.quotas) <= len(open_requests)
    for request, _ in open_requests.values():
        for name in request.__slots__:
            assert getattr(request, name) == getattr(copies[request.request_id], name)
        admission.ended(request, 0, now)
    assert len(admission.quotas) == 0
    assert not admission._queued
    assert not admission._queues
