"""What max_num_batched_tokens does to a worker, measured: `python -m bench.token_budget --help`."""

import asyncio
import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bench.machine import OtherLoad, machine_facts
from bench.measure import percentile
from bench.through_kafka import serving
from bench.workload import BenchRequest, Workload
from schemas.command_help import Command
from schemas.records import Tokens
from service.client import Client
from worker.sim.picture import TOPS, Curve, document, panel

BUDGETS = "32,64,128,256,512,1024"
_OUTPUT = (16, 64)  # tokens
_SHORT = (8, 64)
_VOCABULARY = 250  # every model has so many tokens; each prompt is another one, so that no prefix is found
_TEXT = {"TTFT p50": "ttft_p50", "TTFT p95": "ttft_p95", "TPOT p50": "tpot_p50", "TPOT p95": "tpot_p95"}
_TEXT |= {"gap p99": "gap_p99", "longest gap": "gap_max"}

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Arrival:
    """at: seconds after the first."""

    at: float
    request: BenchRequest


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one budget, as the caller saw it. Times in seconds; percentiles are nearest-rank. A gap is the time between a
    token of an answer and its next."""

    budget: int
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float
    gap_p99: float
    gap_max: float
    output_tokens_per_s: float
    other_load_cores: float


def arrivals(number: int, rate: float, long_prompt: int, seed: int) -> list[Arrival]:
    """Independent arrivals; every fourth has a prompt of `long_prompt` tokens, the others' are short."""
    rng = random.Random(seed)
    made, at = [], 0.0
    for i in range(number):
        length = long_prompt if i % 4 == 3 else rng.randint(*_SHORT)
        token_ids = tuple(rng.randrange(_VOCABULARY) for _ in range(length))
        made.append(Arrival(at, BenchRequest(token_ids, rng.randint(*_OUTPUT))))
        at += rng.expovariate(rate)
    return made


async def measure(load: Sequence[Arrival], workload: Workload, budget: int) -> Figures:
    """One worker with that budget, under the load."""
    others = OtherLoad()  # worker and broker have ended when it is read: they are no others
    async with serving(workload) as (client, _):
        began = asyncio.get_running_loop().time()
        times = await asyncio.gather(*(_answered(client, arrival) for arrival in load))
        took = asyncio.get_running_loop().time() - began
    ttfts = [seconds[0] for seconds in times]
    tpots = [(seconds[-1] - seconds[0]) / (len(seconds) - 1) for seconds in times]
    gaps = [after - before for seconds in times for before, after in itertools.pairwise(seconds)]
    return Figures(
        budget,
        percentile(ttfts, 50),
        percentile(ttfts, 95),
        percentile(tpots, 50),
        percentile(tpots, 95),
        percentile(gaps, 99),
        max(gaps),
        sum(map(len, times)) / took,
        round(others.cores(), 2),
    )


async def _answered(client: Client, arrival: Arrival) -> list[float]:
    """Publishes when it is due; seconds from then to each of its tokens."""
    await asyncio.sleep(arrival.at)
    loop = asyncio.get_running_loop()
    sent, times = loop.time(), []
    request = arrival.request
    async with client.stream(
        token_ids=request.token_ids, max_tokens=request.max_tokens, temperature=0, ignore_eos=True, timeout=600
    ) as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                times += [loop.time() - sent] * len(event.token_ids)
    if stream.end is None or stream.end.error is not None:
        raise RuntimeError(f"a request failed: {stream.end}")
    return times


def figures_table(rows: Sequence[Figures], *, markdown: bool) -> Table:
    """Milliseconds, and output tokens a second."""
    table = Table(box=box.MARKDOWN if markdown else box.SIMPLE_HEAD)
    for heading in ("max_num_batched_tokens", *_TEXT, "output tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        fields = asdict(row)
        times = [f"{1000 * fields[name]:,.0f} ms" for name in _TEXT.values()]
        table.add_row(f"{row.budget:,}", *times, f"{row.output_tokens_per_s:.1f}")
    return table


def picture(rows: Sequence[Figures], title: str) -> str:
    """SVG: time to the first token, and times between tokens, over the budget (logarithmic)."""

    def curves(*names: str) -> list[Curve]:
        return [(name, [(row.budget, 1000 * asdict(row)[_TEXT[name]]) for row in rows]) for name in names]

    return document(
        title,
        panel(
            TOPS[0],
            "ms to the first token, over max_num_batched_tokens",
            curves("TTFT p50", "TTFT p95"),
            math.log10,
            "",
        ),
        panel(
            TOPS[1],
            "ms between tokens, over max_num_batched_tokens",
            curves("TPOT p50", "TPOT p95", "gap p99"),
            math.log10,
            "",
        ),
    )


@app.command(cls=Command)
def token_budget(
    model: Annotated[str, typer.Option(help="tiny, smollm2, or a folder.")] = "smollm2",
    budgets: Annotated[str, typer.Option(help="Values of max_num_batched_tokens, with commas.")] = BUDGETS,
    requests: Annotated[int, typer.Option(min=4)] = 40,
    rate: Annotated[float, typer.Option(min=0.01, help="Arrivals a second; less than the worker can serve.")] = 1.0,
    long_prompt: Annotated[int, typer.Option(min=1, help="Tokens of every fourth prompt; the others have 8-64.")] = 768,
    seats: Annotated[int, typer.Option(min=1)] = 16,
    threads: Annotated[int, typer.Option(min=1, help="Of torch.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the load.")] = 0,
    bootstrap: Annotated[str | None, typer.Option(help="A Kafka. Default: the embedded broker.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the curves there, as SVG.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
) -> None:
    """Serve the same arrivals with one worker after another, each with another token budget.

    A small budget makes long prompts take many steps (late first tokens), a large one makes the steps beside them long
    (gaps in the other answers). Each worker is a process of its own, read through Kafka by the client; loading the
    model is not measured. About requests / rate + 10 seconds a budget. Run it on an idle machine.
    """
    load = arrivals(requests, rate, long_prompt, seed)
    rows = []
    for budget in (int(each) for each in budgets.split(",")):
        options = (("max_num_batched_tokens", str(budget)),)
        workload = Workload(tuple(each.request for each in load), model, seats, threads, bootstrap, options)
        rows.append(asyncio.run(measure(load, workload, budget)))
        typer.echo(f"{budget}: {rows[-1].output_tokens_per_s:.1f} output tokens/s", err=True)
    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print(figures_table(rows, markdown=markdown))
    machine = machine_facts(threads)
    busy = max(row.other_load_cores for row in rows)
    typer.echo(
        f"{requests} requests, {rate:g} a second, every fourth with {long_prompt} prompt tokens, {model}, {seats} "
        f"seats; {machine['cpu']}, {machine['cores']} cores, commit {machine['commit']}; other programs used "
        f"up to {busy:.2f} cores"
    )
    if plot is not None:
        plot.write_text(picture(rows, f"{model}: the token budget of a step"))
    if json_file is not None:
        fields = {"machine": machine, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(fields, indent=1) + "\n")


if __name__ == "__main__":
    app()
