"""A running engine whose live page is served: real loop, scheduler, snapshots and server; a runner that only sleeps."""

import asyncio
import contextlib
import itertools
import threading
import time
import urllib.request
from collections.abc import AsyncIterator

from schemas.reasons import FinishReason
from schemas.records import End, Timing
from schemas.snapshot import Snapshot
from tests.engine.builders import make_request
from tests.worker.test_health import FakeWatchdog
from worker.config import WorkerConfig
from worker.engine.outputs import SampledToken, StepOutcome, StepPlan
from worker.engine.request import Request
from worker.engine.scheduler import Scheduler, SchedulerConfig
from worker.engine.step_model import StepModel
from worker.health import Health
from worker.health_server import serving_health
from worker.levels import make_queue, tier_policies
from worker.live import live_routes, worker_feed
from worker.loop import EngineLoop
from worker.snapshots import Snapshots

STEP_S = 0.004
_TOKEN = SampledToken(7)
_SETTINGS = WorkerConfig(model="tiny", max_num_seqs=256)
_CLASSES = {name: _SETTINGS.priority_class(tier.default_priority) for name, tier in _SETTINGS.tiers.items()}


class Lane:
    """As much of a KafkaLane as the page shows."""

    def __init__(self) -> None:
        self.assigned = asyncio.Event()
        self.assigned.set()
        self.num_outstanding = 5

    def lags(self) -> dict[int, int]:
        return {0: 2, 7: 1}


class SleepingRunner:
    def execute(self, plan: StepPlan) -> StepOutcome:
        time.sleep(STEP_S)
        return StepOutcome(plan.step, {part.seq_id: _TOKEN for part in plan.scheduled if part.samples})


class Monotonic:
    def now(self) -> float:
        return time.monotonic()


class Showing:
    """`load` keeps so many requests in service; `port` serves the page. With lanes the worker is ready."""

    def __init__(
        self,
        *,
        seats: int = 256,
        blocks: int = 8192,
        preemption: str = "swap",
        name: str = "w1",
        port: int = 0,
        budget: int | None = None,
    ) -> None:
        self.health = Health(stuck_after=30.0)
        self.snapshots = Snapshots(name, "tiny", _SETTINGS.tiers, self.health)
        config = SchedulerConfig(
            num_blocks=blocks,
            num_host_blocks=blocks // 4,
            max_num_seqs=seats,
            max_num_batched_tokens=budget or max(512, seats + 1),
            max_model_len=2048,
            preemption=preemption,
            tiers=tier_policies(_SETTINGS),
        )
        queue = make_queue(_SETTINGS, StepModel())
        self.engine = EngineLoop(Scheduler(config, queue), SleepingRunner(), Monotonic(), self.snapshots.observe)
        self.port = port
        self.tasks: asyncio.TaskGroup
        self._numbers = itertools.count()

    def request(self, tier: str, *, prompt: int = 40, max_tokens: int = 400, name: str | None = None) -> Request:
        number = next(self._numbers)
        return make_request(
            f"{name or f'{tier}-{number}'}#{number}",
            prompt=(1000 + number, *range(1, prompt)),  # none shares a prefix
            max_tokens=max_tokens,
            ignore_eos=True,
            lane=tier,
            tenant=("acme", "globex", "initech")[number % 3],
            priority=_SETTINGS.tiers[tier].default_priority,
            priority_class=_CLASSES[tier],
            arrival=time.monotonic(),
        )

    def serve(self, request: Request) -> asyncio.Task[None]:
        """Adds it, and tells the snapshots when it has ended."""
        return self.tasks.create_task(self._serve(request))

    async def _serve(self, request: Request) -> None:
        stream = self.engine.add(request)
        while not stream.finished:
            await stream.take()
        assert stream.first_token_at is not None
        ttft, total = stream.first_token_at - request.arrival, time.monotonic() - request.arrival
        end = End(0, FinishReason.LENGTH, timing=Timing(0.0, ttft * 1000, total * 1000))
        self.snapshots.finished(request.lane, end, (total - ttft) / request.max_tokens)

    async def load(self, batch: int, interactive: int) -> None:
        """`batch` long requests at once, then `interactive` short ones, which displace them; for ever."""

        async def one_after_another(tier: str, max_tokens: int) -> None:
            while True:
                await self.serve(self.request(tier, max_tokens=max_tokens))

        for _ in range(batch):
            self.tasks.create_task(one_after_another("batch", 600))
        await self.steps(20)
        for i in range(interactive):
            self.tasks.create_task(one_after_another(("interactive", "standard")[i % 2], 60))

    async def steps(self, number: int) -> None:
        """Waits for so many more steps."""
        end = (self.snapshots._steps[-1].step if self.snapshots._steps else 0) + number
        async with asyncio.timeout(60):
            while not self.snapshots._steps or self.snapshots._steps[-1].step < end:
                await asyncio.sleep(STEP_S)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Showing"]:
        with serving_health(
            self.health,
            "127.0.0.1",
            self.port,
            live_routes(worker_feed(self.snapshots, self.health, asyncio.get_running_loop())),
        ) as self.port:
            self.health.model_loaded(self.engine)
            self.health.consuming({tier: Lane() for tier in _SETTINGS.tiers}, FakeWatchdog())  # type: ignore[arg-type]
            async with asyncio.TaskGroup() as self.tasks:
                self.tasks.create_task(self.health.monitor.run())
                self.tasks.create_task(self.engine.run())
                yield self
                for task in list(self.tasks._tasks):
                    task.cancel()


class Viewer:
    """Reads `/events` in a thread, as a browser does; remembers what came, and when."""

    def __init__(self, port: int, worker: int = 0) -> None:
        self.seen: list[tuple[float, Snapshot]] = []
        self.away: list[str] = []
        self.ended = False
        self._response = urllib.request.urlopen(f"http://127.0.0.1:{port}/events?worker={worker}", timeout=30)
        assert self._response.headers["content-type"].startswith("text/event-stream")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        event = "message"
        with self._response, contextlib.suppress(OSError):
            for line in self._response:
                if line.startswith(b"event: "):
                    event = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    data = line[6:].strip()
                    if event == "away":
                        self.away.append(data.decode())
                    else:
                        self.seen.append((time.monotonic(), Snapshot.decode(data)))
                    event = "message"
        self.ended = True

    def join(self) -> None:
        self._thread.join(10)
