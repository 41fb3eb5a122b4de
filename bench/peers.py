"""Ours beside what people would use instead, on a CPU: `python -m bench.peers --help`."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench.child import ChildFailed, in_child
from bench.contenders import Contender, serve
from bench.machine import OtherLoad, machine_facts
from bench.measure import Run
from bench.peer_results import OURS, Contestant, Measurement, OtherSettings, Results, Standing, busy_line
from bench.peer_setups import PEERS, Peer, Unavailable, install, is_installed, measure, run_logged
from bench.workload import MIXED_64, BenchRequest, Workload, equal_lengths, load_trace
from schemas.command_help import Command
from worker.config import WorkerConfig

_NAMES = [contender.value for contender in Contender] + list(PEERS)
_WIDTH = 150  # of the table where the output is no terminal
_LOADS = {"mixed": "Mixed lengths", "equal": "Equal lengths, 64 in and 64 out"}
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A contestant and how it is measured: ours or static batching by `contender`, with `options`; else `peer`."""

    contestant: Contestant
    contender: Contender | None = None
    options: tuple[tuple[str, str], ...] = ()
    peer: Peer | None = None

    @property
    def name(self) -> str:
        return self.contestant.name


def _entry(text: str) -> _Entry:
    """What a name on the command line stands for: `vllm`, `engine`, `engine:weights=int8`. Raises BadParameter."""
    name, *settings = text.strip().split(":")
    if name in PEERS and not settings:
        peer = PEERS[name]
        return _Entry(Contestant(name, peer.label, peer.is_float32), peer=peer)
    options = tuple((key, value) for key, _, value in (setting.partition("=") for setting in settings))
    is_ours = name in (Contender.ENGINE.value, Contender.KAFKA.value)
    are_settings = all(key in WorkerConfig.model_fields and value for key, value in options)
    if name not in _NAMES or (settings and not is_ours) or not are_settings:
        known = f"{', '.join(_NAMES)}, and engine:NAME=VALUE with the name of a worker's setting"
        raise typer.BadParameter(f"there is no {text!r}; there are {known}")
    contender = Contender(name)
    label = ", ".join([contender.label, *(f"{key} {value}" for key, value in options)])
    contestant = Contestant(text.strip(), label, not options, contender.is_static)
    return _Entry(contestant, contender, options)


@app.command(cls=Command)
def peers(
    json_file: Annotated[
        Path, typer.Option("--json", metavar="FILE", help="The measurements; taken up if it is there.")
    ],
    peers: Annotated[str, typer.Option(metavar="LIST", help="Who takes part.")] = ",".join(_NAMES),
    load: Annotated[Literal["mixed", "equal", "both"], typer.Option(help="What is served.")] = "both",
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many.", show_default="all 64")] = None,
    repeats: Annotated[
        int, typer.Option(min=0, help="Runs of each, in turns; medians are shown. 0: only install.")
    ] = 3,
    model: Annotated[
        str, typer.Option(help="`smollm2`; `tiny` for a try of ours and static batching; for some peers, a folder.")
    ] = "smollm2",
    seats: Annotated[int, typer.Option(min=1, help="Sequences that run at once, except in static batching.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each.")] = os.cpu_count() or 1,
    home: Annotated[Path, typer.Option(file_okay=False, help="Where the peers are installed.")] = Path(
        "~/.cache/carousel/peers"
    ),
    may_install: Annotated[bool, typer.Option("--install/--no-install", help="Install peers that are missing.")] = True,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
) -> None:
    """Serve the same requests with ours and with other servers, in turns, and compare.

    All requests are submitted at once, greedy, each to its own number of tokens (EOS is ignored); weights, KV cache and
    computation are float32, except OpenVINO's weights (float16: it reads no others from GGUF files). The loads: 64
    requests of **mixed** lengths (`mixed_64.json`), and 64 of **equal** lengths cut from the same prompts.

    - **engine**, **kafka**: ours in process, and through a broker; `engine:weights=int8` with other worker settings
    - **static-8**, **static-16**: `generate` of transformers on batches of 8 or 16; the better one counts
    - **transformers-cb**: transformers' own continuous batching
    - **vllm**: vLLM's CPU build; **openvino**: OpenVINO GenAI; **llama.cpp**: its server, over HTTP

    Each peer is installed once, in an environment of its own under `--home` (vLLM: 3 GB; llama.cpp: compiled, 20
    minutes on two cores), and left out with the reason where that fails. Each measurement runs in a process of its own
    and is in FILE as soon as it is done: **a run that was stopped goes on** with the same command. Nothing else may
    use the machine meanwhile (the last line tells). *Same answers* and *tokens* compare with static batching: answers
    that are the same to the last token, tokens before an answer's first difference. The exit status is 1 if ours in
    float32 differ.

    A quick look: `python -m bench.peers --requests 4 --repeats 1 --load mixed --json /tmp/try.json`
    """
    console = Console(stderr=True)
    entries = [_entry(text) for text in peers.split(",")]
    machine = machine_facts(threads)
    all_requests = load_trace(MIXED_64, model, requests)
    loads: dict[str, tuple[BenchRequest, ...]] = {"mixed": all_requests, "equal": equal_lengths(all_requests)}
    if load != "both":
        loads = {load: loads[load]}
    settings = {
        "model": model,
        "requests": len(all_requests),
        "seats": seats,
        "threads": threads,
        "cpu": machine["cpu"],
    }
    try:
        results = Results(json_file, settings)
    except OtherSettings as error:
        console.print(str(error), markup=False)
        raise typer.Exit(2) from None
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        campaign = _Campaign(entries, results, home.expanduser().resolve(), machine["commit"], progress)
        campaign.install(may_install=may_install)
        workload = Workload((), model, max_num_seqs=seats, num_threads=threads)
        campaign.run({name: replace(workload, requests=served) for name, served in loads.items()}, repeats)
    _report(results, campaign.contestants, list(loads), machine, markdown=markdown)
    if any(_differs(results, campaign.contestants, name) for name in loads):
        console.print("ours is not what transformers generates")
        raise typer.Exit(1)


