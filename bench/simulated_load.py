"""Simulated loads: static against continuous batching, and one tier under another's flood.

`python -m bench.simulated_load --help`. Nothing is measured but the scheduler's decisions: a step-time profile says how
long each step takes, so the figures are the same on every machine.
"""

import itertools
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from schemas.command_help import Command
from worker.engine.admission import TierLimits
from worker.engine.tiers import TierPolicy
from worker.sim.levels import BUILT_IN, Levels
from worker.sim.new_engine import engine_factory
from worker.sim.profile import Profile, load_profile
from worker.sim.replay import SimulatedWorker, WorkerRun
from worker.sim.static_batching import run_static
from worker.sim.summary import percentile, summarise
from worker.sim.trace import Arrival, read_trace

TRACES = Path(__file__).resolve().parents[2] / "shared/traces/normalized"
TRACE = TRACES / "azure2023_code_plus_conv_same_clock.csv"
STATIC_SEATS, CONTINUOUS_SEATS = 32, 96
NUM_REQUESTS = 512
SHORTEST, MEDIAN, LONGEST, SIGMA = 4, 128, 2048, 1.0  # tokens, of prompts and outputs alike
RESERVED_SLOTS = STATIC_SEATS * 2 * LONGEST  # static batching never lacks KV
SCARCE_SLOTS = 22_528  # hardly enough for 96 seats
MAX_QUEUED_TOKENS = 500_000  # of the batch tier in the isolation run
BATCH_INPUT, BATCH_OUTPUT = (500, 2500), (50, 350)  # tokens of its requests, uniform
_TOKENS_PER_PROMPT_TOKEN = 1 + sum(BATCH_OUTPUT) / sum(BATCH_INPUT)
_WIDTH = 110
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def mixed_lengths(seed: int) -> list[tuple[int, int]]:
    """(input, output) tokens of the requests, log-normal and clipped."""
    rng = random.Random(seed)

    def draw() -> int:
        return min(LONGEST, max(SHORTEST, round(rng.lognormvariate(math.log(MEDIAN), SIGMA))))

    return [(draw(), draw()) for _ in range(NUM_REQUESTS)]


def compare(lengths: Sequence[tuple[int, int]], num_slots: int, profile: Profile) -> dict[str, float]:
    """Both ways on pools of so many slots, everything waiting at time 0. Ratios are ours by static's."""
    static = run_static(lengths, STATIC_SEATS, num_slots, profile)
    ours = run_continuous(lengths, num_slots, profile)
    ends = [served.ended_at or 0.0 for served in ours.served]
    mean_running = sum(end - (served.seated_at or 0.0) for end, served in zip(ends, ours.served, strict=True))
    p50, p99 = percentile(ends, 0.5) or 0.0, percentile(ends, 0.99) or 0.0
    return {
        "throughput": static.makespan / max(ends),
        "p50": p50 / (percentile(static.ends, 0.5) or 1.0) - 1,
        "p99": p99 / (percentile(static.ends, 0.99) or 1.0) - 1,
        "seats": max(point.num_running for point in ours.timeline.points) / STATIC_SEATS,
        "mean_running": mean_running / max(ends),
        "kv_static": static.kv_use,
        "kv_ours": ours.filled_slot_s / (num_slots * ours.busy_s),
        "kv_ours_loaded": _kv_use_while_some_wait(ours),
        "recomputed": ours.num_recomputed_tokens / ours.num_computed_tokens,
        "preemptions": ours.num_swaps + ours.num_recomputes,
    }


