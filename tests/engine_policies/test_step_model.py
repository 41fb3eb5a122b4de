"""The step-time model and the budget that it gives a step."""

import random
from dataclasses import replace

import pytest

from worker.engine.outputs import BlockCopy, ScheduledSequence, StepPlan
from worker.engine.step_model import StepBudget, StepCost, StepModel

TRUTH = StepCost(base=0.005, per_prefill_token=3e-5, per_context_token=4e-8, per_decode=2e-5)


def work(rng: random.Random) -> tuple[int, int, int]:
    num_decodes = rng.randrange(257)
    prefill = rng.choice([0, 0, rng.randrange(16, 8192)])
    return prefill, num_decodes * rng.randrange(100, 4000), num_decodes


def fitted(
    seed: int = 0, *, num_steps: int = 600, cost: StepCost = TRUTH, noise: float = 0.03, **settings
) -> StepModel:
    rng = random.Random(seed)
    model = StepModel(**settings)
    for _ in range(num_steps):
        step = work(rng)
        model.observe(*step, cost.seconds(*step) * rng.gauss(1, noise))
    return model


def worst_error(model: StepModel, cost: StepCost = TRUTH) -> float:
    rng = random.Random(99)
    steps = [work(rng) for _ in range(300)]
    return max(abs(model.seconds(*step) / cost.seconds(*step) - 1) for step in steps)


def test_a_step_that_copies_teaches_nothing():
    """Its time is that of the copies, too. Without them the same plan counts: a decode beside a prefill of 8."""
    plan = StepPlan(
        1, (), (), (ScheduledSequence(0, 40, 1, (), True), ScheduledSequence(1, 16, 8, (), False)), (BlockCopy(0, 1),)
    )
    model, other = fitted(), fitted()
    before = model.cost
    model.observe_plan(plan, 10.0)
    assert model.cost == before
    model.observe_plan(replace(plan, swap_outs=()), 0.5)
    other.observe(8, 56, 1, 0.5)
    assert model.cost == other.cost != before


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_finds_the_cost_of_a_step(seed: int):
    """With 3 % noise on 600 steps, no step is predicted more than 10 % wrong."""
    assert worst_error(fitted(seed)) < 0.10


@pytest.mark.parametrize("seed", range(5))
def test_outliers_move_it_little(seed: int):
    """One step in twenty stalls for half a second: predictions stay within 25 %."""
    rng = random.Random(seed)
    model = StepModel()
    for i in range(2000):
        step = work(rng)
        stall = 0.5 if i > 100 and rng.random() < 0.05 else 0.0
        model.observe(*step, TRUTH.seconds(*step) * rng.gauss(1, 0.03) + stall)
    assert worst_error(model) < 0.25


@pytest.mark.parametrize("seed", range(5))
def test_an_early_step_of_no_time_does_not_outweigh_all_others(seed: int):
    """Before it is known what is usual one step seems to have taken no time: 300 steps later it hardly counts."""
    rng = random.Random(seed)
    model = StepModel()
    for i in range(310):
        step = work(rng)
        model.observe(*step, 0.0 if i == 10 else TRUTH.seconds(*step))
    assert worst_error(model) < 0.10


def test_it_follows_a_lasting_change():
    """When every step takes twice as long from now on, 600 steps later it is within 15 %."""
    model = fitted()
    slower = StepCost(0.010, 6e-5, 8e-8, 4e-5)
    rng = random.Random(5)
    for _ in range(600):
        step = work(rng)
        model.observe(*step, slower.seconds(*step) * rng.gauss(1, 0.03))
    assert worst_error(model, slower) < 0.15


def test_hours_of_decodes_do_not_wear_out_what_it_knows_of_prefills():
    """5,000 equal decode steps later a prefill is predicted as before (directional forgetting)."""
    model = fitted()
    before = model.cost.per_prefill_token
    rng = random.Random(3)
    seconds = TRUTH.seconds(0, 64_000, 64)
    for _ in range(5_000):
        model.observe(0, 64_000, 64, seconds * rng.gauss(1, 0.03))
    assert model.cost.per_prefill_token == pytest.approx(before, rel=0.05)
    model.observe(4096, 64_000, 64, TRUTH.seconds(4096, 64_000, 64))
    assert model.seconds(4096, 64_000, 64) == pytest.approx(TRUTH.seconds(4096, 64_000, 64), rel=0.10)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_ever_negative(seed: int):
    """Whatever times come, pure noise included, no coefficient and no prediction is below 0."""
    rng = random.Random(seed)
    model = StepModel()
    for _ in range(400):
        model.observe(*work(rng), rng.choice([0.0, rng.random(), 10.0, 1e-6]))
        cost = model.cost
        coefficients = (cost.base, cost.per_prefill_token, cost.per_context_token, cost.per_decode)
        assert all(0 <= value < 1e6 for value in coefficients)
        assert model.seconds(*work(rng)) >= 0


def test_a_cost_that_is_not_there_is_found_to_be_none():
    """Where context costs nothing, the fit says about nothing, and the rest stays right."""
    truth = StepCost(0.004, 2e-5, 0.0, 3e-5)
    model = fitted(cost=truth)
    assert model.cost.per_context_token < 2e-9
    assert worst_error(model, truth) < 0.10


