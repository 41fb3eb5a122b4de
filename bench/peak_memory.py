"""What a worker's memory goes to, at most: `python -m bench.peak_memory --help`."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.child import in_child
from bench.machine import machine_facts
from bench.workload import MIXED_64, Workload, load_trace
from schemas.command_help import Command

app = typer.Typer(add_completion=False)

FACTOR = 1.3  # of the weights, which are packed layer by layer beside what they are packed from


def _resident(name: str) -> int:
    """Bytes of this process in memory, mapped files included: VmRSS now, VmHWM the most since `_forget`."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _forget() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(workload: Workload, on_tokens: Callable[[int], None]) -> dict[str, int]:
    """Bytes: of the model and its pools as computed, and what this process, a new one, had resident at most."""
    from bench import engine
    from worker.config import WorkerConfig
    from worker.engine.protocols import Runner
    from worker.model.loader import load_model
    from worker.model.memory import RunnerLimits, workspace_bytes
    from worker.model.runner import TorchRunner
    from worker.model.trial import look_at

    config = WorkerConfig(  # type: ignore[arg-type]
        model=workload.model, max_num_seqs=workload.max_num_seqs, **dict(workload.options)
    )
    load_model("tiny")  # what is imported on the way, and torch's own
    found = {"libraries": _resident("VmRSS")}

    def look(runner: Runner) -> Runner:
        assert isinstance(runner, TorchRunner)
        found["loading, at most"] = _resident("VmHWM")
        pools = runner.pools
        for pool in pools:
            pool.zero_()  # a page that was never written takes no memory
        found["KV pools"] = sum(pool.nbytes for pool in pools)
        size, dtype = look_at(runner.model.config), runner.model.dtype
        found["weights"] = size.num_weights * dtype.itemsize
        limits = RunnerLimits(
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        found["workspace"] = workspace_bytes(runner.model.config.get_text_config(), size, dtype, limits)
        _forget()
        return runner

    _forget()
    engine.run(workload, on_tokens, look)
    found["serving, at most"] = _resident("VmHWM")
    return found


@app.command(cls=Command)
def peak_memory(
    model: Annotated[str, typer.Option(help="`smollm2`, `tiny`, a folder or a name on the hub.")] = "smollm2",
    requests: Annotated[int, typer.Option(min=1, help="Of mixed lengths, that are served.")] = 24,
    seats: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 16,
    blocks: Annotated[int, typer.Option(min=1, help="Of each KV pool, on the device and on the host.")] = 512,
    dtype: Annotated[str, typer.Option(help="`float32`, `bfloat16` or `float16`.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = os.cpu_count() or 1,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
) -> None:
    """Load a model, serve mixed requests in process, and compare the most memory that it took with what it should.

    The promise is 1.3 times the weights, the KV pools, the workspace that `worker.model.memory` reckons with, and what
    Python, torch and transformers take before there is a model. Linux only. The exit status is 1 when it is broken.
    """
    options = (("num_blocks", str(blocks)), ("num_host_blocks", str(blocks)), ("dtype", dtype))
    workload = Workload(load_trace(MIXED_64, model, requests), model, seats, threads, options=options)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("serving", total=workload.num_output_tokens)
        found = in_child(partial(measure, workload), partial(progress.advance, task))
    promised = found["libraries"] + round(FACTOR * found["weights"]) + found["KV pools"] + found["workspace"]
    peak = max(found["loading, at most"], found["serving, at most"])
    share = (peak - found["libraries"]) / (promised - found["libraries"])
    table = Table("", "MiB", box=box.SIMPLE_HEAD)
    for name in ("libraries", "weights", "KV pools", "workspace", "loading, at most", "serving, at most"):
        table.add_row(name, f"{found[name] / 2**20:.0f}")
    table.add_row(f"promised: {FACTOR} weights and all else", f"{promised / 2**20:.0f}")
    facts = machine_facts(threads)
    Console().print(
        table,
        f"{model} in {dtype}: at most {share:.0%} of what is promised beside the libraries; {facts['cpu']}, "
        f"commit {facts['commit']}",
    )
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": facts, "bytes": found, "promised": promised}, indent=1) + "\n")
    raise typer.Exit(int(peak > promised))


if __name__ == "__main__":
    app()
