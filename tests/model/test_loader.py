import contextlib
import json
import shutil
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    Gemma3TextConfig,
    MambaConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
)

from tests.model.gguf_files import write_gguf
from tests.model.plan_driver import PlanDriver
from tests.model.reference import generate_greedy, token_ids
from worker.model import fetch
from worker.model.checkpoint import Checkpoint, find_checkpoint, hub_answers
from worker.model.errors import ModelError
from worker.model.kv_cache import KVShape
from worker.model.loader import LoadedModel, adopt, default_cache_dir, load_model
from worker.model.memory import RunnerLimits
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
    assert [layer.kv_shape for layer in model.layers] == [KVShape(num_kv_heads=2, head_dim=16)] * 2
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


@pytest.fixture
def folder(tmp_path) -> Path:
    """A saved `tiny`."""
    model, tokenizer = make_tiny()
    model.generation_config.eos_token_id = [5, 258]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_is_loaded(folder):
    """A saved model comes back with the ids that end it, in the dtype asked for, and reports its progress."""
    reports = []
    loaded = load_model(str(folder), dtype="bfloat16", progress=lambda what, share: reports.append((what, share)))
    assert loaded.eos_token_ids == (5, 258)
    assert loaded.dtype == torch.bfloat16
    assert loaded.tokenizer.encode("hi") == [104, 105]
    assert reports[-1] == ("loaded", 1.0)
    assert len([what for what, _ in reports if what == "loading the weights"]) > 10
    assert [share for _, share in reports] == sorted(share for _, share in reports)


def test_weights_of_the_dtype_asked_for_stay_in_the_file(folder):
    """They are mapped, not copied: no weight lies in memory that the process allocated."""
    loaded = load_model(str(folder))
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if line.endswith("/model.safetensors")]
    spans = [(int(begin, 16), int(end, 16)) for begin, end in ranges]
    for weight in loaded.model.parameters():
        assert any(begin <= weight.data_ptr() < end for begin, end in spans)


def test_shards_are_loaded_and_missed(folder):
    """Weights in several files come back; one that is not there is named."""
    shutil.rmtree(folder)
    model, tokenizer = make_tiny()
    model.save_pretrained(folder, max_shard_size="100KB")
    tokenizer.save_pretrained(folder)
    loaded = load_model(str(folder))
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), model.parameters(), strict=True))
    (folder / "model-00002-of-00005.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 of 5 files are missing, the first is model-00002-of-00005\.safetensors"):
        load_model(str(folder))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x"')
    with pytest.raises(ModelError, match=r"index\.json is cut off"):
        load_model(str(folder))


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.01, 0.5, 0.999])
def test_a_file_that_is_cut_off(folder, share):
    """Wherever a copy was broken off, in the header or in the tensors, the file is named and nothing is loaded."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match=r"model\.safetensors is cut off"):
        load_model(str(folder))


def test_a_file_of_another_kind(folder):
    """A page that a proxy put in the place of the weights."""
    page = b"<html>please log in</html>" * 10
    (folder / "model.safetensors").write_bytes(len(page).to_bytes(8, "little") + page)
    with pytest.raises(ModelError, match="is no safetensors file"):
        load_model(str(folder))


def test_weights_of_a_wrong_dtype(folder):
    """Matrices of whole numbers are quantised weights: not read as if they were the weights themselves."""
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"stores model\.layers\.0\.mlp\.up_proj\.weight as I8: quantised weights"):
        load_model(str(folder))


def test_a_checkpoint_that_lacks_a_tensor(folder):
    """transformers would go on with random numbers in its place."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of its tensors, the first is model\.layers\.1\.self_attn\.q_proj"):
        load_model(str(folder))