def run_continuous(lengths: Sequence[tuple[int, int]], num_slots: int, profile: Profile) -> WorkerRun:
    profile = replace(profile, num_blocks=num_slots // profile.block_size, max_num_seqs=CONTINUOUS_SEATS)
    levels = Levels({"batch": TierPolicy(name="batch")}, {"batch": 0})
    worker = SimulatedWorker(profile, levels, *engine_factory("fcfs")(profile, levels))
    return worker.run([Arrival(0.0, "load", num_input, num_output) for num_input, num_output in lengths])


def _kv_use_while_some_wait(run: WorkerRun) -> float:
    """KV use while there is more to do than seats: without the last answers, which run nearly alone."""
    points = [point.kv_use for point in run.timeline.points if point.num_waiting]
    return statistics.fmean(points) if points else 0.0


def isolation(trace: Path, num_requests: int, profile: Profile, seed: int) -> dict[str, Any]:
    """The trace as the interactive tier, alone and beside a batch tier whose offered load is ten times capacity."""
    interactive = [replace(arrival, tier="interactive") for arrival in read_trace(trace, limit=num_requests)]
    levels = replace(BUILT_IN, limits={"batch": TierLimits(max_queued_tokens=MAX_QUEUED_TOKENS)})
    rng = random.Random(seed)

    def batch(at: float) -> Arrival:
        return Arrival(at, "batch", rng.randint(*BATCH_INPUT), rng.randint(*BATCH_OUTPUT), "batch")

    full = _figures([batch(0.0) for _ in range(4 * profile.max_num_seqs)], levels, profile, "fcfs")
    rate = 10 * full["requests"] / full["span_s"]
    own_load = _figures([replace(arrival, at=0.0, tier="batch") for arrival in interactive], BUILT_IN, profile, "fcfs")
    until = interactive[-1].at
    flood = [batch(i / rate) for i in range(int(rate * until))]
    both = sorted([*interactive, *flood], key=lambda arrival: arrival.at)
    return {
        "capacity_requests_per_s": rate / 10,
        "batch_wait_bound_s": wait_bound(interactive, full["total_tok_s"], own_load["total_tok_s"], profile),
        "alone": _figures(interactive, levels, profile, "composite"),
        "ours": _figures(both, levels, profile, "composite"),
        "fcfs": _figures(both, levels, profile, "fcfs"),
    }


def wait_bound(higher: Sequence[Arrival], tokens_per_s: float, higher_tokens_per_s: float, profile: Profile) -> float:
    """Seconds that an admitted batch request can wait (docs/scheduling.md): the least W in which the worker does what
    sits, all that the queue may hold, and the most that the higher tier brings in any W seconds, each displacing one.

    `tokens_per_s`: of a worker that serves batch requests only; `higher_tokens_per_s`: the higher tier's only.
    """
    num_tokens = MAX_QUEUED_TOKENS * _TOKENS_PER_PROMPT_TOKEN + profile.max_num_seqs * BATCH_OUTPUT[1]
    displacement_s = 2 * profile.swap_s * math.ceil((BATCH_INPUT[1] + BATCH_OUTPUT[1]) / profile.block_size)
    work = [(a.input_tokens + a.output_tokens) / higher_tokens_per_s + displacement_s for a in higher]
    for wait in itertools.count(1):
        most = total = 0.0
        start = 0
        for arrival, seconds in zip(higher, work, strict=True):
            total += seconds
            while higher[start].at < arrival.at - wait:
                total -= work[start]
                start += 1
            most = max(most, total)
        if wait >= num_tokens / tokens_per_s + most:
            return float(wait)
    raise AssertionError("there is no end of waits")


def _figures(arrivals: Sequence[Arrival], levels: Levels, profile: Profile, policy: str) -> dict[str, Any]:
    if policy == "fcfs":  # nobody is more urgent than another, and so nobody is displaced for another's sake
        levels = replace(levels, classes=dict.fromkeys(levels.classes, 0))
    run = SimulatedWorker(profile, levels, *engine_factory(policy)(profile, levels)).run(arrivals)
    figures = summarise([run], levels)
    admitted = [served for served in run.served if served.seated_at is not None]
    figures["wait_s"] = {
        tier: max((served.wait for served in admitted if served.tier == tier), default=0.0) for tier in levels.tiers
    }
    ttfts = [served.ttft for served in run.served if served.tier == "interactive" and served.ttft is not None]
    figures["interactive_ttft_p90_s"] = percentile(ttfts, 0.9)
    figures["total_tok_s"] = sum(tenant["service_tokens"] for tenant in figures["tenants"].values()) / figures["span_s"]
    return figures


@app.command(cls=Command)
def simulated_load(
    profile: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Step times of the mixed loads, as of `carousel simulate`.")
    ] = "a100",
    isolation_profile: Annotated[str, typer.Option(metavar="NAME|FILE", help="Those of the isolation run.")] = "h200",
    seed: Annotated[int, typer.Option(help="Of the lengths.")] = 0,
    trace: Annotated[Path, typer.Option(help="The interactive tier of the isolation run.")] = TRACE,
    requests: Annotated[int, typer.Option(min=0, help="How much of the trace; 0: no isolation run.")] = 5000,
    seats: Annotated[int, typer.Option(min=1, help="Of the isolation run.")] = 64,
    budget: Annotated[
        int, typer.Option(min=1, help="Token budget of the isolation run: who comes waits for the step in flight.")
    ] = 2048,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
) -> None:
    """Compare static batching (32 seats) with ours (96 seats) on 512 requests that wait at time 0, and flood a tier.

    Lengths are log-normal (median 128, sigma 1.0, 4 to 2048 tokens). Pools have equal bytes, in two sizes: 32 times the
    longest sequence allowed, so that static batching never lacks KV, and what hardly serves 96 seats, where static
    batches are cut to what fits. *KV use* is filled slots by all slots, over the whole run and while requests wait.
    """
    chosen = load_profile(profile)
    lengths = mixed_lengths(seed)
    results: dict[str, Any] = {
        "reserved": compare(lengths, RESERVED_SLOTS, chosen),
        "scarce": compare(lengths, SCARCE_SLOTS, chosen),
        "equal": compare([(MEDIAN, MEDIAN)] * NUM_REQUESTS, SCARCE_SLOTS, chosen),
    }
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(_mixed_table(results))
    if requests:
        scarce = replace(load_profile(isolation_profile), max_num_seqs=seats, max_num_batched_tokens=budget)
        results["isolation"] = isolation(trace, requests, scarce, seed)
        console.print(_isolation_table(results["isolation"]))
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")


