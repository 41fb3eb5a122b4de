"""Every family of causal language models: served as transformers computes it, or refused at load with the reason."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.model.plan_driver import PlanDriver
from tests.model.reference import generate_greedy, random_prompts, token_ids
from tests.model.small_models import PREFIX_LEN, make_prompts, next_logits, own_attention, random_model, serve
from worker.model.attention import AttentionLayer, PagedContext
from worker.model.errors import ModelError
from worker.model.families import FAMILIES, small_config
from worker.model.loader import adopt
from worker.model.table import table
from worker.model.tiny import make_tiny
from worker.model.trial import look_at, try_out

SERVED = {family.model_type: family for family in FAMILIES if family.refused is None}
REFUSED = {family.model_type: family for family in FAMILIES if family.refused is not None and family.tested}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny()[1]


@dataclass
class Observed:
    """What our attention was asked for."""

    num_forwards: int = 0
    num_calls: int = 0
    traits: set[str] = field(default_factory=set)


@pytest.fixture
def observed(monkeypatch) -> Observed:
    """Counts, from now on, the forwards and the layers that our attention computed."""
    seen, attend, init = Observed(), PagedContext.attend, PagedContext.__init__

    def observing_init(self, *args):
        seen.num_forwards += 1
        init(self, *args)

    def observing_attend(self, query, key, value, *args, **terms):
        seen.num_calls += 1
        heads = "MQA" if key.shape[1] == 1 else "MHA" if key.shape[1] == query.shape[1] else "GQA"
        seen.traits |= {heads, *(name for name in ("sinks", "softcap") if terms[name] is not None)}
        if key.shape[-1] != value.shape[-1]:
            seen.traits.add("two widths")
        return attend(self, query, key, value, *args, **terms)

    monkeypatch.setattr(PagedContext, "__init__", observing_init)
    monkeypatch.setattr(PagedContext, "attend", observing_attend)
    return seen


def traits(layers: Sequence[AttentionLayer]) -> set[str]:
    """What the layers' shapes and masks show."""
    found = set()
    if any(layer.visibility.sliding_window for layer in layers):
        found.add("window")
    if any(layer.visibility.chunk_size for layer in layers):
        found.add("chunks")
    if len({layer.visibility for layer in layers}) > 1:
        found.add("masks differ")
    if len({layer.kv_shape for layer in layers}) > 1:
        found.add("heads differ")
    return found


def claimed_traits(features: str) -> set[str]:
    """What a row of the table says of it."""
    words = {
        "GQA": "GQA",
        "MHA": "MHA",
        "MQA": "MQA",
        "MLA": "two widths",
        "keys wider": "two widths",
        "sinks": "sinks",
        "soft cap": "softcap",
        "sliding window": "window",
        "chunked": "chunks",
        "window, by layer": "masks differ",
        "chunked, by layer": "masks differ",
        "heads by layer": "heads differ",
    }
    found = {trait for word, trait in words.items() if word in features}
    return found | {"MHA"} if "MLA" in features else found


@pytest.mark.parametrize("name", SERVED)
def test_served_as_transformers_computes_it(name, tokenizer, observed):
    """Chunked, from cached blocks, swapped and computed again: tokens and their logprobs are transformers' own."""
    model = random_model(small_config(SERVED[name]))
    reference = own_attention(model)
    loaded = adopt(name, model, tokenizer)
    assert len(loaded.layers) >= model.config.get_text_config().num_hidden_layers
    prompts = make_prompts()
    observed.num_forwards = observed.num_calls = 0
    served, records, num_cached = serve(loaded, prompts)
    assert observed.num_forwards > 20
    assert observed.num_calls == observed.num_forwards * len(loaded.layers)
    assert observed.traits | traits(loaded.layers) == claimed_traits(SERVED[name].features)
    assert {p.mode for record in records for p in record.preempted} == {"swap", "recompute"}
    assert num_cached >= PREFIX_LEN
    for prompt, sampled in zip(prompts, served, strict=True):
        tokens = token_ids(sampled)
        want = next_logits(reference, prompt, tokens)
        assert tokens == want.argmax(-1).tolist()
        logprobs = want.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([t.logprob for t in sampled]), logprobs, atol=1e-3, rtol=1e-3)
    assert len({token.token_id for sampled in served for token in sampled}) > 4, "a model that repeats itself"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    """What we would answer wrongly for is refused before its weights are read, or when the loaded model is tried."""
    family = REFUSED[name]
    config = small_config(family)
    with pytest.raises(ModelError, match=family.refused) as caught:  # noqa: PT012 (whichever finds it)
        look_at(config)
        try_out(random_model(config))
    assert "cannot be served: " in str(caught.value)


def test_every_family_of_transformers_is_in_the_list():
    """A family that a new transformers brings needs a row, and a test with it."""
    assert sorted(family.model_type for family in FAMILIES) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_the_table_is_that_of_the_list():
    """docs/models.md is what the command makes of the list, and says that enough families pass."""
    page = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text()
    assert page == table(), "run: python -m worker.model.table > docs/models.md"
    assert page.count("| passes |") == len(SERVED) >= 45


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_served_as_transformers_generates(name, tokenizer):
    """More prompts, up to 300 tokens, in other batches: token by token what the library's own generate gives."""
    model = random_model(small_config(SERVED[name]))
    reference = own_attention(model)
    prompts = random_prompts([1, 2, 15, 16, 17, 23, 24, 25, 33, 90, 150, 300], 211)
    loaded = adopt(name, model, tokenizer)
    for budget in (40, 400):
        driver = PlanDriver.on(loaded, max_num_seqs=8, budget=budget)
        for prompt, tokens in zip(prompts, driver.generate(prompts, 16), strict=True):
            assert token_ids(tokens) == generate_greedy(reference, prompt, 16)
