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
from worker.model.weights import prepare_weights

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

load_model("tiny")  # what importing and trying out take is not the model's
before = peak()
model = load_model(sys.argv[1])
weights = sum(weight.nbytes for weight in model.model.parameters())
if sys.argv[2] != "plain":
    prepare_weights(model, sys.argv[2])
runner = TorchRunner(model, 200, 16, 8, 256, num_threads=1)
runner.cache.blocks.zero_()
print(peak() - before, weights, runner.cache.blocks.nbytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["plain", "auto", "int8"])
def test_weights_are_in_memory_once(tmp_path, weights):
    """Loading 190 MiB, packing them and making a runner takes at most 1.3 times the weights, and the KV pool."""
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
    command = [sys.executable, "-c", MEASURE, str(tmp_path), weights]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250).stdout
    taken, loaded, pool = map(int, out.split())
    assert loaded > 190 * 2**20
    assert taken <= 1.3 * loaded + pool, f"{taken / 2**20:.0f} MiB for {loaded / 2**20:.0f} and {pool / 2**20:.0f}"
