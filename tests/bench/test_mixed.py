"""The mixed benchmark: that its figures add up and its contenders say the same; never how long anything takes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import mixed
from bench.comparison import UNBATCHED
from bench.measure import Agreement, Answer, Difference, Run, agreement, medians
from bench.report import agreement_line
from bench.workload import MIXED_64, load_trace

SHARED_TRACE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "mixed_64.json"
NUM_REQUESTS = 6


def answer(*token_ids: int, ttft: float = 1.0, latency: float = 2.0) -> Answer:
    return Answer(token_ids, ttft, latency)


def test_it_compares_engine_and_static_batching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On `tiny`, in process and static batching answer alike and as unbatched; tokens and slot-steps add up."""
    monkeypatch.setattr(mixed, "in_child", lambda function, on_tokens: function(on_tokens))
    file = tmp_path / "figures.json"
    arguments = f"--model tiny --requests {NUM_REQUESTS} --seats 2 --threads 1 --only engine,static-8 --json {file}"
    result = CliRunner().invoke(mixed.app, arguments.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    measured = json.loads(file.read_text())
    lengths = [r.max_tokens for r in load_trace(MIXED_64, "tiny", NUM_REQUESTS)]
    assert measured["output_tokens"] == sum(lengths)
    engine, static = measured["contenders"]["engine"], measured["contenders"]["static-8"]
    for contender in engine, static:
        assert [len(a["token_ids"]) for a in contender["answers"]] == lengths
        assert contender["medians"]["output_tokens"] == sum(lengths)
        assert all(0 < a["ttft"] <= a["latency"] <= contender["medians"]["wall_s"] for a in contender["answers"])
        assert 0 < contender["medians"]["kv_use"] <= 1
    assert [a["token_ids"] for a in engine["answers"]] == [a["token_ids"] for a in static["answers"]]
    assert static["medians"]["slot_steps"] == NUM_REQUESTS * max(lengths)
    assert sum(lengths) / 2 <= engine["medians"]["slot_steps"] / 2 <= sum(lengths)
    assert static["ratio_to_best_static"] == 1
    assert [(a["right"], a["num_compared"], a["differences"]) for a in measured["agreements"]] == [
        (static["label"], NUM_REQUESTS, []),
        (UNBATCHED, 4, []),
    ]


@pytest.mark.shared
def test_the_trace_is_the_shared_one():
    """The load that the repository carries has the prompts and lengths of the published one."""
    if not SHARED_TRACE.is_file():
        pytest.skip("the published trace is not here")
    requests = load_trace(MIXED_64, "smollm2")
    assert requests == load_trace(SHARED_TRACE, "smollm2")
    assert sum(len(r.token_ids) for r in requests) == 8511
    assert sum(r.max_tokens for r in requests) == 3799


def test_figures_of_a_run():
    """Percentiles are nearest-rank, the wall time ends with the last answer, and repeats give the median."""
    first = Run((answer(1, 2, ttft=1.0, latency=4.0), answer(3, 4, ttft=2.0, latency=2.0)), 8, 0.5)
    figures = first.figures
    assert (figures["wall_s"], figures["output_tokens_per_s"], figures["slot_use"]) == (4.0, 1.0, 0.5)
    assert (figures["ttft_p50_s"], figures["ttft_p99_s"], figures["latency_p50_s"]) == (1.0, 2.0, 2.0)
    runs = [first, *(Run((answer(1, latency=wall),), 1, None) for wall in (5.0, 9.0))]
    assert medians(runs[1:] + runs[2:])["wall_s"] == 9.0


def test_answers_that_differ_are_told():
    """The first token that differs is reported for each request that both sides answered."""
    found = agreement("a", {0: answer(1, 2, 3), 1: answer(4), 2: answer(5)}, "b", {0: answer(1, 7, 3), 1: answer(4)})
    assert found == Agreement("a", "b", 2, (Difference(0, 1, (2, 7)),))
    line = agreement_line(Agreement("a", "b", 2, found.differences, (1.5e-5,)))
    assert line == "a and b: 1 of 2 answers are the same; they part in request 0 at token 1 (logits 1.5e-05 apart)"


@pytest.mark.parametrize("arguments", [["--only", "engine,static-9"], ["--requests", "0"], ["--trace", "absent.json"]])
def test_bad_arguments_are_refused(arguments: list[str]):
    """A contender that does not exist, no requests, no trace: a sentence and status 2, before anything runs."""
    assert CliRunner().invoke(mixed.app, arguments).exit_code == 2
