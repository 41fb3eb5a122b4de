"""What transformers says of loading, told in sentences that say what to do."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
from safetensors import SafetensorError
from transformers import PreTrainedModel

from worker.model.checkpoint import Checkpoint
from worker.model.errors import ModelError

log = structlog.get_logger(__name__)

_NUM_SHOWN = 3
_NUMBERED = re.compile(r"(.*?)\.(\d+)\.")  # the list that a tensor is of, and its place there
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def check_loaded(name: str, model: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raises ModelError when the tensors of a checkpoint are not those of its configuration; warns of others.

    `info`: of transformers, which goes on with random numbers where a tensor lacks or has another shape, and leaves out
    what it has no place for.
    """
    if changed := sorted(info["mismatched_keys"]):
        each = _first([f"{key} is {_shape(stored)}, not {_shape(wanted)}" for key, stored, wanted in changed])
        raise ModelError(
            f"model {name!r}: {len(changed)} of its tensors have other shapes than its config.json says: {each}. Take "
            "weights and config.json of one model"
        )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"model {name!r} lacks {len(missing)} of its tensors, the first is {missing[0]}")
    unexpected = sorted(info["unexpected_keys"])
    if beyond := _beyond(unexpected, model):
        num_layers = model.config.get_text_config().num_hidden_layers
        raise ModelError(
            f"model {name!r} has more layers than its config.json says ({num_layers}): there are {len(beyond)} tensors "
            f"beyond, the first is {beyond[0]}. Take weights and config.json of one model"
        )
    if unexpected:
        log.warning("model.tensors_ignored", model=name, number=len(unexpected), tensors=unexpected[:_NUM_SHOWN])


def tokenizer_refusal(name: str, checkpoint: Checkpoint, error: Exception) -> ModelError:
    """Whatever the tokenizer's reader said: which files it needs, and what became of them."""
    beginning = f"the tokenizer of model {name!r} cannot be loaded"
    if checkpoint.gguf_file:
        return ModelError(f"{beginning} from its GGUF file: {reason_of(error)}. Take the model as safetensors")
    if not checkpoint.is_folder:
        return ModelError(f"{beginning}: {reason_of(error)}")
    missing = [file for file in _TOKENIZER_FILES if not (Path(checkpoint.source) / file).exists()]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return ModelError(
            f"{beginning}: {' and '.join(missing)} {verb} missing in {checkpoint.source}, and what is there is not "
            "enough. Copy them from where the model is from"
        )
    return ModelError(
        f"{beginning}: {' or '.join(_TOKENIZER_FILES)} in {checkpoint.source} is damaged, or of another kind "
        f"({reason_of(error)}). Copy or download them again"
    )


def load_refusal(name: str, error: Exception) -> ModelError:
    """Of anything else that a library said while it loaded a model."""
    if isinstance(error, SafetensorError):
        return ModelError(
            f"the weights of model {name!r} are damaged ({reason_of(error)}). Copy or download them again"
        )
    return ModelError(f"model {name!r} cannot be loaded: {reason_of(error)}")


def reason_of(error: Exception) -> str:
    """The first line says it; what follows may be the names of a hundred models. Without a full stop at its end."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, KeyError) and " " not in text:  # the key alone
        return f"its files lack {text!r}, or name it though it is unknown"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return reason.rstrip(".")


def _beyond(keys: Sequence[str], model: PreTrainedModel) -> list[str]:
    """The tensors of layers after the model's last: in the same list, with a larger number.

    Layers that guess several tokens ahead stand after the others in some checkpoints, and are of no use here.
    """
    lengths = _lists(model)
    num_more = getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0
    found = [(key, _NUMBERED.match(key)) for key in keys]
    return [key for key, at in found if at and at[1] in lengths and int(at[2]) >= lengths[at[1]] + num_more]


def _lists(model: PreTrainedModel) -> dict[str, int]:
    """The model's lists of layers, by name, with and without what the name of the whole begins with: their lengths."""
    lengths: dict[str, int] = {}
    for name in model.state_dict():
        if found := _NUMBERED.match(name):
            for known in (found[1], found[1].removeprefix(f"{model.base_model_prefix}.")):
                lengths[known] = max(lengths.get(known, 0), int(found[2]) + 1)
    return lengths


def _shape(size: Sequence[int]) -> str:
    return f"[{', '.join(str(number) for number in size)}]"


def _first(texts: Sequence[str]) -> str:
    more = len(texts) - _NUM_SHOWN
    return "; ".join(texts[:_NUM_SHOWN]) + (f"; and {more} more" if more > 0 else "")
