"""Whether the worker lives (it makes progress) and is ready (it takes requests). Read by other threads than the loop's.

A worker whose Kafka is away lives: starting it again would help nobody, and cost a warm model.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from worker.loop import EngineLoop
from worker.transport.kafka_lane import KafkaLane
from worker.watchdog import LaneWatchdog

BEAT_S = 0.1
WARN_LAG_S = 0.25  # design.md 1: nothing on the loop may run long
WARN_EVERY_S = 30.0
WORST_OF_S = 60.0

log = structlog.get_logger(__name__)


class PortUnavailable(Exception):
    """The health port cannot be had; the message says what to do."""


class LoopMonitor:
    """Measures how late the event loop is. Times are time.monotonic(), which is the loop's clock, too."""

    def __init__(self) -> None:
        self.beat_at: float | None = None  # None: the loop has not begun to work
        self.lag = 0.0  # seconds, at the last beat
        self._lags: deque[tuple[float, float]] = deque()  # (when, lag), the lags falling
        self._warned_at = -WARN_EVERY_S
        self.tell: Callable[[float], None] = lambda lag: None  # called with every lag

    @property
    def worst_lag(self) -> float:
        """Seconds, of the last minute."""
        lags = self._lags
        try:
            return lags[0][1]
        except IndexError:
            return 0.0

    async def run(self) -> None:
        self.beat_at = time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now = time.monotonic()
            self.observe(now, max(0.0, now - self.beat_at - BEAT_S))

    def observe(self, now: float, lag: float) -> None:
        """A beat at `now` that came `lag` seconds late."""
        while self._lags and self._lags[-1][1] <= lag:
            self._lags.pop()
        self._lags.append((now, lag))
        while self._lags[0][0] < now - WORST_OF_S:
            self._lags.popleft()
        self.beat_at, self.lag = now, lag
        self.tell(lag)
        if lag > WARN_LAG_S and now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            log.warning("loop.lag", seconds=round(lag, 3), meaning="something has held the event loop up")


class Health:
    """What is known of the worker's state; the worker tells it what there is to look at.

    Args:
        stuck_after: seconds without progress that are too many.
    """

    def __init__(self, stuck_after: float) -> None:
        self._stuck_after = stuck_after
        self.monitor = LoopMonitor()
        self.draining = False
        self._engine: EngineLoop | None = None
        self._lanes: Mapping[str, KafkaLane] = {}
        self._watchdog: LaneWatchdog | None = None

    def model_loaded(self, engine: EngineLoop) -> None:
        self._engine = engine

    def consuming(self, lanes: Mapping[str, KafkaLane], watchdog: LaneWatchdog) -> None:
        self._lanes, self._watchdog = lanes, watchdog

    @property
    def engine(self) -> EngineLoop | None:
        """None until the model is loaded."""
        return self._engine

    @property
    def lanes(self) -> Mapping[str, KafkaLane]:
        return self._lanes

    def stuck(self) -> list[str]:
        """Why the process should be started again; empty while it makes progress."""
        now, limit = time.monotonic(), self._stuck_after
        reasons = []
        if self.monitor.beat_at is not None and now - self.monitor.beat_at > limit:
            reasons.append(f"the event loop has not run for {now - self.monitor.beat_at:.0f} s")
        if (step := self._step_seconds()) > limit:
            reasons.append(f"a step has been running for {step:.0f} s")
        watchdog = self._watchdog
        if watchdog is None or self.draining:
            return reasons
        silences = {tier: watchdog.silence(tier, now) for tier in self._lanes}
        patience = watchdog.silence_limit + limit  # the watchdog's time to act comes first
        dead = {tier: silence for tier, silence in silences.items() if silence > patience}
        return reasons + [f"lane {tier} has not been polled for {silence:.0f} s" for tier, silence in dead.items()]

    def not_ready(self) -> list[str]:
        """Why it takes no requests; empty when it does."""
        if self.draining:
            return ["draining"]
        if self._engine is None:
            return ["the model is being loaded"]
        if not self._lanes:
            return ["no lane is consumed yet"]
        waiting = [tier for tier, lane in self._lanes.items() if not lane.assigned.is_set()]
        return [f"lane {tier} waits for its partitions" for tier in waiting] + self.stuck()

    def figures(self) -> dict[str, Any]:
        """What /livez and /readyz tell beside their verdict."""
        now, watchdog = time.monotonic(), self._watchdog
        return {
            "loop_lag_ms": round(self.monitor.lag * 1000, 1),
            "worst_loop_lag_ms": round(self.monitor.worst_lag * 1000, 1),
            "step_s": round(self._step_seconds(), 3),
            "lanes": {
                tier: {
                    "assigned": lane.assigned.is_set(),
                    "outstanding": lane.num_outstanding,
                    "silent_s": round(watchdog.silence(tier, now), 1) if watchdog else None,
                }
                for tier, lane in list(self._lanes.items())
            },
        }

    def _step_seconds(self) -> float:
        """How long the step in flight has been running."""
        return 0.0 if self._engine is None else self._engine.step_seconds
