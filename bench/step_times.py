"""What steps cost on this machine, as a profile for the simulator: `python -m bench.step_times --help`."""

import json
import logging
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import structlog
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import worker.model  # before torch: it makes settings of OpenMP
from bench.machine import OtherLoad, machine_facts
from bench.roofline import BLOCK_SIZE, decoding, prefilling
from schemas.command_help import Command
from worker.sim.profile import Profile

app = typer.Typer(add_completion=False)
assert worker.model

_DECODES = tuple(product((1, 4, 16, 48, 96), (64, 400)))  # rows, tokens of context
_PREFILLS = tuple(product((64, 128, 256, 512), (0, 512)))  # tokens of the chunk, and before it
_WARM_UP = 2
_PRICES = ("base_s", "prefill_s", "context_s", "decode_s")


@dataclass(frozen=True, slots=True)
class Sample:
    """A step's work, as `Profile` counts it, and its time in seconds."""

    num_prefill: int
    num_context: int
    num_decodes: int
    seconds: float


def fit(samples: Sequence[Sample]) -> dict[str, float]:
    """Prices for `Profile`: least squares of relative errors, none negative. Needs a sample, else ValueError."""
    if not samples:
        raise ValueError("nothing was measured")
    work = np.array([(1, s.num_prefill, s.num_context, s.num_decodes) for s in samples], float)
    work /= np.array([[s.seconds] for s in samples])
    kept = list(range(len(_PRICES)))
    while True:
        found, *_ = np.linalg.lstsq(work[:, kept], np.ones(len(samples)), rcond=None)
        if found.min() >= 0 or len(kept) == 1:
            prices = dict(zip((_PRICES[i] for i in kept), found.tolist(), strict=True))
            return {name: max(0.0, prices.get(name, 0.0)) for name in _PRICES}
        kept.pop(int(found.argmin()))  # more work never takes less time


def measure(loaded: Any, num_steps: int) -> Iterator[Sample]:
    """Medians of `num_steps` steps of each kind: decodes of some rows and contexts, and chunks of one prompt."""
    for rows, context in _DECODES:
        runner, decode = decoding(loaded, rows, context, _WARM_UP + num_steps)
        plans = [decode() for _ in range(_WARM_UP + num_steps)]
        seconds = _median_seconds(runner, plans)
        num_context = statistics.median(sum(part.start + 1 for part in plan.scheduled) for plan in plans[_WARM_UP:])
        yield Sample(0, round(num_context), rows, seconds)
    for chunk, before in _PREFILLS:
        runner, plans = prefilling(loaded, chunk, before, _WARM_UP + num_steps)
        yield Sample(chunk, before + chunk, 0, _median_seconds(runner, plans))


def _median_seconds(runner: Any, plans: Sequence[Any]) -> float:
    seconds = []
    for plan in plans:
        began = time.perf_counter()
        runner.execute(plan)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_WARM_UP:])


def measure_swap(loaded: Any) -> float:
    """Seconds per block, the slower of both ways."""
    from worker.model.runner import TorchRunner

    runner = TorchRunner(loaded, 512, BLOCK_SIZE, 1, BLOCK_SIZE, num_host_blocks=512)
    runner.measure_copies()  # touches the pages
    return max(runner.measure_copies())


@app.command(cls=Command)
def step_times(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE.toml]", help="Where the profile is written.")] = None,
    model: Annotated[str, typer.Option(help="`smollm2`, `tiny`, a folder or a name on the hub.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    weights: Annotated[str, typer.Option(help="auto, plain or int8.")] = "auto",
    steps: Annotated[int, typer.Option(min=1, help="Of each kind; the median counts.")] = 8,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of torch.")] = os.cpu_count() or 1,
) -> None:
    """Measure steps of a model on this machine, and fit the profile that `carousel simulate --profile FILE` takes.

    Wall time: let nothing else run. The fit is linear, by least squares of relative errors; the table shows how far it
    is from each measurement.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    from worker.model.cpu import prepare_cpu
    from worker.model.loader import load_model
    from worker.model.weights import prepare_weights

    others, console = OtherLoad(), Console()
    prepare_cpu(threads, native_kernels=True)
    loaded = load_model(model, dtype=dtype)
    if weights != "plain":
        prepare_weights(loaded, weights)
    total = len(_DECODES) + len(_PREFILLS)
    samples = list(track(measure(loaded, steps), "steps", total, console=Console(stderr=True)))
    profile = Profile(
        name=file.stem if file else model,
        **fit(samples),
        swap_s=measure_swap(loaded),
        paced_swaps=True,
        num_blocks=4096,
        num_host_blocks=4096,
        block_size=BLOCK_SIZE,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=loaded.max_model_len,
    )
    console.print(_table(samples, profile))
    facts = machine_facts(threads)
    measured_on = (
        f"{model}, {dtype}, weights {weights}; {facts['cpu']}, {threads} threads, torch {facts['torch']}, commit "
        f"{facts['commit']}; other programs used {others.cores():.2f} cores"
    )
    console.print(measured_on, markup=False, highlight=False)
    if file is not None:
        file.write_text(f"# {measured_on}\n{_toml(profile)}")


def _table(samples: Sequence[Sample], profile: Profile) -> Table:
    prices = ", ".join(f"{name} {getattr(profile, name) * 1e3:.4g} ms" for name in (*_PRICES, "swap_s"))
    table = Table(box=box.SIMPLE_HEAD, caption=prices)
    for heading in ("prefill tokens", "decodes", "context tokens", "ms measured", "ms fitted", "off by"):
        table.add_column(heading, justify="right")
    for s in samples:
        fitted = profile.step_s(s.num_prefill, s.num_context, s.num_decodes)
        counts = (s.num_prefill, s.num_decodes, s.num_context)
        times = (f"{s.seconds * 1e3:.1f}", f"{fitted * 1e3:.1f}", f"{fitted / s.seconds - 1:+.0%}")
        table.add_row(*map(str, counts), *times)
    return table


def _toml(profile: Profile) -> str:
    fields = (name for name in Profile.__slots__ if name != "name")
    return "".join(f"{name} = {json.dumps(getattr(profile, name))}\n" for name in fields)


if __name__ == "__main__":
    app()
