"""How much memory loading takes, in a process of its own."""

import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from worker.model.tiny import make_tiny

MEASURE = """
import sys
from pathlib import Path
import torch
from worker.model.loader import load_model
from worker.model.runner import TorchRunner

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

load_model("tiny")  # what importing and trying out take is not the model's
before = peak()
model = load_model(sys.argv[1])
runner = TorchRunner(model, 200, 16, 8, 256, num_threads=1)
runner.cache.blocks.zero_()
print(peak() - before, sum(weight.nbytes for weight in model.model.parameters()), runner.cache.blocks.nbytes)
"""


@pytest.mark.slow
def test_weights_are_in_memory_once(tmp_path):
    """Loading 190 MiB and making a runner takes at most 1.3 times the weights and the KV pool, workspace included."""
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    with torch.random.fork_rng(devices=[]):
        LlamaForCausalLM(config).save_pretrained(tmp_path)
    make_tiny()[1].save_pretrained(tmp_path)
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250).stdout
    taken, weights, pool = map(int, out.split())
    assert weights > 190 * 2**20
    assert taken <= 1.3 * weights + pool, f"{taken / 2**20:.0f} MiB for {weights / 2**20:.0f} and {pool / 2**20:.0f}"
