"""What viewers of the live page cost a worker: CPU seconds a step with and without them, in turns.

    python -m bench.console_cost --seats 256 --blocks 8192 --viewers 3

A real engine (the tiny model, torch) serves requests that come and go, so that all seats are taken; the page is served
from its thread, and the viewers read its events from a process of their own. The CPU seconds are those of the whole
worker process. The goal: at most 1 % more with three viewers. The difference of two runs is noisy on a busy machine, so
that the part is also shown which the page's thread and the taking of snapshots had of all CPU seconds, and what one
snapshot costs with all its viewers (Linux): that times four a second is the page's share of a core, whoever else runs.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

from bench.machine import OtherLoad
from schemas.snapshot import Snapshot
from worker import model as _model  # noqa: F401  before worker.start: it makes settings for torch
from worker.app import MonotonicClock
from worker.config import WorkerConfig
from worker.engine.fakes import ByteDetokenizer
from worker.engine.outputs import SamplingParams
from worker.engine.request import Request
from worker.health import Health
from worker.health_server import serving_health
from worker.live import SHARE, Feed, live_routes, worker_feed
from worker.loop import EngineLoop
from worker.snapshots import Snapshots
from worker.start import build

PROMPT, OUTPUT = 32, 96  # tokens; the answers' lengths differ, so that seats come free one by one
SETTLE_S = 1.0


class Bench:
    """The engine under load, and its page."""

    def __init__(self, config: WorkerConfig) -> None:
        _, runner, scheduler, step_model, _ = build(config)
        self._config = config
        self.health = Health(stuck_after=60.0)
        self.snapshots = Snapshots(config.worker, config.model, config.tiers, self.health)
        self.num_steps = 0
        self.engine = EngineLoop(scheduler, runner, MonotonicClock(), self._observe, step_model)
        self.health.model_loaded(self.engine)
        self._numbers = itertools.count()
        self._taking = 0.0  # CPU seconds
        self._take = self.snapshots.take
        self.snapshots.take = self._timed_take  # type: ignore[method-assign]

    def _timed_take(self) -> Snapshot | None:
        began = time.thread_time()
        snapshot = self._take()
        self._taking += time.thread_time() - began
        return snapshot

    @property
    def page_seconds(self) -> float:
        """CPU seconds that the page has cost so far."""
        (server,) = (thread for thread in threading.enumerate() if thread.name == "health")
        stat = Path(f"/proc/self/task/{server.native_id}/schedstat")
        return self._taking + (int(stat.read_text().split()[0]) / 1e9 if stat.exists() else math.nan)

    def _observe(self, record: object) -> None:
        self.num_steps += 1
        self.snapshots.observe(record)  # type: ignore[arg-type]

    async def serve(self) -> None:
        """One request after another."""
        while True:
            number = next(self._numbers)
            tier = list(self._config.tiers)[number % len(self._config.tiers)]
            request = Request(
                request_id=f"r{number}",
                prompt_token_ids=tuple((number * 31 + i) % 200 + 1 for i in range(PROMPT)),
                sampling=SamplingParams(temperature=0.0),
                max_tokens=OUTPUT // 2 + number * 7 % OUTPUT,
                eos_token_ids=(),
                stop_token_ids=(),
                stop=(),
                ignore_eos=True,
                n=1,
                lane=tier,
                tenant="default",
                priority=4,
                arrival=time.monotonic(),
                deadline=None,
                new_detokenizer=ByteDetokenizer,
            )
            stream = self.engine.add(request)
            while not stream.finished:
                await stream.take()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        """Yields the port of the page."""
        self.feed = worker_feed(self.snapshots, self.health, asyncio.get_running_loop())
        with serving_health(self.health, "127.0.0.1", 0, live_routes(self.feed)) as port:
            tasks = [asyncio.create_task(self.serve()) for _ in range(self._config.max_num_seqs + 8)]
            tasks.append(asyncio.create_task(self.engine.run()))
            try:
                yield port
            finally:
                self.engine.stop()
                await tasks.pop()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def cpu_per_step(self, seconds: float) -> tuple[float, float]:
        """CPU seconds of this process per step, and the page's part of them."""
        await asyncio.sleep(SETTLE_S)
        cpu, page, steps = time.process_time(), self.page_seconds, self.num_steps
        await asyncio.sleep(seconds)
        cpu = time.process_time() - cpu
        return cpu / (self.num_steps - steps), (self.page_seconds - page) / cpu


@contextlib.asynccontextmanager
async def viewers(feed: Feed, port: int, number: int) -> AsyncIterator[None]:
    """So many readers of the events, in a process of their own."""
    child = subprocess.Popen([sys.executable, "-m", "bench.viewers", str(port), str(number)])
    try:
        while feed.num_viewers < number:
            await asyncio.sleep(0.05)
        yield
    finally:
        child.kill()
        child.wait()
    while feed.num_viewers:
        await asyncio.sleep(0.05)


async def measure(arguments: argparse.Namespace) -> None:
    config = WorkerConfig(
        model="tiny",
        max_num_seqs=arguments.seats,
        num_blocks=arguments.blocks,
        max_num_batched_tokens=max(512, arguments.seats),
        num_threads=arguments.threads,
        log_level="warning",
    )
    bench, other = Bench(config), OtherLoad()
    ratios, parts, page, taken = [], [], 0.0, 0
    async with bench.running() as port:
        await bench.cpu_per_step(arguments.seconds)  # warm-up
        for _ in range(arguments.repeats):
            alone, _ = await bench.cpu_per_step(arguments.seconds)
            async with viewers(bench.feed, port, arguments.viewers):
                page, taken = page - bench.page_seconds, taken - bench.snapshots.num_taken
                watched, part = await bench.cpu_per_step(arguments.seconds)
                page, taken = page + bench.page_seconds, taken + bench.snapshots.num_taken
            ratios.append(watched / alone - 1)
            parts.append(part)
            print(f"alone {alone * 1e3:.3f} ms, watched {watched * 1e3:.3f} ms: {ratios[-1]:+.2%}; page {part:.2%}")
    more, part = statistics.median(ratios), statistics.median(parts)
    print(f"{arguments.viewers} viewers: {more:+.2%} CPU seconds a step (median of {len(ratios)}); goal: at most +1 %")
    each = page / taken
    print(f"the page's part of all CPU seconds: {part:.2%}")
    print(f"a snapshot, with all its viewers: {each * 1e3:.2f} ms of CPU; paced at {SHARE:.1%} of a core")
    print(f"{bench.num_steps} steps; other programs used {other.cores():.2f} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seats", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--viewers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each part")
    parser.add_argument("--repeats", type=int, default=5)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
