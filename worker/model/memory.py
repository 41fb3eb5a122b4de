"""Whether a model will fit into memory, told before any of it is loaded."""

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig

from worker.model.errors import ModelError
from worker.model.kv_cache import available_ram
from worker.model.trial import ModelSize


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """What the runner will be made with: its memory is needed beside the weights."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int | None = None  # None: sized by what is left, at least the tokens of one step
    num_host_blocks: int | None = None  # None: as num_blocks
    device_bytes: int | None = None  # free on the GPU, for all but the host pool; None: there is none


def check_fits(
    name: str,
    config: PreTrainedConfig,
    size: ModelSize,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    limits: RunnerLimits | None,
) -> None:
    """Raises ModelError when weights, KV pools and workspace need more bytes than are free, in RAM or on the GPU."""
    parts = {"weights": size.num_weights * dtype.itemsize}
    if limits is not None:
        parts["KV pools"] = _kv_bytes(size, kv_dtype, limits)
        parts["workspace"] = workspace_bytes(config.get_text_config(), size, dtype, limits)
    free, where = available_ram(), "memory"
    if limits is not None and limits.device_bytes is not None:
        # The host pool of a GPU is sized by what is free. Weights are mapped, or read one after the other.
        free, where = limits.device_bytes, "the GPU's memory"
        parts["KV pools"] = _kv_bytes(size, kv_dtype, replace(limits, num_host_blocks=0))
    if sum(parts.values()) > free:
        each = ", ".join(f"{part} {_text(num_bytes)}" for part, num_bytes in parts.items())
        smaller = "a smaller model" if dtype.itemsize == 2 else "a smaller model, --dtype bfloat16"
        step = ""
        if max(parts, key=lambda part: parts[part]) == "workspace":
            step = (
                ", or fewer --max-num-seqs and --max-num-batched-tokens; a max_position_embeddings in its config.json "
                "that is longer than its context can be made shorter"
            )
        raise ModelError(
            f"model {name!r} does not fit into {where}: it needs {_text(sum(parts.values()))} ({each}) and "
            f"{_text(free)} are free. Take {smaller}, or fewer --num-blocks and --num-host-blocks{step}"
        )


def _kv_bytes(size: ModelSize, dtype: torch.dtype, limits: RunnerLimits) -> int:
    num_blocks = limits.num_blocks or -(-limits.max_num_batched_tokens // limits.block_size)
    num_host_blocks = num_blocks if limits.num_host_blocks is None else limits.num_host_blocks
    return (num_blocks + num_host_blocks) * limits.block_size * (size.kv_numbers_per_token or 0) * dtype.itemsize


def workspace_bytes(config: PreTrainedConfig, size: ModelSize, dtype: torch.dtype, limits: RunnerLimits) -> int:
    """An estimate: a layer's gathered context, the widest activations of a step, and logits in float32 three times."""
    context = getattr(config, "max_position_embeddings", None) or 2048
    gathered = context * (size.kv_numbers_per_token or 0) // config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None)
    inner = inner if isinstance(inner, int) else 4 * config.hidden_size
    activations = limits.max_num_batched_tokens * (4 * config.hidden_size + 3 * inner)
    return (gathered + activations) * dtype.itemsize + 3 * 4 * limits.max_num_seqs * config.vocab_size


def _text(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