def test_the_worst_case_of_all_zero_steps():
    """Steps of no time at all leave a model of no cost, which never divides by it."""
    model = StepModel()
    for _ in range(20):
        model.observe(0, 0, 0, 0.0)
    assert model.seconds(1000, 1000, 10) == 0
    assert model.prefill_tokens_per_s(512) == float("inf")
    assert StepBudget(model).budget(4, 100, 0.05, 16, 8192) == 8192


def test_prefill_seconds_counts_steps_and_tokens():
    """A prompt alone costs a base per chunk and its tokens."""
    model = StepModel(prior=TRUTH)
    assert model.prefill_seconds(1000, 512) == pytest.approx(2 * 0.005 + 1000 * 3e-5)
    assert model.prefill_seconds(0, 512) == 0
    assert model.prefill_tokens_per_s(1000) == pytest.approx(1000 / 0.035)


def test_it_is_deterministic():
    """The same steps give the same model, to the last bit."""
    assert fitted(7).cost == fitted(7).cost


@pytest.mark.parametrize("wrong", [{"forgetting": 0.9}, {"forgetting": 1.1}, {"huber": 0.0}])
def test_settings_that_cannot_fit_are_refused(wrong: dict):
    """Factors out of range raise ValueError."""
    with pytest.raises(ValueError, match="must be"):
        StepModel(**wrong)


def test_a_negative_prior_is_refused():
    """A prior that takes negative time raises ValueError."""
    with pytest.raises(ValueError, match="negative"):
        StepModel(prior=StepCost(0.0, -1.0, 0.0, 0.0))


def test_a_headroom_out_of_range_is_refused():
    """0 would leave nothing, above 1 would miss every target."""
    for headroom in (0.0, 1.5):
        with pytest.raises(ValueError, match="headroom"):
            StepBudget(StepModel(), headroom)


@pytest.mark.parametrize("seed", range(5))
def test_the_budget_keeps_the_target_and_is_the_most_that_does(seed: int):
    """With it the step fits the target by the model; with a token more it would not, unless a limit says so."""
    rng = random.Random(seed)
    model = fitted(seed)
    budget = StepBudget(model, headroom=1.0)
    for _ in range(300):
        num_decodes, context, tpot = rng.randint(1, 256), rng.randrange(1_000_000), rng.uniform(0.005, 0.3)
        tokens = budget.budget(num_decodes, context, tpot, 16, 8192)
        assert 16 <= tokens <= 8192
        if tokens > 16:
            assert model.seconds(tokens, context, num_decodes) <= tpot * (1 + 1e-9)
        if tokens < 8192:
            assert model.seconds(tokens + 1, context, num_decodes) > tpot * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_the_budget_is_monotone(seed: int):
    """A looser target never gives less; more decodes, more context never give more."""
    rng = random.Random(seed)
    budget = StepBudget(fitted(seed))
    for _ in range(300):
        num_decodes, context, tpot = rng.randint(1, 256), rng.randrange(1_000_000), rng.uniform(0.001, 0.3)
        tokens = budget.budget(num_decodes, context, tpot, 16, 8192)
        assert budget.budget(num_decodes, context, tpot * 1.3, 16, 8192) >= tokens
        assert budget.budget(num_decodes + 9, context, tpot, 16, 8192) <= tokens
        assert budget.budget(num_decodes, context + 50_000, tpot, 16, 8192) <= tokens
        assert budget.budget(num_decodes, context, tpot, 16, 4096) == min(tokens, 4096)


def test_headroom_is_the_part_of_the_target_that_a_step_may_fill():
    """0.1 s, of which 0.08 s may be filled; 0.03 s are the decodes'."""
    budget = StepBudget(StepModel(prior=StepCost(0.01, 1e-3, 0.0, 1e-3)), headroom=0.8)
    assert budget.budget(20, 0, 0.1, 16, 4096) == pytest.approx(50, abs=1)


def test_prefills_always_get_on():
    """Even where decodes alone miss their target, a step has one block of prefill, or what is left of the budget."""
    budget = StepBudget(StepModel(prior=TRUTH))
    assert budget.budget(256, 10_000_000, 0.001, 16, 8192) == 16
    assert budget.budget(256, 10_000_000, 0.001, 16, 5) == 5
    assert budget.budget(256, 10_000_000, 0.001, 16, 0) == 0


def test_without_a_target_there_is_nothing_to_keep():
    """No decodes, no target, or no model yet: the whole budget."""
    budget = StepBudget(StepModel(prior=TRUTH))
    assert budget.budget(0, 0, 0.01, 16, 8192) == 8192
    assert budget.budget(10, 1000, None, 16, 8192) == 8192
    assert StepBudget(StepModel()).budget(10, 1000, 0.001, 16, 8192) == 8192


def test_the_arrival_budget_fills_the_wait_but_always_two_thirds_of_a_step():
    """A step lasts the wait; where decodes alone take a third of it or more, three times what they take."""
    budget = StepBudget(StepModel(prior=StepCost(0.01, 1e-3, 0.0, 1e-3)))
    assert budget.arrival_budget(10, 0, 0.1, 16, 4096) == 80  # 0.1 s less 0.02 s
    assert budget.arrival_budget(40, 0, 0.1, 16, 4096) == 100  # 0.05 s of decodes: twice as much prefill
    assert budget.arrival_budget(0, 0, 0.011, 64, 4096) == 64  # at least a block
    assert budget.arrival_budget(0, 0, 10.0, 16, 512) == 512
    assert StepBudget(StepModel()).arrival_budget(10, 0, 0.1, 16, 512) == 512
