"""What is done with a model's weights after loading, for the CPU: packed as it multiplies fastest, or made int8.

Who multiplies which layers (our library in C, oneDNN, or torch as they were loaded) is measured once (`self_tune`).
Without that all layers are packed that can be, for the library where there is one.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kernels import packed_product
from kernels.packed_product import Arena
from worker.model.errors import ModelError
from worker.model.fused_layers import replace_mlps, replace_norms
from worker.model.int8_linear import Int8Linear, why_not_int8
from worker.model.loader import LoadedModel
from worker.model.native_layers import replace_layers
from worker.model.packed_linear import (
    Make,
    NativeLinear,
    PackedLinear,
    find_groups,
    onednn_serves,
    pack,
)
from worker.model.self_tune import NATIVE, PLAIN, tune
from worker.model.trial import difference, our_logits

_CHUNKS = ((0, 7), (7, 11), (11, 12))  # on which whole layers are tried; the last is a decode
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
            chosen = {group.name: weights for group in groups}
        elif tuning is not None and groups:
            found = tune(groups, {make: makes[make] for make in _who_serves(loaded.dtype)}, tuning)
            chosen, seconds = found.chosen, found.seconds
        else:
            chosen = {group.name: _who_serves(loaded.dtype)[0] for group in groups}
        by_make = {make: [group for group in groups if chosen[group.name] == make] for make in makes}
        for make, members in by_make.items():
            pack(model, members, makes[make])
        num_norms, num_mlps = replace_norms(model), replace_mlps(model)
        num_decoder_layers = replace_layers(model, layers, lambda: our_logits(model, layers, _CHUNKS))
        changed = difference(before, our_logits(model, layers))
    _check(changed, weights, loaded.dtype)
    return PreparedWeights(
        num_layers=sum(len(group.linears) for members in by_make.values() for group in members),
        num_products=sum(map(len, by_make.values())),
        num_native=len(by_make.get(NATIVE, ())),
        num_norms=num_norms,
        num_mlps=num_mlps,
        num_decoder_layers=num_decoder_layers,
        plain=tuple(sorted(shape for shape, make in chosen.items() if make == PLAIN)),
        difference=changed,
        tuned_seconds=seconds,
    )


def _check(changed: float, weights: str, dtype: torch.dtype) -> None:
    """Raises ModelError when the results are not the model's: beyond rounding, or for int8 no numbers at all."""
    # Not "above the limit": NaN is above nothing.
    if weights == "auto" and not changed <= _MAX_DIFFERENCE.get(dtype, _MAX_DIFFERENCE_HALF):
        raise ModelError(f"packing changed the model's results by {changed:.0%}: start with --weights plain")
    if not math.isfinite(changed):
        raise ModelError("with weights of 8 bits the model's results are not numbers: start with --weights plain")


def _makes(arena: Arena) -> dict[str, Make]:
    """What may take a layer's place, the preferred first."""
    return {NATIVE: partial(NativeLinear, arena=arena), "onednn": PackedLinear}


def _who_serves(dtype: torch.dtype) -> list[str]:
    """Those of `_makes` that multiply in that dtype here."""
    serves = {NATIVE: packed_product.serves, "onednn": onednn_serves}
    return [make for make, can in serves.items() if can(dtype)]
