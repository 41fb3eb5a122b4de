"""A model that fails for a moment: a step is tried again, at most three times; no deadline moves (protocol.md 7)."""

import pytest

from schemas.reasons import FinishReason
from tests.worker.world import World
from worker import loop
from worker.engine.outputs import StepOutcome, StepPlan


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> tuple[float, ...]:
    """As many as in production, without the waiting."""
    monkeypatch.setattr(loop, "RETRY_PAUSES_S", (0.0,) * len(loop.RETRY_PAUSES_S))
    return loop.RETRY_PAUSES_S


def fail(server, step: int, times: int, also=lambda: None) -> list[int]:
    """Lets the runner fail at a step so many times; returns a list that gets every step it is called for."""
    called, execute = [], server.runner.execute

    def failing(plan: StepPlan) -> StepOutcome:
        called.append(plan.step)
        if plan.step == step and called.count(step) <= times:
            also()
            raise RuntimeError("the model broke")
        return execute(plan)

    server.runner.execute = failing
    return called


async def test_a_passing_failure_is_invisible():
    """Three failures of one step, and the answer equals that of a calm world."""
    calm = World()
    calm.publish("a")
    async with calm.worker() as server:
        await calm.serve(server)
    world = World()
    world.publish("a")
    async with world.worker() as server:
        called = fail(server, step=3, times=3)
        await world.serve(server)
    assert called.count(3) == 4
    assert world.answer("a").token_ids == calm.answer("a").token_ids
    assert world.answer("a").end.finish_reason is FinishReason.LENGTH


async def test_there_are_three_retries():
    """The fourth failure is final: `internal`, and the engine goes on to other work."""
    world = World()
    world.publish("a")
    async with world.worker() as server:
        called = fail(server, step=3, times=4)
        await world.serve(server)
        assert called.count(3) == 4
        world.publish("b")
        await world.serve(server)
    assert world.answer("a").end.error.code == "internal"
    assert world.answer("b").end.finish_reason is FinishReason.LENGTH


async def test_the_deadline_stays_where_it_was():
    """It passes while the step is tried again: the request ends with `deadline` and the tokens that it has."""
    world = World()

    def pass_time() -> None:
        world.clock.seconds = 60.0

    world.publish("a", headers=[("deadline_ms", b"50000")])
    async with world.worker() as server:
        fail(server, step=4, times=1, also=pass_time)
        await world.serve(server)
    answer = world.answer("a")
    assert answer.end.finish_reason is FinishReason.DEADLINE
    assert 0 < len(answer.token_ids[0]) < 12
