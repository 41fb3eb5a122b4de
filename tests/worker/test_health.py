"""Whether the worker lives and is ready, and that it tells so over HTTP when its loop cannot."""

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.builders import make_request
from tests.worker.world import VOCAB, StepRunner
from worker.engine.outputs import StepOutcome, StepPlan
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.health import Health, LoopMonitor, PortUnavailable
from worker.health_server import serving_health
from worker.loop import EngineLoop

LIMIT_S = 30
CONFIG = SchedulerConfig(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


class Monotonic:
    def now(self) -> float:
        return time.monotonic()


class FakeLane:
    def __init__(self) -> None:
        self.assigned = asyncio.Event()
        self.num_outstanding = 3


class FakeWatchdog:
    silence_limit = 5.0
    seconds = 0.0

    def silence(self, tier: str, now: float) -> float:
        return self.seconds


class StuckRunner(StepRunner):
    """A step that ends only when it is told to."""

    def __init__(self) -> None:
        super().__init__(CONFIG, VOCAB)
        self.go_on = threading.Event()

    def execute(self, plan: StepPlan) -> StepOutcome:
        assert self.go_on.wait(LIMIT_S)
        return super().execute(plan)


def get(port: int, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=LIMIT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def until(condition: Callable[[], bool]) -> None:
    """Asks again and again, and holds this thread up: the event loop, if it is the loop's."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end


def engine(runner: StepRunner | None = None) -> EngineLoop:
    return EngineLoop(Scheduler(CONFIG), runner or StepRunner(CONFIG, VOCAB), Monotonic())


def test_ready_means_model_and_partitions():
    """Loading, then consuming nothing, then waiting for partitions, then ready, then draining."""
    health, lane = Health(stuck_after=10.0), FakeLane()
    assert health.not_ready() == ["the model is being loaded"]
    health.model_loaded(engine())
    assert health.not_ready() == ["no lane is consumed yet"]
    health.consuming({"batch": lane}, FakeWatchdog())
    assert health.not_ready() == ["lane batch waits for its partitions"]
    lane.assigned.set()
    assert health.not_ready() == []
    health.draining = True
    assert health.not_ready() == ["draining"]
    assert health.stuck() == []


def test_t03_a_lane_that_is_polled_no_more_turns_livez_red():
    """The watchdog replaces a consumer first; if that does not help either, the process must go. Not while draining."""
    health, watchdog = Health(stuck_after=10.0), FakeWatchdog()
    health.model_loaded(engine())
    health.consuming({"batch": FakeLane()}, watchdog)
    watchdog.seconds = 14.9
    assert health.stuck() == []
    watchdog.seconds = 15.1
    assert health.stuck() == ["lane batch has not been polled for 15 s"]
    assert health.figures()["lanes"]["batch"] == {"assigned": False, "outstanding": 3, "silent_s": 15.1}
    with serving_health(health, "127.0.0.1", 0) as port:
        status, body = get(port, "/livez")
        assert (status, body["reasons"]) == (503, health.stuck())
        health.draining = True
        assert health.stuck() == []
        assert get(port, "/livez")[0] == 200


async def test_a_blocked_event_loop_turns_livez_red():
    """The answer comes from another thread, while the loop's is held up by this very test."""
    health = Health(stuck_after=0.3)
    beating = asyncio.create_task(health.monitor.run())
    while health.monitor.beat_at is None:
        await asyncio.sleep(0)
    with serving_health(health, "127.0.0.1", 0) as port:
        until(lambda: get(port, "/livez")[0] == 503)
        _, body = get(port, "/livez")
        assert body["reasons"][0].startswith("the event loop has not run for")
        while get(port, "/livez")[0] != 200:
            await asyncio.sleep(0.01)  # the loop runs again
        assert get(port, "/livez")[1]["worst_loop_lag_ms"] >= 200
    beating.cancel()


async def test_a_stuck_step_turns_livez_red():
    """The event loop runs on, so only the step's own time tells."""
    runner = StuckRunner()
    loop_of_steps, health = engine(runner), Health(stuck_after=0.2)
    health.model_loaded(loop_of_steps)
    running = asyncio.create_task(loop_of_steps.run())
    with serving_health(health, "127.0.0.1", 0) as port:
        assert get(port, "/livez")[0] == 200
        stream = loop_of_steps.add(make_request("a", max_tokens=2))
        async with asyncio.timeout(LIMIT_S):
            while (await asyncio.to_thread(get, port, "/livez"))[0] != 503:
                pass
            assert (await asyncio.to_thread(get, port, "/livez"))[1]["reasons"][0].startswith("a step has been running")
            runner.go_on.set()
            while not stream.finished:
                await stream.take()
        assert get(port, "/livez")[0] == 200
    loop_of_steps.stop()
    await running


def test_a_step_may_end_while_its_seconds_are_asked_for():
    """/livez answers from a thread of its own: between two looks the loop may have ended the step."""

    class Ending(EngineLoop):
        looks = iter([time.monotonic() - 5.0])

        @property
        def step_began(self) -> float | None:
            return next(self.looks, None)

        @step_began.setter
        def step_began(self, began: float | None) -> None:
            pass

    health = Health(stuck_after=1.0)
    health.model_loaded(Ending(Scheduler(CONFIG), StepRunner(CONFIG, VOCAB), Monotonic()))
    assert health.stuck() == ["a step has been running for 5 s"]
    assert health.stuck() == []


def test_a_taken_port_is_a_sentence():
    """It names the flag."""
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(PortUnavailable, match=r"--metrics-port .* cannot be had: address already in use\. Give another"),
        serving_health(Health(1.0), "127.0.0.1", taken.getsockname()[1]),
    ):
        pass


def test_more_routes_can_be_served():
    """/metrics will be one."""
    from starlette.requests import Request as HttpRequest
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def answer(request: HttpRequest) -> JSONResponse:
        return JSONResponse({"hello": "world"})

    with serving_health(Health(1.0), "127.0.0.1", 0, [Route("/metrics", answer)]) as port:
        assert get(port, "/metrics") == (200, {"hello": "world"})
        assert get(port, "/readyz")[0] == 503


def test_the_worst_lag_is_that_of_the_last_minute():
    """Larger lags replace smaller ones before them, and none is remembered for longer than a minute."""
    monitor = LoopMonitor()
    assert monitor.worst_lag == 0.0
    for now, lag, worst in [
        (0, 0.1, 0.1),
        (1, 0.05, 0.1),
        (2, 0.2, 0.2),
        (30, 0.01, 0.2),
        (61.9, 0.0, 0.2),
        (63, 0, 0.01),
    ]:
        monitor.observe(now, lag)
        assert monitor.worst_lag == worst
