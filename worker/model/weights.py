"""What is done with a model's weights after loading, for the CPU: packed as it multiplies fastest, or made int8.

Which layers are packed is a short measurement on this machine, kept in a file: a worker that starts again, or beside
another, computes as the first did. Without it all layers are packed that can be.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker.model.errors import ModelError
from worker.model.fused_layers import replace_mlps, replace_norms
from worker.model.int8_linear import Int8Linear, why_not_int8
from worker.model.loader import LoadedModel
from worker.model.packed_linear import Group, PackedLinear, find_groups, pack, weight_of
from worker.model.trial import difference, our_logits

_TUNED_ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
_TUNED_LAYERS = 4  # of a shape, in turns: one alone would stay in the cache
_REPEATS = 3
# A layer stays as it was loaded only where that is clearly faster: packed, its results do not depend on the batch.
_CLEARLY = 0.9
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
    num_norms: int  # that became one operation each
    num_mlps: int  # gated feed-forward layers that became three
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
        groups = find_groups(model, lambda: our_logits(model, layers, ((0, 12),)))
        seconds, plain = 0.0, frozenset()
        if weights == "auto" and tuning is not None and groups:
            seconds, plain = _tune(groups, tuning)
        groups = [group for group in groups if _name(group) not in plain]
        pack(model, groups, Int8Linear if weights == "int8" else PackedLinear)
        num_norms, num_mlps = replace_norms(model), replace_mlps(model)
        changed = difference(before, our_logits(model, layers))
    limit = _MAX_DIFFERENCE.get(loaded.dtype, _MAX_DIFFERENCE_HALF)
    if weights == "auto" and not changed <= limit:
        raise ModelError(f"packing changed the model's results by {changed:.0%}: start with --weights plain")
    return PreparedWeights(
        num_layers=sum(len(group.linears) for group in groups),
        num_products=len(groups),
        num_norms=num_norms,
        num_mlps=num_mlps,
        plain=tuple(sorted(plain)),
        difference=changed,
        tuned_seconds=seconds,
    )


def _name(group: Group) -> str:
    return "{}x{}".format(*group.shape)


def _tune(groups: Sequence[Group], file: Path) -> tuple[float, frozenset[str]]:
    """Seconds spent, and the shapes that are faster as they are. Adds to `file` what it does not know yet."""
    by_shape: dict[str, list[Group]] = {}
    for group in groups:
        by_shape.setdefault(_name(group), []).append(group)
    dtype = weight_of(groups[0].linears[0]).dtype
    key = f"{_cpu()}, torch {torch.__version__}, {dtype}, {torch.get_num_threads()} threads"
    known: dict[str, bool] = _read(file).get(key, {})
    began = time.perf_counter()
    missing = [name for name in by_shape if name not in known]
    for name in missing:
        known[name] = _plain_is_faster(by_shape[name][:_TUNED_LAYERS])
    if missing:
        # Read again: another worker may have written meanwhile. What it found for the same shapes stays.
        everything = _read(file)
        known = known | everything.get(key, {})
        _write(file, everything | {key: known})
    seconds = time.perf_counter() - began if missing else 0.0
    return seconds, frozenset(name for name in by_shape if known[name])


def _plain_is_faster(groups: Sequence[Group]) -> bool:
    """Whether the layers as loaded beat the packed product, over all row counts alike."""
    weights = [[weight_of(linear) for linear in group.linears] for group in groups]
    packed = [PackedLinear(torch.cat(parts), None) for parts in weights]
    out_features, in_features = groups[0].shape
    ratio, num = 1.0, 0
    for rows in _TUNED_ROWS:
        if num and rows * out_features * in_features > _MAX_PRODUCTS:
            break
        x = torch.randn(rows, in_features).to(weights[0][0].dtype)
        plain = _seconds(lambda x=x: [F.linear(x, part) for parts in weights for part in parts])
        ratio *= plain / _seconds(lambda x=x: [linear(x) for linear in packed])
        num += 1
    return ratio ** (1 / num) < _CLEARLY


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
