"""Ours beside other servers: the loads, what is kept and taken up again, the figures, why a peer is left out.

No peer is installed: a script of the test's own stands for one.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import peer_setups, peers
from bench.child import ChildFailed
from bench.measure import Answer, Run
from bench.peer_results import Contestant, Measurement, OtherSettings, Results, Standing
from bench.peer_setups import PEERS, SCRIPTS, Peer, Unavailable, install, is_installed
from bench.workload import MIXED_64, BenchRequest, equal_lengths, load_trace

FAKE_SCRIPT = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import peer_script
workload = peer_script.read_workload()
assert (workload["seats"], workload["threads"], workload["max_len"] % 16) == (2, 1, 0)
def serve(requests, recorder):
    for i, request in enumerate(requests):
        for token_id in range(request["max_tokens"]):
            recorder.add(i, [token_id])
peer_script.run(workload, serve, {{"fake": "1.0"}})
"""


def answer(*token_ids: int, latency: float = 1.0) -> Answer:
    return Answer(token_ids, 0.5, latency)


def invoke(arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(peers.app, arguments.split(), catch_exceptions=False)
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives a peer `fake` a script. It runs in this environment, and needs no model."""

    def make(script: str) -> None:
        path = tmp_path / "fake.py"
        path.write_text(script)
        monkeypatch.setitem(PEERS, "fake", Peer("fake", "a fake", str(path)))

    monkeypatch.setattr(peers, "_NAMES", [*peers._NAMES, "fake"])
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # as it is in a child
    monkeypatch.setattr(peer_setups, "_model", lambda *_: Path("none"))
    monkeypatch.setattr(peers, "in_child", lambda function, on_tokens: function(on_tokens))
    return make


def test_equal_lengths_are_cut_from_the_same_text():
    """64 different prompts of 64 tokens, 64 output tokens each; a few requests give as many, their text repeated."""
    mixed = load_trace(MIXED_64, "smollm2")
    equal = equal_lengths(mixed)
    assert [(len(r.token_ids), r.max_tokens) for r in equal] == [(64, 64)] * 64
    assert len({r.token_ids for r in equal}) == 64
    assert equal[0].token_ids == (*mixed[0].token_ids, *mixed[1].token_ids, *mixed[2].token_ids)[:64]
    assert equal_lengths([BenchRequest((1, 2, 3), 9)], 4) == (BenchRequest((1, 2, 3, 1), 4),)


def test_ours_static_batching_and_a_peer(tmp_path: Path, fake: Callable[[str], None]):
    """All are measured on both loads; ours equal transformers' tokens, the peer's own ones are counted as different."""
    fake(FAKE_SCRIPT)
    file = tmp_path / "figures.json"
    options = f"--model tiny --requests 3 --repeats 1 --seats 2 --threads 1 --home {tmp_path} --json {file}"
    code, output = invoke(f"{options} --peers engine,engine:block_size=8,static-8,fake")
    assert code == 0, output
    measured = json.loads(file.read_text())
    assert measured["skipped"] == {}
    names = ["engine", "engine:block_size=8", "static-8", "fake"]
    assert [(m["load"], m["contender"]) for m in measured["measurements"]] == [
        (load, name) for load in ("mixed", "equal") for name in names
    ]
    for load, lens in ("mixed", [r.max_tokens for r in load_trace(MIXED_64, "tiny", 3)]), ("equal", [64] * 3):
        summary = measured["summary"][load]
        assert [summary[name]["same_answers"] for name in names] == [1, 1, 1, 0]
        assert {row["medians"]["output_tokens"] for row in summary.values()} == {sum(lens)}
        assert summary["static-8"]["ratio_to_best_static"] == summary["engine"]["ratio_to_ours"] == 1
        assert [summary[name]["float32"] for name in names] == [True, False, True, True]
    assert "fake 1.0" in output


def measurement(repeat: int = 0, contender: str = "engine") -> Measurement:
    return Measurement(
        "mixed", contender, repeat, Run((answer(1, 2),), None, None), "2026-11-30", "abc", 0.1, {"x": "1"}
    )


def test_what_is_measured_is_kept_and_taken_up(tmp_path: Path):
    """A file gives back the measurements it was given; one of other settings, or no such file, is refused."""
    file, settings = tmp_path / "figures.json", {"requests": 24, "model": "smollm2"}
    results = Results(file, settings)
    results.add(measurement(), [Contestant("engine", "ours")])
    again = Results(file, settings)
    assert again.measurements == [measurement()]
    assert (again.has("mixed", "engine", 0), again.has("mixed", "engine", 1), again.has("equal", "engine", 0)) == (
        True,
        False,
        False,
    )
    with pytest.raises(OtherSettings, match="requests 24, now 4"):
        Results(file, settings | {"requests": 4})
    file.write_text("[]")
    with pytest.raises(OtherSettings, match="no file of this benchmark"):
        Results(file, settings)


def test_a_second_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Only what is missing is measured, and the repeats are in turns."""
    served: list[str] = []

    def serve(entry, _home, workload, _on_tokens, _versions) -> Run:
        served.append(entry.name)
        if len(served) == 3:
            raise KeyboardInterrupt
        return Run(tuple(answer(*range(r.max_tokens)) for r in workload.requests), None, None)

    monkeypatch.setattr(peers, "_serve", serve)
    arguments = f"--requests 2 --repeats 2 --load mixed --peers engine,static-8 --json {tmp_path / 'figures.json'}"
    assert CliRunner().invoke(peers.app, arguments.split()).exit_code == 130
    assert invoke(arguments)[0] == 0
    assert served == ["engine", "static-8", "engine", "engine", "static-8"]
    assert invoke(arguments)[0] == 0
    assert len(served) == 5


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (FAKE_SCRIPT.replace('range(request["max_tokens"])', "range(2)"), "not every request has as many tokens"),
        (FAKE_SCRIPT.replace("[token_id]", "[token_id] * 2"), "tokens, 4 were asked for"),
        ("import absent_library", "No module named 'absent_library'"),
    ],
)
def test_a_peer_that_fails_is_left_out(tmp_path: Path, fake: Callable[[str], None], script: str, reason: str):
    """Its last words are the reason; the others are measured."""
    fake(script)
    file = tmp_path / "figures.json"
    options = (
        f"--model tiny --requests 1 --repeats 1 --seats 2 --threads 1 --load mixed --home {tmp_path} --json {file}"
    )
    code, output = invoke(f"{options} --peers fake,engine")
    assert code == 0, output
    measured = json.loads(file.read_text())
    assert reason in measured["skipped"]["fake"]
    assert [m["contender"] for m in measured["measurements"]] == ["engine"]
    assert "fake: skipped: it failed" in output


