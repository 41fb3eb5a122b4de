"""Faults against workers under load, and a verdict from outside: `python -m bench.faults --help`."""

import asyncio
import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Annotated

import structlog
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bench.beside import Missing, checks_folder, kafka_cluster, prefer
from bench.campaign import Campaign, Fault, Plan, Report
from bench.judge import Verdict
from schemas.command_help import Command

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
_ALL = ",".join(fault.name.lower() for fault in Fault)


def _faults(names: str) -> tuple[Fault, ...]:
    try:
        return tuple(Fault[name.strip().upper()] for name in names.split(","))
    except KeyError as error:
        raise typer.BadParameter(f"{error}; there are {_ALL}") from None


@app.command(cls=Command)
def faults(
    seed: Annotated[int, typer.Option(help="Decides requests and faults.")] = 1,
    num_faults: Annotated[int, typer.Option("--faults", min=0, help="How many strike.")] = 100,
    nodes: Annotated[int, typer.Option(min=1, help="Brokers: 1 or 3.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Workers that share the lanes.")] = 3,
    in_flight: Annotated[int, typer.Option(min=1, help="Requests open at once, on three lanes.")] = 200,
    only: Annotated[str, typer.Option(metavar="LIST", help="The faults to draw from.")] = _ALL,
    calm: Annotated[bool, typer.Option("--calm", help="A fault waits until the last one is over.")] = False,
    supervisor: Annotated[
        bool, typer.Option("--supervisor/--no-supervisor", help="Whether the workers have one.")
    ] = True,
    shared: Annotated[
        bool, typer.Option("--shared", help="Answer every request on one of two reply topics that all share.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything there.")] = None,
) -> None:
    """Serve under load while workers and brokers are killed, frozen, drained, added and removed; then judge.

    Starts Apache Kafka (../shared/kafka or KAFKA_HOME) and workers with the model `tiny`. An independent reader
    (../shared/checks/reader.py) reads every reply log again at the end: no request lost, no token missing, doubled or
    changed, no wrong finish, no block leaked, no reply topic left, everything committed, and answers as undisturbed.

    How long a killed worker's callers wait for their next token is measured, too. Alone, on warm workers:
    `python -m bench.faults --only kill --faults 20 --workers 2 --in-flight 16 --calm`.

    The exit status is 1 when the verdict is bad; the command that replays it is printed.
    """
    console = Console(stderr=True)
    drawn = _faults(only)
    plan = Plan(seed, num_faults, nodes, workers, in_flight, drawn, calm=calm, supervisor=supervisor, shared=shared)
    try:
        cluster, _ = kafka_cluster(), checks_folder()
    except Missing as reason:
        console.print(str(reason), markup=False)
        raise typer.Exit(2) from None
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # brokers come and go here
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    with cluster.Cluster(nodes=nodes) as kafka, console.status("starting") as status:
        prefer(kafka)

        def said(what: str) -> None:
            status.update(what)
            if not console.is_terminal:
                console.print(what, markup=False, highlight=False)

        report = asyncio.run(Campaign(plan, kafka, importlib.import_module("reader"), said).run())
    _show(report)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_fields(), indent=1) + "\n")
    if not report.verdict.passed:
        raise typer.Exit(1)


def _show(report: Report) -> None:
    console = Console(width=None if Console().is_terminal else 140)
    verdict, fields = report.verdict, report.to_fields()
    table = Table(box=box.SIMPLE_HEAD, title=f"seed {report.plan.seed}, {report.seconds:.0f} s")
    table.add_column("what must not be")
    table.add_column("found", justify="right")
    for name in Verdict.NAMES:
        number = len(verdict.faults.get(name, ()))
        table.add_row(name, str(number) if not number else f"[bold red]{number}[/]")
    console.print(table)
    counts = Table(box=box.SIMPLE_HEAD)
    counts.add_column("counted")
    counts.add_column("", justify="right")
    for name, number in sorted(verdict.counts.items()):
        counts.add_row(name, f"{number:,}")
    for fault in Fault:
        if number := report.struck.count(fault):
            counts.add_row(f"fault: {fault.value}", str(number))
    for name in ("kill_to_first_resumed_token_s", "kill_to_next_token_of_each_s"):
        if spread := fields[name]:
            text = f"median {spread['median']}, worst {spread['worst']} ({spread['n']})"
            counts.add_row(name.removesuffix("_s").replace("_", " ") + ", s", text)
    console.print(counts)
    for name, cases in fields["cases"].items():
        for case in cases[:5]:
            console.print(f"{name}: {case}", markup=False, highlight=False, soft_wrap=True)
    if not verdict.passed:
        console.print(f"replay: {report.plan.replay}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"logs: {report.folder}", markup=False, highlight=False)


if __name__ == "__main__":
    app()