def test_pickles_are_not_read(folder):
    """Weights that would be unpickled are refused."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickles"):
        load_model(str(folder))


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_quantised_weights_are_refused(folder):
    """A configuration that says so is believed before anything is read."""
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match=r"quantised \(gptq\)"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BartConfig(d_model=16, encoder_layers=1, decoder_layers=1), "half of an encoder-decoder model"),
        (MambaConfig(hidden_size=16, num_hidden_layers=2), "keeps a state beside its keys and values"),
        (BloomConfig(hidden_size=16, n_layer=2, n_head=2), "attention is written inside the model"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_cannot_be_served_is_told_before_weights_are_read(folder, monkeypatch, config, reason):
    """The configuration alone is enough for these."""
    config.save_pretrained(folder)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match=reason):
        load_model(str(folder))


def test_what_does_not_fit_into_memory_is_told_before_weights_are_read(folder, monkeypatch):
    """Weights, KV pools and workspace against what is free, each named; what fits is loaded."""
    weights = 4 * sum(weight.numel() for weight in make_tiny()[0].parameters())
    block = 16 * load_model("tiny").bytes_per_token
    limits = RunnerLimits(block_size=16, max_num_seqs=1, max_num_batched_tokens=1, num_blocks=100, num_host_blocks=300)
    free = weights + 400 * block
    monkeypatch.setattr("worker.model.memory.available_ram", lambda: free)
    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
        with pytest.raises(ModelError, match=r"needs .*weights .*KV pools .*workspace .* are free.*--dtype bfloat16"):
            load_model(str(folder), limits=limits)
    load_model(str(folder))
    load_model(str(folder), limits=replace(limits, num_blocks=10, num_host_blocks=None))
    free = weights - 1
    with pytest.raises(ModelError, match="does not fit into memory"):
        load_model(str(folder))
    load_model(str(folder), dtype="float16")


@pytest.mark.parametrize("quantise", [False, True])
def test_a_gguf_file_is_loaded(tmp_path, quantise):
    """By its name or its folder's: the weights that were written, as far as they were quantised, and the tokenizer."""
    model = write_gguf(tmp_path / "small.gguf", quantise)
    for name in (str(tmp_path / "small.gguf"), str(tmp_path)):
        loaded = load_model(name)
        assert loaded.eos_token_ids == (258,)
        assert loaded.max_model_len == 4096
        assert loaded.tokenizer.encode("cab<|im_end|>") == [99, 259, 258]
        assert loaded.tokenizer.decode([99, 259, 258]) == "cab"
        for name_of, weight in model.state_dict().items():
            difference = (loaded.model.state_dict()[name_of] - weight).abs().max()
            assert difference <= (0.02 if quantise else 0.0) * weight.abs().max()
    if not quantise:
        prompt = loaded.tokenizer.encode("Once upon a time")
        tokens = PlanDriver.on(loaded, max_num_seqs=1, budget=64).generate([prompt], 8)[0]
        assert token_ids(tokens) == generate_greedy(model, prompt, 8)


def test_gguf_files_that_cannot_be_loaded(tmp_path):
    """One that is not there, one that is cut off, and several to choose from."""
    with pytest.raises(ModelError, match=r"no\.gguf does not exist"):
        load_model(str(tmp_path / "no.gguf"))
    write_gguf(tmp_path / "small.gguf")
    whole = (tmp_path / "small.gguf").read_bytes()
    (tmp_path / "small.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="is cut off or damaged"):
        load_model(str(tmp_path / "small.gguf"))
    (tmp_path / "other.gguf").write_bytes(whole)
    with pytest.raises(ModelError, match=r"name one of other\.gguf, small\.gguf"):
        load_model(str(tmp_path))


def test_a_model_that_looks_ahead_is_refused():
    """BERT that was not made a decoder sees what is to come."""
    with pytest.raises(
        ModelError, match="BertLMHeadModel cannot be served: a token does not see all and only the tokens"
    ):
        adopt_small(BertConfig(**SIZES))


def test_the_context_ends_where_we_would_differ():
    """Long rotary factors limit the context to where they play no role; windows, known by layer, do not."""
    long_rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    phi3 = Phi3Config(**SIZES, rope_parameters=long_rope, original_max_position_embeddings=32)
    assert adopt_small(phi3).max_model_len == 32
    gemma3 = Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": long_rope | {"original_max_position_embeddings": 48},
        },
    )
    assert adopt_small(gemma3).max_model_len == 48
    phimoe = adopt_small(PhimoeConfig(**SIZES, num_local_experts=2, sliding_window=24))
    assert phimoe.max_model_len == 128
    assert {layer.visibility.sliding_window for layer in phimoe.layers} == {24}