def _mixed_table(results: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("continuous by static batching", no_wrap=True)
    headings = ("published", f"pool {RESERVED_SLOTS:,}", f"pool {SCARCE_SLOTS:,}", "equal, the same")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    rows = (
        ("throughput", "3.2x (equal: 1.06x)", "throughput", "{:.2f}x"),
        ("latency P50", "-81 %", "p50", "{:+.0%}"),
        ("latency P99", "-85 %", "p99", "{:+.0%}"),
        ("concurrency, peak", "3x", "seats", "{:.1f}x"),
        ("sequences seated, mean", "", "mean_running", "{:.1f}"),
        ("KV use, static", "45 %", "kv_static", "{:.0%}"),
        ("KV use, ours", "82 %", "kv_ours", "{:.0%}"),
        ("KV use while some wait, ours", "", "kv_ours_loaded", "{:.0%}"),
        ("preemptions", "", "preemptions", "{}"),
        ("recomputed tokens", "", "recomputed", "{:.1%}"),
    )
    for label, published, name, form in rows:
        table.add_row(label, published, *(form.format(results[load][name]) for load in ("reserved", "scarce", "equal")))
    return table


def _isolation_table(found: dict[str, Any]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title=f"batch floods: 10 x capacity of {found['capacity_requests_per_s']:.1f} requests/s"
    )
    table.add_column("", no_wrap=True)
    for heading in ("wanted", "alone", "ours", "FCFS"):
        table.add_column(heading, justify="right", no_wrap=True)
    runs = [found[name] for name in ("alone", "ours", "fcfs")]
    ttfts = [run["tiers"]["interactive"]["ttft_ms"] for run in runs]
    table.add_row("interactive TTFT p50, ms", "", *(f"{ttft['p50']:.0f}" for ttft in ttfts))
    table.add_row("interactive TTFT p90, ms", "", *(f"{1000 * run['interactive_ttft_p90_s']:.0f}" for run in runs))
    table.add_row("interactive TTFT p99, ms", "<= 1.1 x alone", *(f"{ttft['p99']:.0f}" for ttft in ttfts))
    table.add_row("tokens/s in and out", ">= 95 % of FCFS", *(f"{run['total_tok_s']:,.0f}" for run in runs))
    table.add_row("output tokens/s", "", *(f"{run['output_tok_s']:,.0f}" for run in runs))
    bound = f"<= {found['batch_wait_bound_s']:.0f} (ours)"
    table.add_row("longest wait of batch, s", bound, *(f"{run['wait_s']['batch']:.1f}" for run in runs))
    table.add_row("refused", "", *(f"{run['refused']:,}" for run in runs))
    table.add_row(
        "preemptions, swap + recompute",
        "",
        *(f"{run['preemptions']['swap']} + {run['preemptions']['recompute']}" for run in runs),
    )
    shares = [run["recomputed_tokens"] / max(1, run["computed_tokens"]) for run in runs]
    table.add_row("recomputed tokens", "<= 5 %", *(f"{share:.2%}" for share in shares))
    return table


if __name__ == "__main__":
    app()
