"""Models whose files are wrong: what is ignored with a warning, and what is refused with a sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from transformers import AutoModelForCausalLM

from kernels import huge_pages
from worker.config import WorkerConfig
from worker.model.errors import ModelError
from worker.model.loader import load_model
from worker.model.memory import RunnerLimits
from worker.model.tiny import make_tiny
from worker.start import build


@pytest.fixture
def folder(tmp_path) -> Path:
    """A saved `tiny`."""
    for part in make_tiny():
        part.save_pretrained(tmp_path)
    return tmp_path


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("named", "kept", "ignored"),
    [
        (-1, (258,), ["-1"]),
        (259, (258,), ["259"]),
        ("x", (258,), ["'x'"]),
        (2.5, (258,), ["2.5"]),
        (True, (258,), ["True"]),
        ([5, [6]], (5,), ["[6]"]),
        ([5, None, False, 258, 10**9], (5, 258), ["None", "False", "1000000000"]),
        ([], (), []),
        (None, (258,), []),
        (0, (0,), []),
    ],
)
def test_only_ids_of_the_model_end_a_sequence(folder, named: Any, kept, ignored):
    """Whatever generation_config.json says; what is left out is named in the log. 258 is what config.json says."""
    change(folder / "generation_config.json", eos_token_id=named)
    with structlog.testing.capture_logs() as logs:
        assert load_model(str(folder)).eos_token_ids == kept
    warned = [entry["ignored"] for entry in logs if entry["event"] == "model.eos_ids_ignored"]
    assert warned == ([ignored] if ignored else [])


@pytest.mark.parametrize("num_added", [0, 1, 7])
def test_tokens_that_the_model_does_not_have_are_told(folder, num_added):
    """Added to the tokenizer while the embedding stayed as it was: one warning with how many and the first few."""
    tokenizer = make_tiny()[1]
    tokenizer.add_tokens([f"<pad{i}>" for i in range(num_added)])
    tokenizer.save_pretrained(folder)
    with structlog.testing.capture_logs() as logs:
        load_model(str(folder))
    warnings = [entry for entry in logs if entry["event"] == "model.lacks_tokens"]
    told = [(entry["number"], entry["tokens"][0]) for entry in warnings]
    assert told == ([(num_added, "259: <pad0>")] if num_added else [])
    assert all(len(entry["tokens"]) == min(num_added, 5) and "refused" in entry["reason"] for entry in warnings)


LIMITS = RunnerLimits(block_size=16, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.mark.parametrize(
    ("limits", "advice"),
    [
        (replace(LIMITS, num_blocks=10**9), "fewer --num-blocks"),
        (replace(LIMITS, num_blocks=1, num_host_blocks=10**9), "--num-host-blocks"),
        (replace(LIMITS, block_size=10**9), "KV pools"),
        (replace(LIMITS, max_num_seqs=10**9, max_num_batched_tokens=10**9), "fewer --max-num-seqs"),
    ],
)
def test_tiny_has_to_fit_too(limits, advice):
    """The built-in model is small; what it is served with need not be."""
    with pytest.raises(ModelError, match=f"'tiny' does not fit into memory.*{advice}"):
        load_model("tiny", limits=limits)
    load_model("tiny", limits=LIMITS)


@pytest.mark.parametrize("context", [-5, 0, 1, 2**31, 10**12])
def test_a_context_that_is_none(folder, context, monkeypatch):
    """Found out before the weights are read."""
    change(folder / "config.json", max_position_embeddings=context)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match=r"its context is .* tokens\. Correct it .*max_position_embeddings"):
        load_model(str(folder))


def test_a_context_that_no_memory_holds(folder):
    """The sentence names where the context comes from."""
    change(folder / "config.json", max_position_embeddings=2**31 - 1)
    with pytest.raises(ModelError, match=r"does not fit into memory: .*max_position_embeddings in its config"):
        load_model(str(folder), limits=LIMITS)


@pytest.mark.parametrize("name", ["x" * 5000, "/" + "x" * 300, "x" * 5000 + ".gguf"])
def test_a_name_that_no_file_can_have(name):
    """It is refused with its beginning, not with all of it."""
    with pytest.raises(ModelError, match=r"File name too long.*Name a folder.*`tiny`") as caught:
        load_model(name)
    assert len(str(caught.value)) < 500


def start_with(**options: Any) -> None:
    build(WorkerConfig(model="tiny", device="cpu", weights="plain", native_kernels=False, num_threads=1, **options))


def test_a_share_of_memory_that_holds_no_block():
    """A worker ends with a sentence that names the setting."""
    with pytest.raises(ModelError, match=r"--kv-memory-share 1e-15 .* holds no KV block .* a larger --kv-memory-share"):
        start_with(kv_memory_share=1e-15)


def test_memory_that_is_gone_at_the_last_moment(monkeypatch):
    """What was free when it was looked at is not, when the runner is made."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 14.6 TiB")

    monkeypatch.setattr("worker.start.TorchRunner", fail)
    with pytest.raises(ModelError, match=r"do not fit into memory \(Unable to allocate 14\.6 TiB\): take fewer"):
        start_with(num_blocks=10)


def test_pools_that_the_system_refuses():
    """As numpy's arrays: it is memory that lacks, whoever says so."""
    with pytest.raises(MemoryError, match="Unable to allocate"):
        huge_pages.allocate(2**62)
