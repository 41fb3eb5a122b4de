import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    DogeConfig,
    FalconH1Config,
    GptOssConfig,
    Llama4TextConfig,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    StableLmConfig,
)

from tests.model.plan_driver import PlanDriver
from tests.model.reference import token_ids
from worker.model import fetch
from worker.model.errors import ModelError
from worker.model.loader import LoadedModel, adopt, default_cache_dir, load_model
from worker.model.tiny import make_tiny

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def adopt_small(config: PreTrainedConfig) -> LoadedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    return adopt("small", model, make_tiny()[1])


def test_tiny_says_what_it_is():
    """The built-in model needs no download, ends with its EOS, and knows its own measures."""
    model = load_model("tiny")
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids, model.bos_token_id) == (259, 4096, (258,), None)
    assert (model.num_layers, model.num_kv_heads, model.head_dim) == (2, 2, 16)
    assert model.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert not model.model.training


def test_tiny_is_always_the_same():
    """Its weights come from a seed of its own, and leave the process's random numbers alone."""
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, second = make_tiny()[0], make_tiny()[0]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    prompt = list(b"Once upon a time")
    tokens = PlanDriver.on(load_model("tiny"), max_num_seqs=1, budget=64).generate([prompt], 5)[0]
    assert token_ids(tokens) == [11, 168, 61, 205, 15]


def test_a_folder_is_loaded(tmp_path):
    """A saved model comes back with the ids that end it, in the dtype asked for, and reports its progress."""
    model, tokenizer = make_tiny()
    model.generation_config.eos_token_id = [5, 258]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reports = []
    loaded = load_model(str(tmp_path), dtype="bfloat16", progress=lambda what, share: reports.append((what, share)))
    assert loaded.eos_token_ids == (5, 258)
    assert loaded.dtype == torch.bfloat16
    assert loaded.tokenizer.encode("hi") == [104, 105]
    assert reports[-1] == ("ready", 1.0)
    assert [share for _, share in reports] == sorted(share for _, share in reports)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2),
            "0 of its 2 layers use",
        ),
        (
            BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2),
            "0 of its 2 layers use",
        ),
        (StableLmConfig(**SIZES), "does not hand the arguments of its forward on"),
        (DogeConfig(**SIZES), "attention mask of its own"),
        (GptOssConfig(**SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1), "not supported: s_aux"),
        (Llama4TextConfig(**SIZES, head_dim=8, num_local_experts=2, attention_chunk_size=8), "chunked local attention"),
        (BertConfig(**SIZES), "its results are others with our attention"),
        (FalconH1Config(**SIZES, mamba_d_ssm=16, mamba_n_heads=2, mamba_d_head=8), "its results are others"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_we_cannot_serve_is_refused(config, reason):
    """A model that we would answer wrongly for is refused at load, with the reason."""
    with pytest.raises(ModelError, match=reason):
        adopt_small(config)


def test_the_context_ends_where_we_would_differ():
    """Long rotary factors and windows that the layers do not tell us limit the context to where they play no role."""
    long_rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    phi3 = Phi3Config(**SIZES, rope_parameters=long_rope, original_max_position_embeddings=32)
    assert adopt_small(phi3).max_model_len == 32
    assert adopt_small(PhimoeConfig(**SIZES, num_local_experts=2, sliding_window=24)).max_model_len == 24
    assert adopt_small(MistralConfig(**SIZES, sliding_window=24)).max_model_len == 128


def test_a_model_that_fails_is_refused():
    """A forward that raises in the trial run is a refusal that quotes it, not a crash."""
    model, tokenizer = make_tiny()
    model.model.norm = torch.nn.LayerNorm(63)
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be served: a trial run failed"):
        adopt("x", model, tokenizer)


def test_layers_of_different_shapes_are_refused():
    """The KV cache has one shape for all layers."""
    model, tokenizer = make_tiny()
    attention = model.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    attention.num_key_value_groups = 1
    with pytest.raises(ModelError, match="different shapes"):
        adopt("x", model, tokenizer)


def test_a_name_that_is_nothing(monkeypatch):
    """A name that cannot be had says what to check and what works without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE") as caught:
        load_model("no-such-org/no-such-model")
    assert "`tiny`" in str(caught.value)


def test_folders_without_a_usable_model(tmp_path):
    """An empty folder, one without weights, and one of another kind of model are told apart."""
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model(str(tmp_path))
    model, tokenizer = make_tiny()
    tokenizer.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds no complete model"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_an_unknown_dtype():
    """Only the dtypes that are computed in are taken."""
    with pytest.raises(ModelError, match="float32, bfloat16, float16"):
        load_model("tiny", dtype="int3")


def test_the_cache_folder_is_configurable(monkeypatch, tmp_path):
    """CAROUSEL_CACHE names the cache folder; the default is in the home folder."""
    monkeypatch.setenv("CAROUSEL_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("CAROUSEL_CACHE")
    assert default_cache_dir().parts[-2:] == (".cache", "carousel")


def test_fetch_prepares_a_model_and_says_what_is_wrong(capsys, tmp_path):
    """The command that fills the cache ends with 0, or with 1 and the reason."""
    assert fetch.main("tiny") == 0
    assert fetch.main(str(tmp_path)) == 1
    assert "config.json is missing" in capsys.readouterr().err
