"""Models whose files are wrong: what is ignored with a warning, and what is refused with a sentence."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kernels import huge_pages
from tests.model.gguf_files import write_gguf
from worker.config import WorkerConfig
from worker.model.errors import ModelError
from worker.model.loader import load_model
from worker.model.memory import RunnerLimits
from worker.model.tiny import make_tiny
from worker.start import build


@pytest.fixture
def folder(tmp_path) -> Path:
    """A saved `tiny`."""
    for part in make_tiny():
        part.save_pretrained(tmp_path)
    return tmp_path


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("named", "kept", "ignored"),
    [
        (-1, (258,), ["-1"]),
        (259, (258,), ["259"]),
        ("x", (258,), ["'x'"]),
        (2.5, (258,), ["2.5"]),
        (True, (258,), ["True"]),
        ([5, [6]], (5,), ["[6]"]),
        ([5, None, False, 258, 10**9], (5, 258), ["None", "False", "1000000000"]),
        ([], (), []),
        (None, (258,), []),
        (0, (0,), []),
    ],
)
def test_only_ids_of_the_model_end_a_sequence(folder, named: Any, kept, ignored):
    """Whatever generation_config.json says; what is left out is named in the log. 258 is what config.json says."""
    change(folder / "generation_config.json", eos_token_id=named)
    with structlog.testing.capture_logs() as logs:
        assert load_model(str(folder)).eos_token_ids == kept
    warned = [entry["ignored"] for entry in logs if entry["event"] == "model.eos_ids_ignored"]
    assert warned == ([ignored] if ignored else [])


@pytest.mark.parametrize("num_added", [0, 1, 7])
def test_tokens_that_the_model_does_not_have_are_told(folder, num_added):
    """Added to the tokenizer while the embedding stayed as it was: one warning with how many and the first few."""
    tokenizer = make_tiny()[1]
    tokenizer.add_tokens([f"<pad{i}>" for i in range(num_added)])
    tokenizer.save_pretrained(folder)
    with structlog.testing.capture_logs() as logs:
        load_model(str(folder))
    warnings = [entry for entry in logs if entry["event"] == "model.lacks_tokens"]
    told = [(entry["number"], entry["tokens"][0]) for entry in warnings]
    assert told == ([(num_added, "259: <pad0>")] if num_added else [])
    assert all(len(entry["tokens"]) == min(num_added, 5) and "refused" in entry["reason"] for entry in warnings)


LIMITS = RunnerLimits(block_size=16, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.mark.parametrize(
    ("limits", "advice"),
    [
        (replace(LIMITS, num_blocks=10**9), "fewer --num-blocks"),
        (replace(LIMITS, num_blocks=1, num_host_blocks=10**9), "--num-host-blocks"),
        (replace(LIMITS, block_size=10**9), "KV pools"),
        (replace(LIMITS, max_num_seqs=10**9, max_num_batched_tokens=10**9), "fewer --max-num-seqs"),
    ],
)
def test_tiny_has_to_fit_too(limits, advice):
    """The built-in model is small; what it is served with need not be."""
    with pytest.raises(ModelError, match=f"'tiny' does not fit into memory.*{advice}"):
        load_model("tiny", limits=limits)
    load_model("tiny", limits=LIMITS)


@pytest.mark.parametrize("context", [-5, 0, 1, 2**31, 10**12])
def test_a_context_that_is_none(folder, context, monkeypatch):
    """Found out before the weights are read."""
    change(folder / "config.json", max_position_embeddings=context)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match=r"its context is .* tokens\. Correct it .*max_position_embeddings"):
        load_model(str(folder))


def test_a_context_that_no_memory_holds(folder):
    """The sentence names where the context comes from."""
    change(folder / "config.json", max_position_embeddings=2**31 - 1)
    with pytest.raises(ModelError, match=r"does not fit into memory: .*max_position_embeddings in its config"):
        load_model(str(folder), limits=LIMITS)


@pytest.mark.parametrize("name", ["x" * 5000, "/" + "x" * 300, "x" * 5000 + ".gguf"])
def test_a_name_that_no_file_can_have(name):
    """It is refused with its beginning, not with all of it."""
    with pytest.raises(ModelError, match=r"File name too long.*Name a folder.*`tiny`") as caught:
        load_model(name)
    assert len(str(caught.value)) < 500


def start_with(**options: Any) -> None:
    build(WorkerConfig(model="tiny", device="cpu", weights="plain", native_kernels=False, num_threads=1, **options))


def test_a_share_of_memory_that_holds_no_block():
    """A worker ends with a sentence that names the setting."""
    with pytest.raises(ModelError, match=r"--kv-memory-share 1e-15 .* holds no KV block .* a larger --kv-memory-share"):
        start_with(kv_memory_share=1e-15)


def test_memory_that_is_gone_at_the_last_moment(monkeypatch):
    """What was free when it was looked at is not, when the runner is made."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 14.6 TiB")

    monkeypatch.setattr("worker.start.TorchRunner", fail)
    with pytest.raises(ModelError, match=r"do not fit into memory \(Unable to allocate 14\.6 TiB\): take fewer"):
        start_with(num_blocks=10)


