"""The built-in model `tiny`: random, byte-level, made in process in a fraction of a second.

It talks nonsense, but it is a real causal model with a real tokenizer and chat template: every path of the service
runs on it, without a download. Its weights come from a fixed seed.
"""

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from worker.model.tokenizer import byte_level_alphabet

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SEED = 20_26


def make_tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The model (float32, 0.1 million parameters, context 4096) and its tokenizer: one token per byte, no BOS."""
    tokenizer = _make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        # Untied and widely spread: with the defaults greedy decoding repeats one token, and equality tests pass
        # whatever they compare.
        tie_word_embeddings=False,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Special tokens keep a logit of 0, far below the largest: the model hardly ever ends by itself.
        model.lm_head.weight[[tokenizer.convert_tokens_to_ids(token) for token in _SPECIAL_TOKENS]] = 0.0
    return model, tokenizer


def _make_tokenizer() -> PreTrainedTokenizerFast:
    # A token's id is its byte.
    vocab = {char: byte for byte, char in byte_level_alphabet().items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")  # noqa: S106
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer
