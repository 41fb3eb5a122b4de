"""What a busy minute of the worker is spent on: `python -m bench.busy_minute --help`."""

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import structlog
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bench import engine
from bench.machine import ROOT, OtherLoad, machine_facts
from bench.workload import MIXED_64, Workload, load_trace
from schemas.command_help import Command

app = typer.Typer(add_completion=False)

_SAMPLES_PER_SECOND = 50
_ROUNDS = 50  # of the trace: minutes of work on any CPU
_READY = "serving"
_PYTHON_FRAME = re.compile(r"^(?P<function>.+) \((?P<file>[^()]+\.py|<[^()]+>):\d+\)$")
_INTERPRETER = re.compile(r"[/(](python[\d.]*|libpython[\d.]+so[\d.]*)\)$|/(Include|Modules|Objects|Python)/")
_NATIVE = (  # libraries, by parts of a frame's text; the first that fits counts, in the innermost frame that one fits
    ("waiting", ("libgomp", "do_futex_wait", "pthread_cond", "epoll_wait")),
    ("our kernels in C", ("kernels-",)),
    ("torch's operators", ("libtorch", "libc10", "torch/lib", "mkl", "dnnl")),
    ("numpy", ("numpy",)),
)
OUR_PYTHON = "our Python"
_OTHER = "other native code"
_OUR_FOLDERS = tuple(f"{ROOT / folder}/" for folder in ("worker", "kernels", "schemas", "service", "bench"))


def serve(model: str, seats: int, threads: int) -> None:
    """Serves the trace over and over, and says on standard output when it has begun. Ends when it is killed."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    requests = load_trace(MIXED_64, model) * _ROUNDS
    said = iter([_READY])
    engine.run(Workload(requests, model, seats, threads), lambda _: print(next(said, ""), end="", flush=True))


def classify(stacks: Iterable[str]) -> Counter[str]:
    """Samples by what ran, from py-spy's raw format: a line per stack, outermost first, and how often it was seen."""
    found: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        found[_group(stack.split(";"))] += int(count)
    return found


def _group(frames: list[str]) -> str:
    """What the innermost frames belong to; the interpreter's own frames count for the Python that they run."""
    in_interpreter = False
    for frame in reversed(frames):
        if match := _PYTHON_FRAME.match(frame):
            return _group_of_python(match["file"]) if in_interpreter or frame is frames[-1] else _OTHER
        in_interpreter = in_interpreter or bool(_INTERPRETER.search(frame))
        group = next((group for group, parts in _NATIVE if any(part in frame for part in parts)), None)
        if group is not None and not in_interpreter:
            return group
    return _OTHER


def _group_of_python(file: str) -> str:
    if file.startswith(_OUR_FOLDERS):
        return OUR_PYTHON
    return "transformers' Python" if "/transformers/" in file else "other Python: torch, asyncio"


@app.command(cls=Command)
def busy_minute(
    seconds: Annotated[int, typer.Option(min=1, help="How long to watch.")] = 60,
    model: Annotated[str, typer.Option(help="`smollm2`, `tiny`, a folder or a name on the hub.")] = "smollm2",
    seats: Annotated[int, typer.Option(min=1, help="Sequences that run at once.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = os.cpu_count() or 1,
    py_spy: Annotated[str, typer.Option(metavar="PROGRAM", help="py-spy, from `pip install py-spy`.")] = "py-spy",
) -> None:
    """Serve mixed requests in process for a minute, and tell where the time of its Python threads goes.

    py-spy looks at the stacks from outside, native frames included, and slows the worker down a little. Threads that
    sleep do not count; OpenMP's threads have no Python and are not seen.
    """
    program = shutil.which(py_spy)
    if program is None:
        raise typer.BadParameter("is not there: pip install py-spy", param_hint="--py-spy")
    others = OtherLoad()
    code = f"from bench.busy_minute import serve; serve({model!r}, {seats}, {threads})"
    with (
        tempfile.TemporaryDirectory(prefix="carousel-bench-") as folder,
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as worker,
        Console(stderr=True).status(f"watching {seconds} s"),
    ):
        try:
            assert worker.stdout is not None
            if not worker.stdout.read(len(_READY)):
                raise typer.Exit(1)  # it has said why
            stacks = Path(folder, "stacks")
            subprocess.run(
                [
                    *(program, "record", "--pid", str(worker.pid), "--native", "--rate", str(_SAMPLES_PER_SECOND)),
                    *("--duration", str(seconds), "--format", "raw", "--full-filenames", "--output", str(stacks)),
                ],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            samples = classify(stacks.read_text().splitlines())
        finally:
            worker.kill()
    table = Table("", "share", "seconds", box=box.SIMPLE_HEAD)
    for name, count in samples.most_common():
        table.add_row(name, f"{count / samples.total():.1%}", f"{count / _SAMPLES_PER_SECOND:.1f}")
    facts = machine_facts(threads)
    Console().print(
        table,
        f"{model}, {seats} seats; {facts['cpu']}, {threads} threads, commit {facts['commit']}; other programs used "
        f"{others.cores():.2f} cores, py-spy and the worker among them",
    )


if __name__ == "__main__":
    app()
