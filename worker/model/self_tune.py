"""Who multiplies a layer's weights fastest on this machine: a short measurement, kept in a file.

A worker that starts again, or beside another, computes as the first did. What was measured while others wanted the same
cores says nothing about the machine, and is neither used nor kept.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels import native
from worker.model.packed_linear import Group, Make, weight_of

PLAIN = "plain"  # torch, with the weights as they were loaded
NATIVE = "native"  # our library in C

_ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
_GROUPS = 4  # of a shape, in turns: one alone would stay in the cache
_REPEATS = 3
# What is preferred gives way only to what is clearly faster: as it was loaded, a layer's results depend on the batch.
_CLEARLY = 0.9
# Layers whose products are all native are computed as a whole, which saves more than another product does: of a step of
# SmolLM2 30 to 50 % (docs/performance.md).
_CLEARLY_WHOLE = 0.7
_MAX_PRODUCTS = 1 << 31  # multiplications of one product: the output head of 256 rows is no step's work
_MAX_WAITING = 0.1  # cores for which our threads may wait, on average; with more the machine is busy

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found."""

    chosen: dict[str, str]  # by shape
    seconds: float  # spent on it; 0: it was in the file


def tune(groups: Sequence[Group], makes: Mapping[str, Make], file: Path) -> Tuning:
    """The fastest of `makes`, the preferred first, or PLAIN, for each shape. Adds to `file` what it does not know yet.

    All groups have one dtype.
    """
    by_shape: dict[str, list[Group]] = {}
    for group in groups:
        by_shape.setdefault(group.name, []).append(group)
    dtype = weight_of(groups[0].linears[0]).dtype
    key = _key(dtype, makes)
    known: dict[str, str] = _read(file).get(key, {})
    missing = {name: members for name, members in by_shape.items() if name not in known}
    if not missing:
        return Tuning({name: known[name] for name in by_shape}, 0.0)
    began, waited = time.perf_counter(), _seconds_waited()
    times = {name: _times(members[:_GROUPS], makes) for name, members in missing.items()}
    seconds = time.perf_counter() - began
    waiting = (_seconds_waited() - waited) / seconds
    if waiting > _MAX_WAITING:
        log.warning("self_tune.disturbed", waiting_cores=round(waiting, 2), instead=next(iter(makes)), kept=False)
        return Tuning({name: known.get(name, next(iter(makes))) for name in by_shape}, seconds)
    chosen = choose(times, {name: len(members) for name, members in missing.items()})
    # Read again: another worker may have written meanwhile. What it found for the same shapes stays.
    everything = _read(file)
    known = known | chosen | everything.get(key, {})
    _write(file, everything | {key: known})
    return Tuning({name: known[name] for name in by_shape}, seconds)


def _key(dtype: torch.dtype, makes: Mapping[str, Make]) -> str:
    """What a measurement depends on, our kernels among it: changed ones are measured again."""
    machine = f"{_cpu()}, torch {torch.__version__}, kernels {native.made_of()}"
    return f"{machine}, {dtype}, {torch.get_num_threads()} threads, {' or '.join(makes)}, whole layers"


def choose(times: Mapping[str, Mapping[str, float]], counts: Mapping[str, int]) -> dict[str, str]:
    """Who multiplies each shape.

    Args:
        times: seconds by shape and who multiplies, the preferred first.
        counts: how many products have that shape. Those of more than one are decoder layers'.
    """
    chosen = {name: _fastest(by_make) for name, by_make in times.items()}
    layers = [name for name in times if counts[name] > 1 and NATIVE in times[name]]
    mixed = sum(counts[name] * times[name][chosen[name]] for name in layers)
    native = sum(counts[name] * times[name][NATIVE] for name in layers)
    if mixed >= _CLEARLY_WHOLE * native:
        chosen |= dict.fromkeys(layers, NATIVE)
    return chosen


def _fastest(times: Mapping[str, float]) -> str:
    best, *others = times
    for make in others:
        if times[make] < _CLEARLY * times[best]:
            best = make
    return best


def _times(groups: Sequence[Group], makes: Mapping[str, Make]) -> dict[str, float]:
    """Seconds of each of `makes` and PLAIN, over all row counts alike."""
    out_features, in_features = groups[0].shape
    rows = [n for n in _ROWS if n == 1 or n * out_features * in_features <= _MAX_PRODUCTS]
    dtype = weight_of(groups[0].linears[0]).dtype
    inputs = [torch.randn(n, in_features).to(dtype) for n in rows]
    times = {}
    for make in (*makes, PLAIN):
        products = _products(groups, makes.get(make))  # one kind after the other: copies take memory
        times[make] = prod(_seconds(partial(_call, products, x)) ** (1 / len(rows)) for x in inputs)
    return times


def _products(groups: Sequence[Group], make: Make | None) -> list[Callable[[Tensor], Tensor]]:
    weights = [[weight_of(linear) for linear in group.linears] for group in groups]
    if make is None:
        return [partial(F.linear, weight=part) for parts in weights for part in parts]
    return [make(torch.cat(parts), None) for parts in weights]


def _call(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> list[Tensor]:
    return [product(x) for product in products]


def _seconds(run: Callable[[], list[Tensor]]) -> float:
    """The least of a few runs."""
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


def _seconds_waited() -> float:
    """For how long our threads, taken together, could have run and had no core. Only Linux tells; 0 elsewhere."""
    waited = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waited += int(file.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # the thread has ended; a kernel that does not count
            continue
    return waited / 1e9


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return torch.backends.cpu.get_cpu_capability()
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines()
    facts = [
        line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "cpu family", "model\t"))
    ]
    return " ".join([*facts, torch.backends.cpu.get_cpu_capability()])


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):  # not there yet, or damaged: it is measured again
        return {}
    return content if isinstance(content, dict) else {}


def _write(file: Path, content: dict[str, Any]) -> None:
    """Complete or not at all. A folder that cannot be written costs the next start its measurement, nothing else."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{time.time_ns()}")
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.rename(file)
    except OSError:
        return
