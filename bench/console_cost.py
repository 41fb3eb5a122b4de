"""What viewers of the live page cost a worker: CPU seconds a step with and without them, in turns.

    python -m bench.console_cost --seats 256 --blocks 8192 --viewers 3

A real engine (the tiny model, torch) serves requests that come and go, so that all seats are taken; the page is served
from its thread, and the viewers read its events from a process of their own, which connects and leaves when told. The
CPU seconds are those of the whole worker process. The goal: at most 1 % more with three viewers.

A round is many short turns, there and back (alone watched watched alone, then the other way round, and so on), and its
figure is CPU seconds by steps over all its turns of a kind, so that what drifts slowly falls on both. The figure is
the median of the rounds; their range is shown.

Why a turn is long enough, and hides nothing: snapshots are paced, at most worker.live.MAX_PERIOD_S (1 s) apart, mostly
0.25 to 0.5 s. A turn is at least 2.5 of the longest periods, and a watched one begins and ends with a snapshot: it has
whole periods, each with its snapshot, its encoding and its sending. It begins only after SETTLED snapshots, when what
connecting costs does no longer stretch the pace: a period that was stretched would have less of the page in it. All
turns begin and end with a step, so that no part of a step's CPU time is counted without the step.

The part is also shown which the page's thread and the taking of snapshots had of all CPU seconds, and what one
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
from typing import NamedTuple

from bench.machine import OtherLoad
from bench.requests import greedy_request
from bench.turns import palindromes
from schemas.snapshot import Snapshot
from worker import model as _model  # noqa: F401  before worker.start: it makes settings for torch
from worker.app import MonotonicClock
from worker.config import WorkerConfig
from worker.engine.fakes import ByteDetokenizer
from worker.health import Health
from worker.health_server import serving_health
from worker.live import SHARE, live_routes, worker_feed
from worker.loop import EngineLoop
from worker.snapshots import Snapshots
from worker.start import build

PROMPT, OUTPUT = 32, 96  # tokens; the answers' lengths differ, so that seats come free one by one
SETTLED = 3  # snapshots: the first comes at once, the second's pace has the connecting in it
LIMIT_S = 60.0  # for whatever is waited for


class Figures(NamedTuple):
    """Sums since the start, when a step had just ended; or between two such times."""

    cpu: float  # seconds, of this process
    page: float  # the page's part of them
    num_steps: int
    num_snapshots: int

    def __sub__(self, other: "Figures") -> "Figures":
        return Figures(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    def __add__(self, other: tuple[object, ...]) -> "Figures":
        return Figures(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


NOTHING = Figures(0.0, 0.0, 0, 0)


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
        self._step_ended: asyncio.Future[Figures] | None = None
        self._taken: asyncio.Future[None] | None = None

    def _timed_take(self) -> Snapshot | None:
        began = time.thread_time()
        snapshot = self._take()
        self._taking += time.thread_time() - began
        if self._taken is not None:
            self._taken, taken = None, self._taken
            taken.set_result(None)
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
        if self._step_ended is not None:
            self._step_ended, ended = None, self._step_ended
            ended.set_result(Figures(time.process_time(), self.page_seconds, self.num_steps, self.snapshots.num_taken))

    async def figures(self) -> Figures:
        """When the next step ends."""
        self._step_ended = asyncio.get_running_loop().create_future()
        return await asyncio.wait_for(self._step_ended, LIMIT_S)

    async def snapshot(self) -> None:
        """The next one has been taken: somebody looks on."""
        self._taken = asyncio.get_running_loop().create_future()
        await asyncio.wait_for(self._taken, LIMIT_S)

    async def serve(self) -> None:
        """One request after another."""
        while True:
            number = next(self._numbers)
            tier = list(self._config.tiers)[number % len(self._config.tiers)]
            length, seats = OUTPUT // 2 + number * 7 % OUTPUT, self._config.max_num_seqs
            if number < seats:  # as if it had begun before: else all of them end about together, wave after wave
                length = 1 + length * (number * 37 % seats) // seats
            request = greedy_request(
                f"r{number}",
                [(number * 31 + i) % 200 + 1 for i in range(PROMPT)],
                length,
                new_detokenizer=ByteDetokenizer,
                lane=tier,
                arrival=time.monotonic(),
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

    async def turn(self, seconds: float, watched: bool) -> Figures:
        """What at least so many seconds cost; from one snapshot to another, if they are made."""
        if watched:
            await self.snapshot()
        before = await self.figures()
        await asyncio.sleep(seconds)
        if watched:
            await self.snapshot()
        return await self.figures() - before


class Viewers:
    """Readers of the events in a process of their own, which is there all the time; they connect and leave."""

    def __init__(self, bench: Bench, port: int, number: int) -> None:
        self._bench = bench
        self._number = number
        command = [sys.executable, "-m", "bench.viewers", str(port), str(number)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, bufsize=1)
        self._open = False

    async def be(self, watched: bool) -> None:
        """All look on, or none. Returns when it has settled."""
        if watched == self._open:
            return
        self._open = watched
        assert self._child.stdin is not None
        print("open" if watched else "close", file=self._child.stdin)
        async with asyncio.timeout(LIMIT_S):
            while self._bench.feed.num_viewers != (self._number if watched else 0):
                await asyncio.sleep(0.02)
        for _ in range(SETTLED if watched else 0):
            await self._bench.snapshot()

    def end(self) -> None:
        self._child.kill()
        self._child.wait()


async def one_round(bench: Bench, viewers: Viewers, num_palindromes: int, seconds: float) -> dict[bool, Figures]:
    """What was counted over all turns: watched -> figures."""
    sums = {False: NOTHING, True: NOTHING}
    for watched in palindromes((False, True), num_palindromes):
        await viewers.be(watched)
        sums[watched] += await bench.turn(seconds, watched)
    return sums


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
    ratios, parts, all_watched = [], [], NOTHING
    async with bench.running() as port:
        viewers = Viewers(bench, port, arguments.viewers)
        try:
            await bench.turn(arguments.warm_up, watched=False)
            for _ in range(arguments.rounds):
                sums = await one_round(bench, viewers, arguments.palindromes, arguments.seconds)
                alone, watched = (sums[key].cpu / sums[key].num_steps for key in (False, True))
                all_watched += sums[True]
                ratios.append(watched / alone - 1)
                parts.append(sums[True].page / sums[True].cpu)
                times = f"alone {alone * 1e3:.3f} ms, watched {watched * 1e3:.3f} ms"
                steps = f"{sums[False].num_steps} and {sums[True].num_steps} steps"
                print(f"{times}: {ratios[-1]:+.2%}; page {parts[-1]:.2%}; {steps}", flush=True)
        finally:
            viewers.end()
    more, part = statistics.median(ratios), statistics.median(parts)
    rounds = f"median of {len(ratios)}, {min(ratios):+.2%} .. {max(ratios):+.2%}"
    print(f"{arguments.viewers} viewers: {more:+.2%} CPU seconds a step ({rounds}); goal: at most +1 %")
    each = all_watched.page / all_watched.num_snapshots
    print(f"the page's part of all CPU seconds: {part:.2%}")
    paced = f"{all_watched.num_snapshots} of them, paced at {SHARE:.1%} of a core"
    print(f"a snapshot, with all its viewers: {each * 1e3:.2f} ms of CPU; {paced}")
    print(f"{bench.num_steps} steps; other programs used {other.cores():.2f} cores")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seats", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8192)
    parser.add_argument("--viewers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each turn, at least")
    parser.add_argument("--palindromes", type=int, default=3, help="of each round: two turns of each kind")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=float, default=12.0, help="seconds")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