def test_ours_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the last line of the traceback as the reason."""

    def fail(*_: object) -> None:
        raise ChildFailed("Traceback:\n  in a file\nOSError: no broker\n")

    monkeypatch.setattr(peers, "in_child", fail)
    code, output = invoke(f"--peers kafka --requests 1 --repeats 2 --load mixed --json {tmp_path / 'figures.json'}")
    assert code == 0
    assert "kafka: skipped: it failed: OSError: no broker" in output


def test_a_peer_that_may_not_be_installed_is_left_out(tmp_path: Path):
    """With --no-install, and with a model that it cannot read."""
    options = f"--model tiny --requests 1 --repeats 1 --home {tmp_path} --json {tmp_path / 'figures.json'}"
    code, output = invoke(f"{options} --no-install --peers vllm,transformers-cb")
    assert code == 0
    assert "vllm: skipped: it is not installed" in output
    assert "transformers-cb: skipped: it failed: it reads GGUF files or folders; of the model 'tiny'" in output


def test_installations_are_made_once_and_anew_for_another_recipe(tmp_path: Path):
    """A marker, written last, says which recipe has been followed to its end."""
    ran: list[str] = []

    def shell(what: str, _command: Sequence[str | Path], _folder: Path) -> None:
        ran.append(what)

    def fail(_folder: Path, _shell: object) -> None:
        raise Unavailable("no compiler")

    peer = Peer("other", "another", "none.py", "v1", lambda folder, run: run("library", ["true"], folder))
    install(peer, tmp_path, shell)
    assert is_installed(peer, tmp_path)
    install(peer, tmp_path, shell)
    assert ran == ["virtual environment", "library"]
    renewed = replace(peer, recipe="v2")
    assert not is_installed(renewed, tmp_path)
    with pytest.raises(Unavailable, match="no compiler"):
        install(replace(renewed, install=fail), tmp_path, shell)
    assert not is_installed(renewed, tmp_path)
    assert not is_installed(peer, tmp_path)


def test_a_command_that_fails_or_hangs_is_told(tmp_path: Path):
    """With the end of what it said; what it started ends with it."""
    log = tmp_path / "log"
    with pytest.raises(Unavailable, match=r"status 3; .*ends with:\nbad"):
        peer_setups.run_logged([sys.executable, "-c", "print('bad'); raise SystemExit(3)"], tmp_path, log)
    with pytest.raises(Unavailable, match="status -9"):
        peer_setups.run_logged(["sh", "-c", "sleep 60 & sleep 60"], tmp_path, log, timeout=0.2)


def test_the_standing():
    """Ratios are of medians, the better static batching counts, and tokens count up to the first difference."""
    runs = {
        "engine": [Run((answer(1, 2, 3, 4, latency=wall),), None, None) for wall in (1.0, 4.0, 2.0)],
        "static-8": [Run((answer(1, 2, 3, 4, latency=8.0),), None, None)],
        "static-16": [Run((answer(1, 2, 3, 4, latency=4.0),), None, None)],
        "other": [Run((answer(1, 2, 9, 4, latency=1.0),), None, None)],
    }
    contestants = [Contestant(name, name, is_static=name.startswith("static")) for name in (*runs, "absent")]
    standing = Standing(runs, contestants)
    assert standing.ratios("engine") == (1.0, 2.0)
    assert standing.ratios("other") == (2.0, 4.0)
    assert (standing.reference, standing.sameness("engine"), standing.sameness("other")) == (
        "static-16",
        (1.0, 1.0),
        (0.0, 0.5),
    )
    alone = Standing({"other": runs["other"]}, contestants)
    assert (alone.ratios("other"), alone.sameness("other")) == ((None, None), None)


@pytest.mark.parametrize(
    "name", ["vlm", "vllm:seats=2", "static-8:seats=2", "engine:weights", "engine:seats=2", "engine:=2", ""]
)
def test_names_that_do_not_exist_are_refused(name: str, tmp_path: Path):
    """A sentence and status 2, before anything runs."""
    result = CliRunner().invoke(peers.app, ["--peers", f"engine,{name}", "--json", str(tmp_path / "figures.json")])
    assert result.exit_code == 2
    assert "there is no" in result.output
