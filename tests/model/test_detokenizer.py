"""Detokenisers against decoding everything at once."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from worker.model.detokenizer import WindowDetokenizer
from worker.model.tiny import make_tiny
from worker.model.tokenizer import Tokenizer, byte_level_alphabet

WORDS = ["▁", "▁▁", "a", "b", "▁a", "ab", "▁hello", "é", "▁日", "本", "🎉", "\ufffd", "<0x", "."]


def byte_level() -> Tokenizer:
    """One token per byte, some merges that cut characters, special and plain added tokens, and an unused id."""
    alphabet = byte_level_alphabet()
    vocab = {char: byte for byte, char in alphabet.items()}
    pieces = ["日".encode()[:2], "🎉".encode()[1:], b"hello", b" \xff", "é!".encode()]
    for piece in pieces:
        vocab["".join(alphabet[byte] for byte in piece)] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<plain>"), AddedToken("日本 word")])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def sentencepiece(*steps: decoders.Decoder) -> Tokenizer:
    """Pieces with a space mark, byte fallback, and a special token."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(WORDS)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(list(steps))
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


TOKENIZERS = {
    "byte level": byte_level(),
    "tiny": Tokenizer(make_tiny()[1]),
    "llama": sentencepiece(
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ),
    "gemma": sentencepiece(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
    "metaspace": sentencepiece(decoders.Metaspace("▁", "always")),
}
NUM_IDS = 275  # more than any of them has


def pieces_of(tokenizer: Tokenizer, token_ids: Iterable[int]) -> list[str]:
    detokenizer = tokenizer.new_detokenizer()
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_pieces_make_up_the_text(name, data):
    """Whatever the tokens, half characters and unused ids included, the pieces joined are the decoded whole."""
    token = st.integers(0, NUM_IDS) | st.sampled_from([*"日本🎉é\ufffd".encode()])
    token_ids = data.draw(st.lists(token, max_size=40))
    tokenizer = TOKENIZERS[name]
    assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", ["byte level", "tiny", "llama", "gemma"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20))
def test_no_half_character_and_no_needless_wait(name, text):
    """Text cut into bytes comes out in whole characters; nothing but an unfinished one is held back."""
    tokenizer = TOKENIZERS[name]
    detokenizer = tokenizer.new_detokenizer()
    got = "".join(detokenizer.feed(byte) for byte in text.encode())
    assert text.startswith(got) or tokenizer.decode(list(text.encode())).startswith(got)
    if name in ("byte level", "tiny"):
        assert got == text
    assert got + detokenizer.flush() == tokenizer.decode(list(text.encode()))


def test_a_character_comes_with_its_last_byte():
    """An emoji of four tokens shows when the fourth has come, and an unfinished one at the end becomes U+FFFD."""
    emoji = list("🎉".encode())
    assert pieces_of(TOKENIZERS["tiny"], emoji) == ["", "", "", "🎉", ""]
    assert pieces_of(TOKENIZERS["tiny"], emoji[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_give_no_text():
    """A special token in the middle is silent, and does not break a character that it cuts."""
    tokenizer = TOKENIZERS["tiny"]
    (end,) = tokenizer.encode("<|im_end|>")
    first, *rest = "é".encode()
    assert pieces_of(tokenizer, [ord("a"), end, first, end, *rest]) == ["a", "", "", "", "é", ""]


def test_each_byte_of_a_broken_run_shows_with_byte_fallback():
    """Sentencepiece turns every byte of a run that is no text into U+FFFD; the pieces say the same, at its end."""
    broken = [*"日".encode(), 0xFF]
    assert pieces_of(TOKENIZERS["llama"], [*broken, 258]) == ["", "", "", "", "\ufffd" * 4 + "a", ""]


@pytest.mark.parametrize("is_byte", [False, True])
def test_a_token_costs_the_same_at_any_position(is_byte):
    """Also in a long run of broken bytes nothing is decoded again and again."""
    decoded = []
    detokenizer = WindowDetokenizer(lambda ids: decoded.extend(ids) or "\ufffd" * len(ids), {7: is_byte})
    text = "".join(detokenizer.feed(7) for _ in range(1000)) + detokenizer.flush()
    assert text == "\ufffd" * 1000
    assert len(decoded) < 20 * 1000
