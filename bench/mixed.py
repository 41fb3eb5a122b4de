"""Continuous batching against static batching, on requests of mixed lengths: `python -m bench.mixed --help`."""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.child import ChildFailed, in_child
from bench.comparison import Comparison, compare
from bench.contenders import Contender
from bench.machine import OtherLoad, machine_facts
from bench.report import agreement_line, figures_table
from bench.workload import MIXED_64, Workload, load_trace
from schemas.command_help import Command

_ALL = ",".join(contender.value for contender in Contender)
_WIDTH = 140  # of the table where the output is no terminal
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


def _contenders(names: str) -> list[Contender]:
    try:
        return [Contender(name.strip()) for name in names.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{error}; there are {_ALL}") from None


@app.command(cls=Command)
def mixed(
    trace: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="The load.", show_default="mixed_64.json")
    ] = MIXED_64,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many.", show_default="all")] = None,
    model: Annotated[str, typer.Option(help="`smollm2`, `tiny`, a folder or a name on the hub.")] = "smollm2",
    only: Annotated[str, typer.Option(metavar="LIST", help="The contenders to run.")] = _ALL,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, in turns; medians are shown.")] = 1,
    seats: Annotated[int, typer.Option(min=1, help="Sequences that run at once in ours.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = os.cpu_count() or 1,
    check: Annotated[int, typer.Option(min=0, help="Requests to generate unbatched, too; ours must equal them.")] = 4,
    bootstrap: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A Kafka to use.", show_default="the embedded broker")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> None:
    """Serve requests of mixed lengths in four ways and compare.

    All requests are submitted at once, greedy, in float32, each to its own number of tokens (EOS is ignored):

    - **engine**: our continuous batching, in process;
    - **kafka**: the same as callers have it: a worker process, a broker, and the client;
    - **static-8**, **static-16**: `generate` of transformers on batches of 8 or 16 in order of arrival, each padded
      to its longest prompt and run to its longest answer.

    Each runs in a process of its own, one after the other; loading the model is not measured. Read the ratio (to the
    better static batching), not the absolute figures: they are the machine's, and no figure holds when other programs
    run meanwhile (the last line tells). *Slots used* is the share of places in
    forward passes that gave a token somebody wanted, *KV used* the share of KV memory that was still needed. The exit
    status is 1 if an answer of ours differs from what transformers generates for the request alone.

    A quick look: `python -m bench.mixed --model tiny --requests 8`. What is reported: `--repeats 3`.
    """
    console = Console(stderr=True)
    contenders, load = _contenders(only), load_trace(trace, model, requests)
    workload = Workload(load, model, max_num_seqs=seats, num_threads=threads, bootstrap=bootstrap)
    machine = machine_facts(threads)
    console.print(
        f"{len(load)} requests, {workload.num_prompt_tokens} prompt and {workload.num_output_tokens} output tokens, "
        f"{model}, {seats} seats, {threads} threads, {repeats} runs each"
    )
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    other_load: list[float] = []  # cores, during each run
    with Progress(*columns, console=console) as progress:

        def call(what: str, num_tokens: int, function: Callable[[Callable[[int], None]], Any]) -> Any:
            task, others = progress.add_task(what, total=num_tokens), OtherLoad()
            try:
                return in_child(function, lambda n: progress.advance(task, n))
            finally:
                other_load.append(round(others.cores(), 2))

        try:
            comparison = compare(workload, contenders, repeats=repeats, num_checked=check, call=call)
        except ChildFailed as error:
            console.print(str(error), markup=False)
            raise typer.Exit(2) from None
    machine["other_load_cores"] = other_load
    _report(comparison, machine, markdown=markdown)
    if json_file is not None:
        measured = {"bench": "mixed", "at": datetime.now(UTC).isoformat(timespec="seconds"), "repeats": repeats}
        fields = measured | {"trace": trace.name, "machine": machine} | comparison.to_fields()
        json_file.write_text(json.dumps(fields, indent=1) + "\n")
    if not comparison.as_unbatched:
        console.print("ours is not what transformers generates")
        raise typer.Exit(1)


def _report(comparison: Comparison, machine: dict[str, Any], *, markdown: bool) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(figures_table(comparison, markdown=markdown))
    for agreement in comparison.agreements:
        console.print(agreement_line(agreement), highlight=False, soft_wrap=True)
    facts = "{cpu}, {cores} cores, torch {torch}, transformers {transformers}, {threads} threads, commit {commit}"
    busy = f"; other programs used up to {max(machine['other_load_cores']):.2f} cores meanwhile"
    console.print(facts.format(**machine) + busy, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