def test_pools_that_the_system_refuses():
    """As numpy's arrays: it is memory that lacks, whoever says so."""
    with pytest.raises(MemoryError, match="Unable to allocate"):
        huge_pages.allocate(2**62)


FIRST = "model.layers.0.self_attn.q_proj.weight"


def change_weights(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    weights = {name: weight.clone() for name, weight in load_file(file).items()}
    edit(weights)
    save_file(weights, file, metadata={"format": "pt"})


def test_a_checkpoint_with_more_layers_than_its_configuration(folder):
    """It would answer, and wrongly."""
    change(folder / "config.json", num_hidden_layers=1)
    with pytest.raises(
        ModelError, match=r"more layers than its config\.json says \(1\): there are 9 tensors .*layers\.1"
    ):
        load_model(str(folder))


def test_a_gguf_file_with_more_layers_than_it_says(tmp_path, monkeypatch):
    """As of safetensors."""
    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", lambda self, _: self.add_uint32("llama.block_count", 1))
    write_gguf(tmp_path / "small.gguf")
    with pytest.raises(ModelError, match="more layers than"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "extra",
        "model.layers.0.self_attn.q_proj.other",
        "vision_tower.encoder.layers.9.mlp.weight",
        "mtp.layers.5.mlp.weight",
    ],
)
def test_tensors_that_no_layer_needs_are_told(folder, name):
    """What older checkpoints keep, or of parts that do not make text: left out, with a line."""
    change_weights(folder, lambda weights: weights.update({name: torch.zeros(3)}))
    with structlog.testing.capture_logs() as logs:
        load_model(str(folder))
    told = [(entry["number"], entry["tensors"]) for entry in logs if entry["event"] == "model.tensors_ignored"]
    assert told == [(1, [name])]


def test_tables_of_older_checkpoints_are_nothing_to_tell(folder):
    """Every old Llama keeps its rotary frequencies, which are computed now."""
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for i in range(2)}
    change_weights(folder, lambda weights: weights.update(tables))
    with structlog.testing.capture_logs() as logs:
        load_model(str(folder))
    assert [entry for entry in logs if entry["event"] == "model.tensors_ignored"] == []


def test_a_layer_that_guesses_ahead_is_no_layer_too_many(folder):
    """It stands after the last, and the configuration says so."""
    change(folder / "config.json", num_nextn_predict_layers=1)
    change_weights(folder, lambda weights: weights.update({FIRST.replace(".0.", ".2."): torch.zeros(3)}))
    assert load_model(str(folder)).model.config.num_hidden_layers == 2
    change_weights(folder, lambda weights: weights.update({FIRST.replace(".0.", ".3."): torch.zeros(3)}))
    with pytest.raises(ModelError, match=r"there are 1 tensors beyond, the first is model\.layers\.3\."):
        load_model(str(folder))


def test_tensors_of_other_shapes_are_named(folder):
    """With the shape that is there, and the one that the configuration asks for."""
    change(folder / "config.json", vocab_size=300)
    with pytest.raises(
        ModelError, match=r"2 of its tensors .*: lm_head\.weight is \[259, 64\], not \[300, 64\]; model"
    ):
        load_model(str(folder))
    change(folder / "config.json", vocab_size=259, num_key_value_heads=4)
    with pytest.raises(
        ModelError, match=r"4 of its tensors .*k_proj\.weight is \[32, 64\], not \[64, 64\].* and 1 more"
    ):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("edit", "dtype", "reason"),
    [
        (lambda w: w[FIRST].fill_(float("nan")), "float32", r"are not finite: .* in float32\. Copy or download"),
        (lambda w: w[FIRST].fill_(float("inf")), "float32", r"are not finite: .* in float32\. Copy or download"),
        (lambda w: [x.mul_(300) for x in w.values()], "float16", r"not finite: .* in float16\. Try --dtype bfloat16"),
        (lambda w: [x.zero_() for x in w.values()], "float32", "are all zero"),
    ],
    ids=["nan", "inf", "too large for float16", "zero"],
)
def test_weights_that_compute_nothing(folder, edit, dtype, reason):
    """What is no result says nothing about the model's attention."""
    change_weights(folder, edit)
    with pytest.raises(ModelError, match=reason):
        load_model(str(folder), dtype=dtype)


