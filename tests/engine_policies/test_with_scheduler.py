"""Every policy in the real scheduler: all requests end, limits hold at every step, seats are never left empty."""

import random
from dataclasses import replace

import pytest

from tests.engine.builders import Engine, make_request
from worker.engine.policies import POLICIES, PolicyConfig, make_policy
from worker.engine.request import Request
from worker.engine.step_model import StepBudget, StepCost, StepModel
from worker.engine.tiers import TenantPolicy, TierPolicy

TIERS = {"fast": TierPolicy(name="fast", ttft=2.0, tpot=0.5), "slow": TierPolicy(name="slow", max_preemptions=2)}
TENANTS = {"one": TenantPolicy(name="one", max_running=1), "two": TenantPolicy(name="two", max_running=2, weight=2.0)}


def random_request(number: int, now: float, rng: random.Random) -> Request:
    return make_request(
        f"r{number}",
        prompt=range(100 * number, 100 * number + rng.randint(1, 20)),
        max_tokens=rng.randint(1, 12),
        tenant=rng.choice(["one", "two", "free"]),
        lane=rng.choice(["fast", "slow"]),
        priority=rng.randrange(10),
        priority_class=rng.randrange(3),
        arrival=now,
        deadline=rng.choice([None, None, now + rng.randrange(3, 40)]),
        n=rng.choice([1, 1, 2]),
    )


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_every_request_ends_within_its_tenants_limit(name: str, seed: int):
    """Preemption, cancels and deadlines included; the tokens are those of an undisturbed run, cut where it was cut."""
    rng = random.Random(seed)
    waiting = make_policy(name, TIERS, TENANTS, PolicyConfig(age_guard=20.0))
    budget = StepBudget(StepModel(prior=StepCost(0.1, 0.02, 0.0, 0.02)))
    engine = Engine(
        waiting=waiting, prefill_budget=budget, tiers=TIERS, num_blocks=24, num_host_blocks=16, max_num_seqs=5
    )
    requests: dict[str, Request] = {}
    for number in range(80):
        request = random_request(number, engine.now, rng)
        requests[request.request_id] = request
        engine.add(request)
        if rng.random() < 0.1:
            engine.cancel(f"r{rng.randrange(number + 1)}", "cancelled")
        for _ in range(rng.randrange(4)):
            engine.now += rng.choice([0.0, 0.5, 1.0])
            engine.step()
            waiting.check_integrity()
            tenants = [seq.request.tenant for seq in engine.scheduler._running]
            assert tenants.count("one") <= 1
            assert tenants.count("two") <= 2
    for _ in range(1500):
        engine.now += 0.5
        engine.step()
        if not engine.scheduler.has_work:
            break
    assert not engine.scheduler.has_work, "the engine does not come to an end"
    assert len(waiting) == 0
    for request in requests.values():
        alone = Engine(num_blocks=24)
        alone.add(replace(request, request_id="alone", deadline=None, arrival=0.0))
        alone.run()
        for choice in range(request.n):
            tokens = engine.tokens(request.request_id, choice)
            assert engine.finish(request.request_id, choice)
            assert tokens == alone.tokens("alone", choice)[: len(tokens)]


def test_fair_shares_in_the_real_scheduler():
    """Two tenants, weights 1 and 3, with work for the whole run: tokens go 1 to 3, within the VTC bound."""
    tenants = {"light": TenantPolicy(name="light"), "heavy": TenantPolicy(name="heavy", weight=3.0)}
    engine = Engine(waiting=make_policy("composite", tenants=tenants), num_blocks=64, max_num_seqs=4)
    for number in range(400):
        engine.add(
            make_request(
                f"{'light' if number % 2 else 'heavy'}-{number}",
                prompt=range(10 * number, 10 * number + 4),
                tenant="light" if number % 2 else "heavy",
                max_tokens=8,
            )
        )
    for _ in range(450):
        engine.now += 0.01
        engine.step()
    service = dict.fromkeys(tenants, 0.0)
    for number in range(400):
        name = f"{'light' if number % 2 else 'heavy'}-{number}"
        num_tokens = len(engine.tokens(name))
        service[name.split("-")[0]] += 2 * num_tokens + 4 * (num_tokens > 0)
    # 4 seats of 8 output tokens can be charged after a turn, and 4 of the prompt.
    assert abs(service["light"] - service["heavy"] / 3) <= 4 + 2 * 4 * 8
    assert service["light"] > 500
