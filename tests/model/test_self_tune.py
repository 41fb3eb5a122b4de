"""Who multiplies fastest here: measured once, whole layers together, and not while others want the cores."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from kernels import native
from kernels.packed_product import Arena
from worker.model import self_tune
from worker.model.loader import load_model
from worker.model.packed_linear import Group, NativeLinear, PackedLinear
from worker.model.self_tune import choose
from worker.model.weights import prepare_weights

pytestmark = pytest.mark.usefixtures("native_kernels")
MAKES = {"native": partial(NativeLinear, arena=Arena()), "onednn": PackedLinear}
HEAD = "259x64"


@pytest.fixture
def measured(monkeypatch):
    """The shapes that were measured. The head alone is much faster as it was loaded; nobody waits for a core."""
    shapes = []

    def times(groups, makes):
        shapes.append(groups[0].name)
        return dict.fromkeys(makes, 1.0) | {"plain": 0.5 if groups[0].name == HEAD else 1.0}

    monkeypatch.setattr(self_tune, "_times", times)
    monkeypatch.setattr(self_tune, "_seconds_waited", lambda: 0.0)
    return shapes


def test_what_is_faster_as_it_was_loaded_stays(tmp_path, measured):
    """The choice is kept by machine, dtype, threads and multipliers, and read by whoever comes next."""
    file = tmp_path / "folder" / "self-tune.json"
    done = prepare_weights(load_model("tiny"), "auto", file)
    assert done.plain == (HEAD,)
    assert done.num_products == done.num_native == 8
    assert len(measured) == len(set(measured)) == 5
    (known,) = json.loads(file.read_text()).values()
    assert known == {name: "plain" if name == HEAD else "native" for name in measured}
    again = prepare_weights(load_model("tiny"), "auto", file)
    assert (again.plain, again.tuned_seconds) == (done.plain, 0.0)
    assert len(measured) == 5
    prepare_weights(load_model("tiny", dtype="bfloat16"), "auto", file)
    assert len(measured) == 10
    file.write_text("{damaged")
    prepare_weights(load_model("tiny"), "auto", file)
    assert len(measured) == 15
    assert len(json.loads(file.read_text())) == 1


def test_what_another_wrote_meanwhile_is_kept(tmp_path, measured, monkeypatch):
    """While one measures, another writes what it found on its machine: that is still there when ours is."""
    file = tmp_path / "self-tune.json"
    _while_measuring(monkeypatch, lambda: file.write_text(json.dumps({"another machine": {"1x1": "onednn"}})))
    prepare_weights(load_model("tiny"), "auto", file)
    content = json.loads(file.read_text())
    assert content.pop("another machine") == {"1x1": "onednn"}
    (known,) = content.values()
    assert known.keys() == set(measured)


def test_what_another_found_for_the_same_shapes_stays(tmp_path, measured, monkeypatch):
    """Two that start together compute alike: who writes last takes over what is there, and adds what only it has."""
    file, other = tmp_path / "self-tune.json", tmp_path / "other.json"
    prepare_weights(load_model("tiny"), "auto", other)
    ((key, known),) = json.loads(other.read_text()).items()
    assert known[HEAD] == "plain"
    theirs = {HEAD: "onednn", "1x1": "onednn"}
    _while_measuring(monkeypatch, lambda: file.write_text(json.dumps({key: theirs})))
    done = prepare_weights(load_model("tiny"), "auto", file)
    assert json.loads(file.read_text()) == {key: known | theirs}
    assert done.plain == (), "computed as the other does"


def _while_measuring(monkeypatch, act):
    """`act` is called before each measurement, the file having been read."""
    times = self_tune._times
    monkeypatch.setattr(self_tune, "_times", lambda *arguments: (act(), times(*arguments))[1])


def test_other_kernels_are_measured_again(tmp_path, measured, monkeypatch):
    """What was found for one build of our library says nothing about another's; the first's is kept beside it."""
    file = tmp_path / "self-tune.json"
    prepare_weights(load_model("tiny"), "auto", file)
    first = json.loads(file.read_text())
    assert native.made_of() in next(iter(first))
    monkeypatch.setattr(native._State, "made_of", "another build")
    assert prepare_weights(load_model("tiny"), "auto", file).tuned_seconds > 0
    assert len(measured) == 10
    both = json.loads(file.read_text())
    assert len(both) == 2
    assert both.items() > first.items()


def test_what_a_busy_machine_says_is_neither_used_nor_kept(tmp_path, measured, monkeypatch):
    """All is packed as is preferred, whole layers are computed in C, and the next start measures again."""
    waited = iter([0.0, 1e6, 1e6, 1e6])
    monkeypatch.setattr(self_tune, "_seconds_waited", lambda: next(waited))
    file = tmp_path / "self-tune.json"
    done = prepare_weights(load_model("tiny"), "auto", file)
    assert done.plain == ()
    assert done.num_native == done.num_products
    assert done.num_decoder_layers > 0
    assert not file.exists()
    assert prepare_weights(load_model("tiny"), "auto", file).plain == (HEAD,)
    assert file.exists()


def test_threads_that_wait_for_a_core_are_seen():
    """This thread has waited before, if only for a moment; the sum never falls."""
    first = self_tune._seconds_waited()
    assert 0 < first <= self_tune._seconds_waited()


@pytest.mark.parametrize(
    ("native", "onednn", "plain", "expected"),
    [(1.0, 1.0, 1.0, "native"), (1.0, 0.95, 0.95, "native"), (1.0, 0.5, 0.48, "onednn"), (1.0, 2.0, 0.5, "plain")],
)
def test_the_measurement_prefers_the_faster(monkeypatch, native, onednn, plain, expected):
    """Seconds decide; what is preferred gives way only to what is clearly faster."""
    groups = [Group((nn.Linear(64, 64),))]
    times = iter(np.repeat([native, onednn, plain], len(self_tune._ROWS)))
    monkeypatch.setattr(self_tune, "_seconds", lambda run: (run(), next(times))[1])
    with torch.inference_mode():
        found = self_tune._times(groups, MAKES)
    assert choose({"64x64": found}, {"64x64": 1}) == {"64x64": expected}


def test_layers_stay_whole_unless_another_is_far_faster():
    """One product that oneDNN does a little faster would cost its layer more than it gains. The head is alone."""
    faster = {"native": 1.0, "onednn": 0.6, "plain": 1.0}
    slower = {"native": 1.0, "onednn": 1.5, "plain": 1.5}
    counts = {"qkv": 30, "down": 30, "head": 1}
    assert choose({"qkv": faster, "down": slower, "head": faster}, counts) == {
        "qkv": "native",
        "down": "native",
        "head": "onednn",
    }
    assert choose({"qkv": faster, "down": faster, "head": slower}, counts) == {
        "qkv": "onednn",
        "down": "onednn",
        "head": "native",
    }
    assert choose({"qkv": {"onednn": 1.0, "plain": 0.5}}, {"qkv": 30}) == {"qkv": "plain"}