@pytest.mark.parametrize("quantise", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.02, 0.1, 0.5, 0.9, 0.999])
def test_a_gguf_file_that_is_cut_off(tmp_path, quantise, share):
    """Wherever it was: it is named, and nothing is loaded."""
    file = tmp_path / "small.gguf"
    write_gguf(file, quantise)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(
        ModelError, match=r"GGUF file .*small\.gguf is cut off or damaged: .* Copy or download it again"
    ):
        load_model(str(file))


@pytest.mark.parametrize(
    ("change_bytes", "reason"),
    [
        (lambda b: b"<html>" + b, "not a GGUF file. Take another"),
        (lambda b: b[:4] + struct.pack("<I", 99) + b[8:], "GGUF v99"),
        (lambda b: b[:8] + struct.pack("<Q", 2**40) + b[16:], "is cut off or damaged"),
        (lambda b: b[:16] + struct.pack("<Q", 2**40) + b[24:], "is cut off or damaged"),
    ],
    ids=["page", "version", "number of tensors", "number of facts"],
)
def test_a_gguf_file_that_is_none(tmp_path, change_bytes, reason):
    """Its first bytes are others."""
    write_gguf(tmp_path / "small.gguf")
    (tmp_path / "small.gguf").write_bytes(change_bytes((tmp_path / "small.gguf").read_bytes()))
    with pytest.raises(ModelError, match=reason):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "text", ["[]", "{}", "null", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "{", "\xff"]
)
def test_an_index_that_names_no_files(folder, text):
    """JSON of another form is a damaged file, too."""
    (folder / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"index\.json is .*damaged.*Copy or download it again"):
        load_model(str(folder))


@pytest.mark.parametrize("text", ["[]", "null", "3", "", "{", "\xff"])
def test_a_configuration_that_is_no_table(folder, text):
    """As an index."""
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json is .*damaged.*Copy or download it again"):
        load_model(str(folder))


@pytest.mark.parametrize(
    "edit",
    [
        lambda header: [1, 2],
        lambda header: "x",
        lambda header: header | {FIRST: 5},
        lambda header: header | {FIRST: {"dtype": "F32", "data_offsets": [0, 4]}},
        lambda header: header | {FIRST: {"dtype": "F32", "shape": [1], "data_offsets": [-10, 0]}},
        lambda header: header | {FIRST: {"dtype": "F32", "shape": [1], "data_offsets": ["a", "b"]}},
        lambda header: header | {FIRST: {"dtype": "F32", "shape": [1], "data_offsets": [1]}},
        lambda header: header | {FIRST: {"dtype": "F32", "shape": [64, 64], "data_offsets": [0, 16384]}},
    ],
    ids=["list", "text", "number", "no shape", "negative", "letters", "short", "overlapping"],
)
def test_a_header_of_another_form(folder, edit):
    """Of safetensors: its tensors are not described, or lie where others do."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(edit(json.loads(content[8 : 8 + size]))).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    with pytest.raises(ModelError, match=r"damaged.*Copy or download"):
        load_model(str(folder))


def test_a_file_in_place_of_its_folder(folder):
    """Whichever it is, its folder is what to name."""
    for file in ("model.safetensors", "config.json"):
        with pytest.raises(ModelError, match=f"is a file, and no GGUF file: name its folder, {folder}$"):
            load_model(str(folder / file))


def test_tokenizers_that_are_missing_or_damaged(folder):
    """The sentence names the files."""
    whole = (folder / "tokenizer.json").read_bytes()
    for text in ("{", "{}"):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(ModelError, match=r"tokenizer\.json or tokenizer_config\.json in .* is damaged, .*Copy or"):
            load_model(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"cannot be loaded: tokenizer\.json is missing in .* Copy them from"):
        load_model(str(folder))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(
        ModelError, match=r"tokenizer\.json and tokenizer_config\.json are missing in .* Copy them from"
    ):
        load_model(str(folder))
    (folder / "tokenizer.json").write_bytes(whole)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"vocab_size": "259"}, "'vocab_size' expected int, got str"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"hidden_act": "nothing"}, "lack 'nothing', or name it though it is unknown"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, r"loaded: Missing required keys in `rope"),
    ],
    ids=["kind", "sizes", "name", "missing"],
)
def test_a_configuration_that_cannot_be(folder, values, reason):
    """What transformers says of it is quoted as far as it says something."""
    change(folder / "config.json", **values)
    with pytest.raises(ModelError, match=reason) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)
