"""A planner's question, from its options to its answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.engine.policies import DEFAULT_POLICY
from worker.sim.fleet import Slo, SloNotMet, fewest_workers, run_fleet
from worker.sim.levels import BUILT_IN, Levels, load_levels, with_unknown_tiers
from worker.sim.new_engine import engine_factory
from worker.sim.picture import draw
from worker.sim.profile import load_profile
from worker.sim.replay import WorkerRun
from worker.sim.summary import summarise
from worker.sim.trace import Arrival, read_trace

__all__ = ["Answer", "Question", "SloNotMet", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to simulate; the meaning of each field is that of the option of `carousel simulate`."""

    trace: Path
    profile: str = "h200"
    policy: str = DEFAULT_POLICY
    tiers: Path | None = None
    rate: float = 1.0
    limit: int | None = None
    seed: int = 0
    workers: int = 1
    slos: tuple[str, ...] = ()  # not empty: `workers` is searched for


@dataclass(frozen=True, slots=True)
class Answer:
    """The figures (summary.summarise), and the picture as an SVG document."""

    figures: dict[str, Any]
    runs: list[WorkerRun]
    levels: Levels
    title: str

    def picture(self) -> str:
        return draw(self.runs, self.levels, self.title)


def simulate(question: Question) -> Answer:
    """Runs the simulation. Raises ValueError or OSError with what is wrong with a file or an option, or SloNotMet."""
    profile = load_profile(question.profile)
    arrivals = read_trace(question.trace, limit=question.limit, rate=question.rate)
    levels = _levels(question.tiers, arrivals)
    new = engine_factory(question.policy)
    slos = [Slo.parse(text) for text in question.slos]
    for slo in slos:
        if slo.tier not in levels.tiers:
            raise ValueError(f"there is no tier {slo.tier}; there are {', '.join(levels.tiers)}")

    def run(num_workers: int) -> list[WorkerRun]:
        return run_fleet(arrivals, num_workers, profile, levels, new, question.seed)

    runs = fewest_workers(run, slos)[1] if slos else run(question.workers)
    title = f"{question.trace.name}, profile {profile.name}, policy {question.policy}, {len(runs)} worker(s)"
    return Answer(summarise(runs, levels), runs, levels, title)


def _levels(path: Path | None, arrivals: Sequence[Arrival]) -> Levels:
    if path is None:
        return with_unknown_tiers(BUILT_IN, arrivals)
    levels = load_levels(path)
    for arrival in arrivals:
        if arrival.tier is not None and arrival.tier not in levels.tiers:
            raise ValueError(f"the trace has the tier {arrival.tier}, and {path} has not")
    return levels