class _Campaign:
    """Installs and measures, one thing after the other, and shows how far it is."""

    def __init__(
        self, entries: list[_Entry], results: Results, home: Path, commit: str | None, progress: Progress
    ) -> None:
        self._entries, self._results, self._home, self._commit = entries, results, home, commit
        self._progress = progress

    @property
    def contestants(self) -> list[Contestant]:
        return [entry.contestant for entry in self._entries]

    def install(self, *, may_install: bool) -> None:
        for entry in self._entries:
            if entry.peer is None or is_installed(entry.peer, self._home):
                continue
            if not may_install:
                self._skip(entry, "it is not installed, and --no-install was given")
                continue
            task = self._progress.add_task(f"installing {entry.name}", total=None)
            log = self._home / "logs" / f"{entry.name}-install.log"

            def shell(what: str, command: Any, folder: Path, *, task: Any = task, log: Path = log) -> None:
                self._progress.update(task, description=f"installing {folder.name}: {what}")
                run_logged(command, folder, log)

            try:
                install(entry.peer, self._home, shell)
            except (Unavailable, OSError) as error:
                self._skip(entry, f"it cannot be installed: {error}")
            self._progress.remove_task(task)

    def run(self, workloads: dict[str, Workload], repeats: int) -> None:
        """Measures what is not measured yet, in turns. One that fails is left out from then on."""
        order = [
            (load, entry, repeat)
            for repeat, load, entry in product(range(repeats), workloads, self._entries)
            if not self._results.has(load, entry.name, repeat)
        ]
        overall = self._progress.add_task("measurements", total=len(order))
        for load, entry, repeat in order:
            if entry.name not in self._results.skipped:
                try:
                    self._measure(load, entry, repeat, workloads[load])
                except Unavailable as error:
                    self._skip(entry, f"it failed: {error}")
                except ChildFailed as error:  # a traceback, which ends with what went wrong
                    self._skip(entry, f"it failed: {str(error).strip().splitlines()[-1]}\n{error}")
            self._progress.advance(overall)

    def _measure(self, load: str, entry: _Entry, repeat: int, workload: Workload) -> None:
        what = f"{entry.contestant.label} ({load}, {repeat + 1})"
        task, others = self._progress.add_task(what, total=workload.num_output_tokens), OtherLoad()
        versions: dict[str, str] = {}
        on_tokens = partial(self._progress.advance, task)
        try:
            run = _serve(entry, self._home, workload, on_tokens, versions)
        finally:
            self._progress.remove_task(task)
        cores = round(others.cores(), 2)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        measurement = Measurement(load, entry.name, repeat, run, now, self._commit, cores, versions)
        self._results.add(measurement, self.contestants)

    def _skip(self, entry: _Entry, reason: str) -> None:
        self._results.skipped[entry.name] = reason
        self._results.write(self.contestants)
        self._progress.console.print(f"{entry.name} is left out: {reason}", markup=False, highlight=False)


def _serve(
    entry: _Entry, home: Path, workload: Workload, on_tokens: Callable[[int], None], versions: dict[str, str]
) -> Run:
    if entry.peer is not None:
        return measure(entry.peer, home, workload, on_tokens, versions)
    assert entry.contender is not None
    run: Run = in_child(partial(serve, entry.contender, replace(workload, options=entry.options)), on_tokens)
    return run


def _differs(results: Results, contestants: list[Contestant], load: str) -> bool:
    standing = Standing(results.of_load(load), contestants)
    same = (standing.sameness(c.name) for c in standing.contestants if c.name in (OURS, Contender.KAFKA.value))
    return any(shares is not None and shares[0] < 1 for shares in same)


def _report(
    results: Results, contestants: list[Contestant], loads: list[str], machine: dict[str, Any], *, markdown: bool
) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    for load in loads:
        standing = Standing(results.of_load(load), contestants)
        if standing.contestants:
            console.print(standing.table(_LOADS[load], markdown=markdown))
    for name, reason in results.skipped.items():
        console.print(f"{name}: skipped: {reason.splitlines()[0]}", markup=False, highlight=False, soft_wrap=True)
    facts = "{cpu}, {cores} cores, torch {torch}, transformers {transformers}, {threads} threads; "
    if results.measurements:
        console.print(facts.format(**machine) + busy_line(results.measurements), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
