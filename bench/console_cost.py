"""What viewers of the live page cost a worker: CPU seconds a step with and without them, in turns.

    python -m bench.console_cost --seats 256 --blocks 8192 --viewers 3

A real engine (the tiny model, torch) serves requests that come and go, so that all seats are taken; the page is served
from its thread, and the viewers read its events from a process of their own. The CPU seconds are those of the whole
worker process. The goal: at most 1 % more with three viewers.
"""

import argparse
import asyncio
import contextlib
import itertools
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator

from bench.machine import OtherLoad
from worker import model as _model  # noqa: F401  before worker.start: it makes settings for torch
from worker.app import MonotonicClock
from worker.config import WorkerConfig
from worker.engine.fakes import ByteDetokenizer
from worker.engine.outputs import SamplingParams
from worker.engine.request import Request
from worker.health import Health
from worker.health_server import serving_health
from worker.live import live_routes, worker_feed
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
        routes = live_routes(worker_feed(self.snapshots, self.health, asyncio.get_running_loop()))
        with serving_health(self.health, "127.0.0.1", 0, routes) as port:
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

    async def cpu_per_step(self, seconds: float) -> float:
        """CPU seconds of this process per step."""
        await asyncio.sleep(SETTLE_S)
        cpu, steps = time.process_time(), self.num_steps
        await asyncio.sleep(seconds)
        return (time.process_time() - cpu) / (self.num_steps - steps)


@contextlib.contextmanager
def viewers(port: int, number: int) -> Iterator[None]:
    """So many readers of the events, in a process of their own."""
    child = subprocess.Popen([sys.executable, "-m", "bench.console_cost", "--view", f"{port} {number}"])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def view(port: int, number: int) -> None:
    """Reads for ever."""

    def read() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/events") as response:
            while response.read(65536):
                pass

    threads = [threading.Thread(target=read) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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
    pairs = []
    async with bench.running() as port:
        await bench.cpu_per_step(arguments.seconds)  # warm-up
        for _ in range(arguments.repeats):
            alone = await bench.cpu_per_step(arguments.seconds)
            taken = bench.snapshots.num_taken
            with viewers(port, arguments.viewers):
                watched = await bench.cpu_per_step(arguments.seconds)
            assert bench.snapshots.num_taken > taken, "nobody looked"
            pairs.append((alone, watched))
            print(f"alone {alone * 1e3:.3f} ms, with viewers {watched * 1e3:.3f} ms: {watched / alone - 1:+.2%}")
    more = statistics.median(watched / alone - 1 for alone, watched in pairs)
    print(f"{arguments.viewers} viewers: {more:+.2%} CPU seconds a step (median of {len(pairs)}); goal: at most +1 %")
    print(f"{bench.num_steps} steps; other programs used {other.cores():.2f} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seats", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--viewers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each part")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--view", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.view:
        port, number = map(int, arguments.view.split())
        view(port, number)
        return
    asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
