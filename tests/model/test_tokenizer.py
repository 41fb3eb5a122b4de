import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from worker.model.tiny import make_tiny
from worker.model.tokenizer import Tokenizer


@pytest.fixture
def tiny() -> Tokenizer:
    return Tokenizer(make_tiny()[1])


def with_bos() -> PreTrainedTokenizerFast:
    backend = Backend(models.WordLevel({"<s>": 0, "hello": 1, "[U]": 2}, unk_token="[U]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def test_tiny_has_a_token_per_byte(tiny):
    """The built-in vocabulary is the bytes, in order, without a BOS token."""
    assert tiny.encode("aé") == list("aé".encode())
    assert tiny.decode(list("日本 🎉".encode())) == "日本 🎉"


def test_bos_is_added_only_where_the_tokenizer_does():
    """A tokenizer with a BOS rule gets its BOS, also for an empty prompt; the rendered conversation decides itself."""
    tokenizer = with_bos()
    assert Tokenizer(tokenizer).encode("hello") == [0, 1]
    assert Tokenizer(tokenizer).encode("") == [0]
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert Tokenizer(tokenizer).render([{"role": "user", "content": "hello"}]) == [1]


def test_an_empty_prompt_is_the_bos_token_if_there_is_one(tiny):
    """Also where the tokenizer adds none to other texts: it is something to start from. Without one, nothing is."""
    tokenizer = with_bos()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    assert Tokenizer(tokenizer).encode("hello") == [1]
    assert Tokenizer(tokenizer).encode("") == [0]
    assert tiny.encode("") == []


def test_render_ends_where_the_assistant_begins(tiny):
    """A conversation is rendered with the model's template, its markers as special tokens."""
    token_ids = tiny.render([{"role": "user", "content": "hi"}])
    (start,) = tiny.encode("<|im_start|>")
    (end,) = tiny.encode("<|im_end|>")
    assert token_ids == [start, *b"user\nhi", end, *b"\n", start, *b"assistant\n"]


def test_render_says_why_it_cannot():
    """Without a template, and with messages that the template refuses, ValueError says so in a sentence."""
    tokenizer = with_bos()
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(tokenizer).render([{"role": "user", "content": "hello"}])
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        Tokenizer(tokenizer).render([{"role": "user", "content": "hello"}])
    tokenizer.chat_template = "{{ 'a' + messages[0]['content'] }}"
    with pytest.raises(ValueError, match="refuses these messages"):
        Tokenizer(tokenizer).render([{"role": "user"}])