def test_a_model_that_fails_is_refused():
    """A forward that raises in the trial run is a refusal that quotes it, not a crash."""
    model, tokenizer = make_tiny()
    model.model.norm = torch.nn.LayerNorm(63)
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be served: a trial run failed"):
        adopt("x", model, tokenizer)


def test_a_name_that_is_nothing(monkeypatch):
    """A name that cannot be had says what to check and what works without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE") as caught:
        load_model("no-such-org/no-such-model")
    assert "`tiny`" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"), [("smolm2", "smollm2"), ("SmolLM2", "smollm2"), ("smollm", "smollm2"), ("tinny", "tiny")]
)
def test_a_mistyped_name_of_ours(name, meant, monkeypatch):
    """The one that was meant is named, and nobody asks the hub."""
    monkeypatch.setattr("worker.model.loader.hub_answers", lambda: pytest.fail("the hub is asked"))
    with pytest.raises(ModelError, match=f"no model '{name}': did you mean `{meant}`"):
        load_model(name)


@pytest.mark.parametrize("name", ["gpt2", "distilgpt2", "opt", "some/smolm2"])
def test_a_name_that_may_be_on_the_hub_is_not_taken_for_a_mistake(name):
    """Some models there have no owner in their name."""
    assert find_checkpoint(name) == Checkpoint(name)


def _answer(listener: socket.socket, words: bytes) -> None:
    """Answers one connection so; nothing: it is left open until the caller hangs up."""
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        connection.recv(4096)
        if words:
            connection.sendall(words)
        else:
            connection.recv(4096)


@pytest.mark.parametrize("proxy", [False, True])
@pytest.mark.parametrize(
    ("words", "can_be_asked"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", False),
        (b"SSH-2.0\r\n", False),
        (b"", False),
    ],
)
def test_who_takes_a_connection_is_not_the_hub_yet(words, can_be_asked, proxy, monkeypatch):
    """A proxy without a way out, or whoever says nothing: found out by one question, not by half a minute of them."""
    monkeypatch.setattr("worker.model.checkpoint.HUB_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer, args=(listener, words))
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://hub.invalid" if proxy else address)
        monkeypatch.setattr("worker.model.checkpoint.getproxies", lambda: {"http": address} if proxy else {})
        assert hub_answers() == can_be_asked
        thread.join()


@pytest.mark.parametrize("cached", [False, True])
def test_a_hub_that_is_away_is_not_waited_for(cached, monkeypatch, tmp_path):
    """No retries of half a minute: a name is refused at once with one sentence, and what the cache holds is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"it waits for {seconds} s"))
    if cached:
        snapshot = tmp_path / "models--some--model/snapshots/abc"
        (tmp_path / "models--some--model/refs").mkdir(parents=True)
        (tmp_path / "models--some--model/refs/main").write_text("abc")
        for part in make_tiny():
            part.save_pretrained(snapshot)
        assert load_model("some/model").vocab_size == 259
    else:
        with pytest.raises(ModelError, match=f"{address} cannot be reached") as caught:
            load_model("some/model")
        assert "\n" not in str(caught.value)


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
    with pytest.raises(ModelError, match="'int4' is not one of auto, fp8, int8"):
        load_model("tiny", kv_dtype="int4")


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
