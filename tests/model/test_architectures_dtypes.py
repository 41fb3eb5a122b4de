"""The dtypes of `--dtype`, on one family for each kind of attention."""

import pytest
import torch

from tests.model.reference import token_ids
from tests.model.small_models import make_prompts, next_logits, own_attention, random_model, serve
from worker.model.families import FAMILIES, small_config
from worker.model.loader import adopt
from worker.model.tiny import make_tiny

KINDS = (
    "llama",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "deepseek_v3",
    "gpt_oss",
    "llama4_text",
    "mimo_v2_flash",
)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-3), (torch.bfloat16, 0.15), (torch.float16, 0.02)],
    ids=["float32", "bfloat16", "float16"],
)
@pytest.mark.parametrize("name", KINDS)
def test_dtypes(name, dtype, tolerance):
    """Weights and KV in a dtype give the tokens of the library in that dtype, and logprobs that differ by its rounding.

    A token may be another where the library's logits for the two are as good as equal.
    """
    family = next(family for family in FAMILIES if family.model_type == name)
    model = random_model(small_config(family), dtype)
    reference = own_attention(model)
    loaded = adopt(name, model, make_tiny()[1])
    assert loaded.dtype == dtype
    prompts = make_prompts()
    served, _, _ = serve(loaded, prompts)
    differences = []
    for prompt, sampled in zip(prompts, served, strict=True):
        chosen = torch.tensor(token_ids(sampled))[:, None]
        want = next_logits(reference, prompt, token_ids(sampled))
        short_of_best = want.max(-1).values - want.gather(1, chosen)[:, 0]
        assert (short_of_best <= tolerance * want.std(-1)).all()
        logprobs = torch.tensor([token.logprob for token in sampled])
        differences.append((logprobs - want.log_softmax(-1).gather(1, chosen)[:, 0]).abs())
    assert torch.cat(differences).mean() <= tolerance
