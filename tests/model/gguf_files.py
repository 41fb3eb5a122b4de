"""A small Llama as llama.cpp would write it."""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from worker.model.tiny import make_tiny

_NORMAL, _CONTROL = 1, 3  # GGUF's token types
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(file: Path, quantise: bool = False) -> LlamaForCausalLM:
    """Writes a random model to `file` (matrices in Q8_0 if `quantise`), and returns it. Its tokens are those of `tiny`,
    and one merge, "ab", without which a GGUF tokenizer cannot be read."""
    tiny, tokenizer = make_tiny()
    config: LlamaConfig = tiny.config
    config.vocab_size = len(tokenizer) + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(file, "llama")
    _write_facts(writer, config, tokenizer)
    for name, weight in model.state_dict().items():
        array = _as_gguf(name, weight.numpy(), config)
        kind = gguf.GGMLQuantizationType.Q8_0 if quantise and array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_facts(writer: gguf.GGUFWriter, config: LlamaConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    writer.add_name("small")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = [*sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token.startswith("<|") else _NORMAL for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def _gguf_name(name: str) -> str:
    if name in _ENDS:
        return _ENDS[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.weight"


def _as_gguf(name: str, array: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """GGUF interleaves the two halves of each head's rotary dimensions."""
    if "q_proj" not in name and "k_proj" not in name:
        return array
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    halves = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(halves.reshape(array.shape))
