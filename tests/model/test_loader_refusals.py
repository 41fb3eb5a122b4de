"""Models whose files are wrong: what is ignored with a warning, and what is refused with a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from worker.model.loader import load_model
from worker.model.tiny import make_tiny


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
    assert [entry["ignored"] for entry in logs if entry["event"] == "model.eos_ids_ignored"] == [ignored] * bool(ignored)


@pytest.mark.parametrize("num_added", [0, 1, 7])
def test_tokens_that_the_model_does_not_have_are_told(folder, num_added):
    """Added to the tokenizer while the embedding stayed as it was: one warning with how many and the first few."""
    tokenizer = make_tiny()[1]
    tokenizer.add_tokens([f"<pad{i}>" for i in range(num_added)])
    tokenizer.save_pretrained(folder)
    with structlog.testing.capture_logs() as logs:
        load_model(str(folder))
    warnings = [entry for entry in logs if entry["event"] == "model.lacks_tokens"]
    assert [(entry["number"], entry["tokens"][0]) for entry in warnings] == [(num_added, "259: <pad0>")] * bool(num_added)
    assert all(len(entry["tokens"]) == min(num_added, 5) and "refused" in entry["reason"] for entry in warnings)
