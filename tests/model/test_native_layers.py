"""Whole layers in C in the place of transformers': where they compute the same, and nowhere else."""

import pytest
import torch
from torch import nn

from tests.model.plan_driver import PlanDriver
from tests.model.reference import random_prompts, token_ids
from tests.model.small_models import (
    GREEDY_WITH_LOGPROBS,
    make_prompts,
    next_logits,
    own_attention,
    random_model,
    serve,
)
from worker.model.families import FAMILIES, small_config
from worker.model.loader import adopt, load_model
from worker.model.native_layers import ComputedBefore, NativeLayers
from worker.model.packed_linear import NativeLinear
from worker.model.tiny import make_tiny
from worker.model.weights import prepare_weights

SERVED = {family.model_type: family for family in FAMILIES if family.refused is None}
WHOLE = ["llama", "mistral", "qwen2", "qwen3", "granite", "seed_oss"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny()[1]


def prepared(name, tokenizer, change=None):
    model = random_model(small_config(SERVED[name]))
    if change is not None:
        change(model)
    reference = own_attention(model)
    loaded = adopt(name, model, tokenizer)
    return reference, loaded, prepare_weights(loaded, "auto")


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", WHOLE)
def test_a_model_of_the_kind_is_computed_whole(name, tokenizer):
    """All layers in one call: chunked, shared, preempted and resumed as transformers computes it."""
    reference, loaded, done = prepared(name, tokenizer)
    assert done.num_decoder_layers == 2
    modules = list(loaded.model.modules())
    assert [type(m) for m in modules if isinstance(m, NativeLayers | ComputedBefore)] == [NativeLayers, ComputedBefore]
    prompts = make_prompts()
    served, records, _ = serve(loaded, prompts)
    assert {p.mode for record in records for p in record.preempted} == {"swap", "recompute"}
    for prompt, sampled in zip(prompts, served, strict=True):
        want = next_logits(reference, prompt, token_ids(sampled))
        assert token_ids(sampled) == want.argmax(-1).tolist()


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", ["gemma2", "olmo2", "cohere", "llama4_text", "ministral3", "mixtral"])
def test_others_keep_their_layers(name, tokenizer):
    """Norms elsewhere, parallel parts, experts, queries scaled by position."""
    _, loaded, done = prepared(name, tokenizer)
    assert done.num_decoder_layers == 0
    assert not any(isinstance(m, NativeLayers) for m in loaded.model.modules())


def _scaled(attention: nn.Module) -> None:
    """Attention that adds something of its own from position 100,000 on: no short prompt shows it."""
    original = attention.forward

    def forward(hidden_states, *args, **kwargs):
        far = (kwargs["position_ids"] > 100_000).to(hidden_states.dtype)[..., None]
        return original(hidden_states * (1 + far), *args, **kwargs)

    attention.forward = forward


@pytest.mark.usefixtures("native_kernels")
def test_a_layer_that_is_another_in_one_place_keeps_it_there(tokenizer):
    """Runs end where a layer adds what ours does not know: a hook, or what only far positions show."""

    def hook(model):
        model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, out: out * 1.5)

    _, loaded, done = prepared("llama", tokenizer, hook)
    assert done.num_decoder_layers == 1
    assert [type(layer).__name__ for layer in loaded.model.model.layers] == ["LlamaDecoderLayer", "NativeLayers"]
    _, _, done = prepared("llama", tokenizer, lambda model: _scaled(model.model.layers[1].self_attn))
    assert done.num_decoder_layers == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_the_library_or_in_half_precision_layers_stay(dtype, native_or_not):
    """Torch computes what it computed."""
    loaded = load_model("tiny", dtype=dtype)
    done = prepare_weights(loaded, "auto")
    assert done.num_decoder_layers == (2 if native_or_not and dtype == "float32" else 0)


@pytest.fixture(params=[False, True])
def native_or_not(request):
    if request.param:
        request.getfixturevalue("native_kernels")
    return request.param


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_tokens_do_not_depend_on_chunks_by_one_bit(kv_dtype):
    """The same log-probabilities whether prompts are computed at once or in chunks, alone or beside others."""
    prompts = random_prompts([1, 30, 70, 300, 17], 256)
    results = []
    for seats, budget in ((5, 512), (5, 33), (1, 1000), (1, 7)):
        loaded = load_model("tiny", kv_dtype=kv_dtype)
        prepare_weights(loaded, "auto")
        assert any(isinstance(m, NativeLinear) for m in loaded.model.modules())
        driver = PlanDriver.on(loaded, max_num_seqs=seats, budget=budget)
        results.append(driver.generate(prompts, 6, [GREEDY_WITH_LOGPROBS] * len(prompts)))
    assert all(result == results[0] for result in results)


@pytest.mark.usefixtures("native_kernels")
def test_one_model_over_two_caches():
    """Two runners of one model: each over its own keys and values."""
    loaded = load_model("tiny")
    prepare_weights(loaded, "auto")
    prompts = random_prompts([20, 40], 256)
    want = [PlanDriver.on(loaded, max_num_seqs=1, budget=64).generate([prompt], 5)[0] for prompt in prompts]
    drivers = [PlanDriver.on(loaded, max_num_seqs=1, budget=64) for _ in prompts]
    with torch.inference_mode():
        got = [driver.generate([prompt], 5)[0] for driver, prompt in zip(drivers, prompts, strict=True)]
        got_again = [driver.generate([prompt], 5)[0] for driver, prompt in zip(drivers, prompts[::-1], strict=True)]
    assert got == want
    assert got_again == want[::-1]
