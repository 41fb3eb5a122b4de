"""The length predictor, and what shortest-remaining-first gains by it."""

import random

import pytest

from tests.engine_policies.world import World
from worker.engine.policies import PolicyConfig, make_policy
from worker.engine.predictor import LengthPredictor


def taught(lengths: list[int], tenant: str = "t", **settings: float) -> LengthPredictor:
    predictor = LengthPredictor(**settings)
    for length in lengths:
        predictor.observe(tenant, length)
    return predictor


def test_it_converges_to_a_tenants_mean_and_quantile():
    """After many answers the guess is the mean; past the mean, the quantile; past that, as much again."""
    rng = random.Random(1)
    predictor = taught([rng.randint(1, 199) for _ in range(5000)], smoothing=0.01)
    assert predictor.remaining("t", 0, 1000) == pytest.approx(100, abs=15)
    assert 150 + predictor.remaining("t", 150, 1000) == pytest.approx(180, abs=15)
    assert predictor.remaining("t", 300, 1000) == 300


def test_tenants_are_told_apart_and_strangers_get_the_mean_of_all():
    """One tenant's long answers do not make another's longer; an unknown tenant is taken for an average one."""
    predictor = LengthPredictor()
    for _ in range(200):
        predictor.observe("short", 10)
        predictor.observe("long", 500)
    assert predictor.remaining("short", 0, 1000) == pytest.approx(10, abs=1)
    assert predictor.remaining("long", 0, 1000) == pytest.approx(500, abs=5)
    assert 10 < predictor.remaining("stranger", 0, 1000) < 500


@pytest.mark.parametrize("seed", range(5))
def test_the_guess_stays_between_one_and_what_is_left(seed: int):
    """Whatever was observed, 1 <= remaining <= max_tokens - generated."""
    rng = random.Random(seed)
    predictor = LengthPredictor(initial=50)
    for _ in range(500):
        predictor.observe(rng.choice("abc"), rng.choice([0, 1, 5, 100, 10_000]))
        max_tokens = rng.randint(1, 300)
        generated = rng.randrange(max_tokens)
        assert 1 <= predictor.remaining(rng.choice("abcd"), generated, max_tokens) <= max_tokens - generated


def test_memory_is_bounded_by_forgetting_the_longest_unseen():
    """Beyond max_tenants the tenant that was observed longest ago goes."""
    predictor = LengthPredictor(max_tenants=2)
    for tenant, length in (("a", 10), ("b", 20), ("a", 10), ("c", 30)):
        predictor.observe(tenant, length)
    assert len(predictor) == 2
    overall = predictor.remaining("nobody", 0, 1000)
    assert predictor.remaining("b", 0, 1000) == overall
    assert predictor.remaining("a", 0, 1000) != overall


@pytest.mark.parametrize(
    "wrong", [{"smoothing": 0.0}, {"smoothing": 1.0}, {"quantile": 1.0}, {"initial": 0.0}, {"max_tenants": 0}]
)
def test_settings_that_cannot_learn_are_refused(wrong: dict):
    """Factors outside (0, 1) and empty memories raise ValueError."""
    with pytest.raises(ValueError, match="must be"):
        LengthPredictor(**wrong)


def mean_completion(name: str, seed: int, config: PolicyConfig) -> float:
    """4 seats, 300 requests of 6 tenants with their own lengths, half there at time 0; one token a seat and step."""
    rng = random.Random(seed)
    world = World(make_policy(name, config=config))
    lengths: dict[int, int] = {}
    arrivals: dict[int, float] = {}
    completions: list[float] = []
    plan = [(0.0 if i < 150 else 10.0 * (i - 150), rng.randrange(6)) for i in range(300)]
    while plan or world.waiting or world.seated:
        while plan and plan[0][0] <= world.now:
            _, tenant = plan.pop(0)
            seq = world.push(tenant=f"t{tenant}", prompt=4, max_tokens=1000)
            lengths[seq.seq_id] = max(1, round(rng.gauss(4 * 3**tenant, 3**tenant)))
            arrivals[seq.seq_id] = world.now
        while len(world.seated) < 4 and world.admit_head():
            pass
        world.now += 1.0
        for seq in list(world.seated.values()):
            world.token(seq)
            if len(seq.output) == lengths[seq.seq_id]:
                world.finish(seq)
                completions.append(world.now - arrivals[seq.seq_id])
    return sum(completions) / len(completions)


@pytest.mark.parametrize("seed", range(3))
def test_srtf_reduces_the_mean_completion(seed: int):
    """It starts without knowledge, learns the tenants' lengths from what ends, and beats FCFS by a third at least."""
    # The guard is as long as the run: it bounds the waits, at the price of the mean.
    config = PolicyConfig(age_guard=1e6)
    assert mean_completion("srtf", seed, config) < 2 / 3 * mean_completion("fcfs", seed, config)
