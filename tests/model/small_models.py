"""Random models of all families, small enough for a test, and what transformers itself makes of them."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SHARED_PREFIX = 40  # tokens, that most of the prompts begin with


def random_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with random weights, biases and norms too: what is zero or one hides what reads it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        for weight in model.parameters():
            if weight.numel() and (weight == weight.flatten()[0]).all():
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return model.to(dtype)


def own_attention(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that computes attention as transformers does."""
    copy = deepcopy(model)
    copy.set_attn_implementation("eager")
    return copy


def next_logits(reference: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """float32 [len(tokens), vocab_size]: the logits each of `tokens` was to be drawn from, in one plain forward."""
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([[*prompt, *tokens[:-1]]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].float()
