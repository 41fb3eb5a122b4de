"""What transformers itself generates, and the prompts to compare on."""

import random
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from worker.engine.outputs import SampledToken

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 100, 150, 200, 256, 399, 400)


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def generate_greedy(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """`max_tokens` greedy tokens of the library's own loop, whatever they are."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # else prompt tokens that equal the padding token would be hidden
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def token_ids(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]
