"""`carousel simulate`: a planner's questions, answered by the real scheduler on a virtual clock."""

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from schemas.errors import reason_of

_WIDTH = 110  # of the tables where the output is no terminal
_TRACE_HELP = "CSV: arrival_s,tenant,input_tokens,output_tokens[,tier]."


def simulate(
    trace: Annotated[Path | None, typer.Option(metavar="FILE.csv", help=_TRACE_HELP)] = None,
    profile: Annotated[
        str, typer.Option(metavar="h200|a100|cpu|FILE.toml", help="The machine and its model.")
    ] = "h200",
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Who goes next: composite, fcfs, priority, wfq, srtf or edf.")
    ] = "composite",
    tiers: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Tiers and tenants.", show_default="built in")
    ] = None,
    rate: Annotated[float, typer.Option(metavar="X", help="Arrivals X times as dense in time.")] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N requests.")] = None,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Workers that share the load.")] = 1,
    slo: Annotated[
        list[str] | None,
        typer.Option(metavar="TIER:ttft=S,tpot=S", help="Find the fewest workers whose p99 keeps this. Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the spread over workers, and of --fuzz.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Write a picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    fuzz: Annotated[bool, typer.Option("--fuzz", help="Replay a seed of the fuzzer, checking every step.")] = False,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps of --fuzz.")] = 5000,
) -> None:
    """Plan capacity: the real scheduler serves a trace on a virtual clock.

    No model and no broker are needed; token counts decide, not tokens. Same arguments, same output.

    **Tiers**: a request belongs to the tier that its `tier` column names, else to the one that lists its tenant in
    --tiers, else to `standard`, else to the least urgent. Built in are interactive (TTFT 1 s, TPOT 50 ms), standard
    (5 s, 100 ms) and batch (no targets, displaces nobody). What would wait beyond its tier's TTFT target is refused. A
    tiers file has tables like `[tiers.interactive]` with `class = 2` (larger is more urgent), `ttft = 1.0`,
    `tpot = 0.05`, `deadline = 60`, `max_queued_tokens = 100000`, `tenants = ["chat"]`, and `[tenants.chat]` with
    `weight = 2`.

    **Profiles**: `h200` is Llama-3.1-8B in bf16 on one H200, and `a100` Llama-2-7B with 4-bit weights on one A100, both
    computed from data sheets; `cpu` is SmolLM2-135M on two cores, estimated. For figures of your own: a TOML file with
    `like = "h200"` and what differs (base_s, prefill_s, context_s, decode_s, swap_s, num_blocks, num_host_blocks,
    block_size, max_num_seqs, max_num_batched_tokens, max_model_len), or `python -m bench.step_times FILE.toml`, which
    measures this machine.

    Requests are spread over workers at random (--seed), as Kafka spreads records without a key. *Goodput* is requests a
    second that met their tier's targets.

    Examples: `carousel simulate --trace load.csv --plot load.svg`,
    `carousel simulate --trace load.csv --slo interactive:ttft=1.0`
    """
    if fuzz:
        raise typer.Exit(importlib.import_module("worker.sim.fuzz").replay(seed, steps))
    if trace is None:
        raise typer.BadParameter("a trace is needed", param_hint="--trace")
    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"pictures are written as SVG, so FILE.svg and not {plot.name}", param_hint="--plot")
    module = importlib.import_module("worker.sim.simulate")
    question = module.Question(
        trace=trace,
        profile=profile,
        policy=policy,
        tiers=tiers,
        rate=rate,
        limit=limit,
        seed=seed,
        workers=workers,
        slos=tuple(slo or ()),
    )
    answer = _answer(module, question, plot)
    if as_json:
        typer.echo(json.dumps(answer.figures, indent=1))
        return
    _print(answer.title, answer.figures)


def _answer(module: Any, question: Any, plot: Path | None) -> Any:
    """Simulates, and writes the picture. A mistake in a file or an option is one sentence, and exit status 2."""
    try:
        answer = module.simulate(question)
        if plot is not None:
            plot.write_text(answer.picture())
    except OSError as error:
        typer.echo(f"carousel simulate: {_file_sentence(error, question, plot)}", err=True)
        raise typer.Exit(2) from None
    except (ValueError, module.SloNotMet) as error:
        typer.echo(f"carousel simulate: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, module.SloNotMet) else 2) from None
    return answer


def _file_sentence(error: OSError, question: Any, plot: Path | None) -> str:
    """Which option's file it is, what is wrong with it, and what it must be."""
    path = Path(error.filename or "")
    if path == plot:
        return f"--plot {path} cannot be written: {reason_of(error)}"
    option, wanted = {
        question.trace: ("--trace ", "a CSV file with the columns arrival_s,tenant,input_tokens,output_tokens"),
        question.tiers: ("--tiers ", "a TOML file with tables [tiers.NAME]"),
    }.get(path, ("", "a file"))
    if isinstance(error, FileNotFoundError):
        return f"{option}{path}: there is no such file; it must be {wanted}"
    return f"{option}{path} cannot be read: {reason_of(error)}; it must be {wanted}"


def _print(title: str, figures: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(title, style="bold", markup=False)
    columns = ("requests", "finished", "goodput/s", "in target", "TTFT p50", "p99", "a token p50", "p99")
    tiers = _table("tier", *columns)
    for name, tier in figures["tiers"].items():
        tiers.add_row(
            escape(name),
            str(tier["requests"]),
            str(tier["finished"]),
            f"{tier['goodput']:.2f}",
            f"{tier['attainment']:.1%}",
            *(_ms(tier[what][p]) for what in ("ttft_ms", "tpot_ms") for p in ("p50", "p99")),
        )
    console.print(tiers)
    tenants = _table("tenant", "finished", "tokens served", "TTFT p50", "p99")
    for name, tenant in figures["tenants"].items():
        ttft = tenant["ttft_ms"]
        tokens = f"{tenant['service_tokens']:,}"
        tenants.add_row(escape(name), str(tenant["finished"]), tokens, _ms(ttft["p50"]), _ms(ttft["p99"]))
    console.print(tenants)
    preemptions = figures["preemptions"]
    console.print(
        f"{figures['workers']} worker(s), {figures['span_s']:.1f} s: {figures['output_tok_s']:.1f} output tokens/s, "
        f"KV use {figures['kv_use_mean']:.1%}, longest wait {figures['max_wait_s']:.2f} s"
    )
    console.print(
        f"{figures['finished']} of {figures['requests']} finished, {figures['refused']} refused, "
        f"{figures['expired']} expired; {preemptions['swap']} preemptions by swap, {preemptions['recompute']} by "
        f"recompute, {figures['recomputed_tokens']:,} tokens recomputed"
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms" if value < 10_000 else f"{value / 1e3:.1f} s"
