"""What is done with a model's weights after loading, for the CPU: packed as it multiplies fastest, or made int8.

Who multiplies which layers (our library in C, oneDNN, or torch as they were loaded) is a short measurement on this
machine, kept in a file: a worker that starts again, or beside another, computes as the first did. Without it all layers
are packed that can be, for the library where there is one.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kernels import packed_product
from kernels.packed_product import Arena
from worker.model.errors import ModelError
from worker.model.fused_layers import replace_mlps, replace_norms
from worker.model.int8_linear import Int8Linear, why_not_int8
from worker.model.loader import LoadedModel
from worker.model.native_layers import replace_layers
from worker.model.packed_linear import (
    Group,
    Make,
    NativeLinear,
    PackedLinear,
    find_groups,
    onednn_serves,
    pack,
    weight_of,
)
from worker.model.trial import difference, our_logits

_TUNED_ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
_TUNED_LAYERS = 4  # of a shape, in turns: one alone would stay in the cache
_REPEATS = 3
# What is preferred gives way only to what is clearly faster: as it was loaded, a layer's results depend on the batch.
_CLEARLY = 0.9
_PLAIN = "plain"
_CHUNKS = ((0, 7), (7, 11), (11, 12))  # on which whole layers are tried; the last is a decode
_MAX_PRODUCTS = 1 << 31  # multiplications of one tuned product: the output head of 256 rows is no step's work
# By how much packing may change logits, of their size. Rounding makes 1e-6 in float32; in half precision it also makes
# experts change places.
_MAX_DIFFERENCE = {torch.float32: 1e-3}
_MAX_DIFFERENCE_HALF = 0.2


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """What was done, for the log."""

    num_layers: int  # that were packed
    num_products: int  # that they became
    num_native: int  # of those: multiplied by our library
    num_norms: int  # that became one operation each
    num_mlps: int  # gated feed-forward layers that became three
    num_decoder_layers: int  # decoder layers that are computed in C as a whole
    plain: tuple[str, ...]  # shapes that stayed as they were loaded because that is faster here
    difference: float  # of a short prompt's logits, by their size
    tuned_seconds: float  # 0: nothing was measured, or it was found in the file


def prepare_weights(loaded: LoadedModel, weights: str, tuning: Path | None = None) -> PreparedWeights:
    """Changes `loaded.model` in place. `weights`: `auto` (packed) or `int8`.

    tuning: the file with measurements; None: nothing is measured. Raises ModelError when the result is not the model's.
    """
    model, layers = loaded.model, loaded.layers
    if weights == "int8" and (reason := why_not_int8()):
        raise ModelError(f"--weights int8 cannot be had here: {reason}")
    with torch.inference_mode():
        before = our_logits(model, layers)
        makes = _makes(Arena()) if weights == "auto" else {"int8": Int8Linear}
        serves = _who_serves if weights == "auto" else onednn_serves
        groups = find_groups(model, lambda: our_logits(model, layers, ((0, 12),)), serves)
        seconds = 0.0
        if weights == "int8":
            chosen = dict.fromkeys(map(_name, groups), weights)
        elif tuning is not None and groups:
            seconds, chosen = _tune(groups, tuning)
        else:
            chosen = {_name(group): _who_serves(_dtype(group))[0] for group in groups}
        by_make = {make: [group for group in groups if chosen[_name(group)] == make] for make in makes}
        for make, members in by_make.items():
            pack(model, members, makes[make])
        num_norms, num_mlps = replace_norms(model), replace_mlps(model)
        num_decoder_layers = replace_layers(model, layers, lambda: our_logits(model, layers, _CHUNKS))
        changed = difference(before, our_logits(model, layers))
    limit = _MAX_DIFFERENCE.get(loaded.dtype, _MAX_DIFFERENCE_HALF)
    if weights == "auto" and not changed <= limit:
        raise ModelError(f"packing changed the model's results by {changed:.0%}: start with --weights plain")
    return PreparedWeights(
        num_layers=sum(len(group.linears) for members in by_make.values() for group in members),
        num_products=sum(map(len, by_make.values())),
        num_native=len(by_make.get("native", ())),
        num_norms=num_norms,
        num_mlps=num_mlps,
        num_decoder_layers=num_decoder_layers,
        plain=tuple(sorted(shape for shape, make in chosen.items() if make == _PLAIN)),
        difference=changed,
        tuned_seconds=seconds,
    )


def _name(group: Group) -> str:
    return "{}x{}".format(*group.shape)


def _makes(arena: Arena) -> dict[str, Make]:
    """What may take a layer's place, the preferred first."""
    return {"native": partial(NativeLinear, arena=arena), "onednn": PackedLinear}


def _who_serves(dtype: torch.dtype) -> list[str]:
    """Those of `_makes` that multiply in that dtype here."""
    serves = {"native": packed_product.serves, "onednn": onednn_serves}
    return [make for make, can in serves.items() if can(dtype)]


def _dtype(group: Group) -> torch.dtype:
    return weight_of(group.linears[0]).dtype


def _tune(groups: Sequence[Group], file: Path) -> tuple[float, dict[str, str]]:
    """Seconds spent, and what is fastest for each shape. Adds to `file` what it does not know yet."""
    by_shape: dict[str, list[Group]] = {}
    for group in groups:
        by_shape.setdefault(_name(group), []).append(group)
    dtype = _dtype(groups[0])
    who = " or ".join(_who_serves(dtype))
    key = f"{_cpu()}, torch {torch.__version__}, {dtype}, {torch.get_num_threads()} threads, {who}"
    known: dict[str, str] = _read(file).get(key, {})
    began = time.perf_counter()
    missing = [name for name in by_shape if name not in known]
    for name in missing:
        known[name] = _fastest(by_shape[name][:_TUNED_LAYERS])
    if missing:
        # Read again: another worker may have written meanwhile. What it found for the same shapes stays.
        everything = _read(file)
        known = known | everything.get(key, {})
        _write(file, everything | {key: known})
    seconds = time.perf_counter() - began if missing else 0.0
    return seconds, {name: known[name] for name in by_shape}


def _fastest(groups: Sequence[Group]) -> str:
    """Which of those that serve, or plain, over all row counts alike."""
    out_features, in_features = groups[0].shape
    rows = [n for n in _TUNED_ROWS if n == 1 or n * out_features * in_features <= _MAX_PRODUCTS]
    inputs = [torch.randn(n, in_features).to(_dtype(groups[0])) for n in rows]
    best, least = "", 0.0
    for make in (*_who_serves(_dtype(groups[0])), _PLAIN):
        products = _products(groups, make)  # one kind after the other: copies take memory
        seconds = prod(_seconds(partial(_call, products, x)) ** (1 / len(rows)) for x in inputs)
        if not best or seconds < _CLEARLY * least:
            best, least = make, seconds
    return best


def _products(groups: Sequence[Group], make: str) -> list[Callable[[Tensor], Tensor]]:
    weights = [[weight_of(linear) for linear in group.linears] for group in groups]
    if make == _PLAIN:
        return [partial(F.linear, weight=part) for parts in weights for part in parts]
    linear = _makes(Arena())[make]
    return [linear(torch.cat(parts), None) for parts in weights]


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
