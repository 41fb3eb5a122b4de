"""Several workers, and how many of them a promise needs."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.sim.levels import Levels
from worker.sim.profile import Profile
from worker.sim.replay import NewEngine, SimulatedWorker, WorkerRun
from worker.sim.summary import percentile
from worker.sim.trace import Arrival

MAX_WORKERS = 1024


class SloNotMet(Exception):
    """No number of workers keeps all promises."""


@dataclass(frozen=True, slots=True)
class Slo:
    """A promise to one tier: nothing of it is refused or expires, and its p99 stays within the targets (seconds)."""

    tier: str
    ttft: float | None = None
    tpot: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """`TIER:ttft=SECONDS,tpot=SECONDS`, one of the two or both. Raises ValueError."""
        tier, _, targets = text.partition(":")
        try:
            pairs = [target.split("=") for target in targets.split(",")]
            given = {name.strip(): float(value) for name, value in pairs}
        except ValueError:
            given = {}
        is_sound = all(name in ("ttft", "tpot") and 0 < value < math.inf for name, value in given.items())
        if not tier or not given or not is_sound:
            raise ValueError(f"an SLO is TIER:ttft=SECONDS,tpot=SECONDS, above 0, got {text!r}")
        return cls(tier, **given)

    def is_met(self, runs: Sequence[WorkerRun]) -> bool:
        served = [s for run in runs for s in run.served if s.tier == self.tier]
        if not all(s.is_finished for s in served):
            return False
        ttft = percentile((s.ttft for s in served if s.ttft is not None), 0.99)
        tpot = percentile((s.tpot for s in served if s.tpot is not None), 0.99)
        return _within(ttft, self.ttft) and _within(tpot, self.tpot)


def _within(value: float | None, target: float | None) -> bool:
    return target is None or value is None or value <= target


def run_fleet(
    arrivals: Sequence[Arrival], num_workers: int, profile: Profile, levels: Levels, new: NewEngine, seed: int
) -> list[WorkerRun]:
    """Spreads requests over workers at random, as a producer without keys spreads them over partitions."""
    rng = random.Random(seed)
    shares: list[list[Arrival]] = [[] for _ in range(num_workers)]
    for arrival in arrivals:
        shares[rng.randrange(num_workers)].append(arrival)
    runs: list[WorkerRun] = []
    for share in shares:
        scheduler, admission, step_model = new(profile, levels)
        admission.share(1 / num_workers, 0.0)  # limits are of the deployment
        runs.append(SimulatedWorker(profile, levels, scheduler, admission, step_model).run(share))
    return runs


def fewest_workers(run: Callable[[int], list[WorkerRun]], slos: Sequence[Slo]) -> tuple[int, list[WorkerRun]]:
    """The smallest number of workers that keeps all promises, and what they do; `run` simulates a number of them.

    Doubles until it is enough, then halves the interval: that more workers are never worse is taken for granted.
    Raises SloNotMet when MAX_WORKERS are not enough: a request alone is too slow, or never fits.
    """
    too_few, enough = 0, 1
    while not _all_met(runs := run(enough), slos):
        if enough >= MAX_WORKERS:
            raise SloNotMet(f"{MAX_WORKERS} workers do not meet it either: a single request takes too long")
        too_few, enough = enough, enough * 2
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        tried = run(middle)
        if _all_met(tried, slos):
            enough, runs = middle, tried
        else:
            too_few = middle
    return enough, runs


def _all_met(runs: Sequence[WorkerRun], slos: Sequence[Slo]) -> bool:
    return all(slo.is_met(runs) for slo in slos)
