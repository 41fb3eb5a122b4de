"""The demonstration: its figures, and its course with a stand-in for the worker."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.reasons import FinishReason
from schemas.records import End
from service.demo import MIN_REQUESTS, TIERS, Answer, DemoPrompt, demo_answers, seats_chart, summarise

ROOT = Path(__file__).parents[2]

STAND_IN = """
import argparse, asyncio, json, logging, os, signal, sys
from schemas.connection import KafkaSettings
from tests.service.responder import Responder

logging.getLogger("aiokafka").setLevel(logging.CRITICAL)

async def answer(reply):
    attempt = await reply.begin()
    text = reply.fields["messages"][0]["content"][:5]
    await reply.tokens(attempt, 0, [ord(c) for c in text])
    await reply.end(attempt, len(text))

async def kill_the_broker(reply):
    demo = os.getppid()
    for child in open(f"/proc/{demo}/task/{demo}/children").read().split():
        if b"tansu" in open(f"/proc/{child}/cmdline", "rb").read():
            os.kill(int(child), signal.SIGKILL)
    await asyncio.sleep(60)

async def main(arguments):
    step = {"step": 1, "at": 0.0, "num_running": 1, "num_waiting": 0, "seats_by_lane": {"batch": 1}}
    with open(arguments.step_log, "w") as file:
        file.write(json.dumps(step) + "\\n" + json.dumps({**step, "step": 2, "at": 1.0}) + "\\n")
    async with Responder(KafkaSettings(), arguments.lane_prefix, num_partitions=12).running() as responder:
        responder.script = answer if arguments.model != "broker-killer" else kill_the_broker
        print(json.dumps({"event": "model.progress", "doing": "dreaming", "percent": 50}), file=sys.stderr, flush=True)
        print("ready", flush=True)
        await asyncio.sleep(60)

parser = argparse.ArgumentParser()
for name in ("--model", "--max-num-seqs", "--lane-prefix", "--step-log", "--log-format"):
    parser.add_argument(name)
arguments = parser.parse_args()
if arguments.model == "broken":
    sys.exit("no such model")
asyncio.run(main(arguments))
"""


def _demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    package = folder / "worker"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    return subprocess.run(
        [sys.executable, "-m", "service", "demo", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "COLUMNS": "100", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.broker
def test_course(tmp_path: Path) -> None:
    """It starts broker and worker, streams at least 12 answers on three lanes, reports, and leaves nothing behind."""
    result = _demo(tmp_path, "--model", "any", "--json", "out.json")
    assert result.returncode == 0, result.stdout + result.stderr
    for words in ("worker: dreaming 50 %", "any ready after", "seats in 2 steps", "a token", *TIERS):
        assert words in result.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["answers"]) >= MIN_REQUESTS
    assert {answer["tier"] for answer in written["answers"]} == set(TIERS)
    for answer in written["answers"]:
        assert "".join(map(chr, answer["token_ids"])) == answer["text"] == answer["messages"][0]["content"][:5]
        assert answer["finish_reason"] == "stop"
    assert len(written["steps"]) == 2
    assert list(tmp_path.glob("carousel-demo-*")) == []


@pytest.mark.broker
def test_worker_that_does_not_start(tmp_path: Path) -> None:
    """A worker that fails ends the demonstration with its status, where its log is and how that ends."""
    result = _demo(tmp_path, "--model", "broken")
    assert result.returncode == 1
    assert "the worker ended with status 1" in result.stderr
    assert "no such model" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(list(tmp_path.glob("carousel-demo-*/worker.log"))) == 1


@pytest.mark.broker
def test_broker_that_dies(tmp_path: Path) -> None:
    """A broker that dies while answers are awaited ends the demonstration soon, with a sentence."""
    result = _demo(tmp_path, "--model", "broker-killer")
    assert result.returncode == 1
    assert "the embedded broker ended with status -9" in result.stderr
    assert "Traceback" not in result.stderr


def test_prompts_are_of_mixed_lengths() -> None:
    """Every tier has several prompts; the longest is many times the shortest; more requests repeat them."""
    answers = demo_answers(30)
    assert len(answers) == 30
    lengths = [len(answer.prompt.text) for answer in answers]
    assert max(lengths) > 20 * min(lengths)
    assert all(sum(answer.prompt.tier == tier for answer in answers) >= 4 for tier in TIERS)


def test_summary() -> None:
    """Medians per tier; a tier without tokens has none."""
    answers = [
        Answer(DemoPrompt("interactive", "x", 9), token_ids=[1] * 11, ttft=at, tpot=at / 10) for at in (1.0, 2.0, 6.0)
    ]
    interactive, standard, _ = summarise(answers)
    assert (interactive.num_requests, interactive.num_tokens) == (3, 33)
    assert (interactive.ttft, interactive.worst_ttft) == (2.0, 6.0)
    assert interactive.tpot == 0.2
    assert (standard.num_requests, standard.ttft, standard.tpot) == (0, None, None)


def test_states() -> None:
    """An answer waits, runs, and ends with its finish reason."""
    answer = Answer(DemoPrompt("batch", "x", 9))
    assert answer.state == "waiting"
    answer.token_ids.append(1)
    assert answer.state == "running"
    answer.end = End(0, FinishReason.LENGTH)
    assert answer.state == "length"


def test_seats_chart() -> None:
    """A column is a moment, a character a seat; idle steps at both ends are left out."""

    def step(at: float, num_waiting: int, **seats: int) -> dict[str, Any]:
        return {"at": at, "num_running": sum(seats.values()), "num_waiting": num_waiting, "seats_by_lane": seats}

    steps = [
        step(9.0, 0),
        step(10.0, 12, interactive=1, batch=1),
        step(12.0, 3, interactive=1, standard=2),
        step(14.0, 0, standard=1),
        step(18.0, 0, standard=1),
        step(19.0, 0),
    ]
    chart = seats_chart(steps, max_num_seqs=3, width=8)
    assert [line.partition("│")[2] for line in chart[:3]] == ["··SS····", "BBSS····", "IIIISSSS"]
    assert chart[3].endswith("│++33")
    assert chart[4].endswith("8.0 s")
    assert seats_chart([], max_num_seqs=3, width=8) == []
