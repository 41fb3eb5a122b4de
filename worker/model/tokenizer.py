"""Text to tokens: a thin cover over a transformers tokenizer."""

import json
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from worker.engine.protocols import Detokenizer
from worker.model.detokenizer import ByteDetokenizer, WindowDetokenizer


class Tokenizer:
    """Encodes prompts, renders conversations, and makes the detokeniser that fits the vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        tokens = {i: token for token, i in tokenizer.get_vocab().items() if i not in special}
        decoder = _decoder_types(tokenizer)
        # Special tokens never reach it, and transformers' cover over the Rust decoder costs more than the decoding.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decode_text: Callable[[list[int]], str] = self.decode if backend is None else backend.decode
        self._token_bytes: list[bytes] | None = None
        self._is_byte: dict[int, bool] = {}
        if decoder == ["ByteLevel"]:
            self._token_bytes = _token_bytes(tokens)
        else:
            byte_fallback = "ByteFallback" in decoder
            self._is_byte = {i: byte_fallback and _is_byte_token(token) for i, token in tokens.items()}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the BOS token in front if the model's tokenizer adds it.

        An empty text is the BOS token alone, if there is one: something to start from.
        """
        token_ids = self._tokenizer(text, verbose=False)["input_ids"]
        bos = self._tokenizer.bos_token_id
        return token_ids if token_ids or bos is None else [bos]

    def render(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's turn begins.

        Raises ValueError if the model has no chat template, or its template refuses the messages.
        """
        if self._tokenizer.chat_template is None:
            raise ValueError("this model has no chat template: send `prompt` or `token_ids` in place of `messages`")
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`, without special tokens: what a detokeniser gives in pieces."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def new_detokenizer(self) -> Detokenizer:
        """A detokeniser for one choice."""
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes)
        return WindowDetokenizer(self._decode_text, self._is_byte)


def _decoder_types(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The steps of the tokenizers library's decoder, by type; empty for a tokenizer that is not built on it."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    decoder = json.loads(decoder.__getstate__())
    return [step["type"] for step in decoder.get("decoders", [decoder])]


def _token_bytes(tokens: dict[int, str]) -> list[bytes]:
    """By token id the bytes of a byte-level vocabulary; empty for ids that are not in `tokens`."""
    byte_of = {char: byte for byte, char in byte_level_alphabet().items()}
    table = [b""] * (max(tokens) + 1)
    for i, token in tokens.items():
        # A token outside the alphabet was added as plain text.
        plain = not all(char in byte_of for char in token)
        table[i] = token.encode() if plain else bytes(byte_of[char] for char in token)
    return table


def byte_level_alphabet() -> dict[int, str]:
    """Byte -> its character in byte-level vocabularies (GPT-2's table: printable Latin-1, the rest from U+0100 on)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet]
    return alphabet | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _is_byte_token(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
