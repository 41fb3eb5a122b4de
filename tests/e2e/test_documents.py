"""What the documents tell to type, typed: Python snippets and commands against a broker and a worker."""

import asyncio
import contextlib
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer

from schemas.connection import KafkaConnection
from service.broker import EmbeddedBroker
from service.topics import create_topics
from tests.deploy.stack import ROOT
from tests.e2e.workers import WorkerProcess
from tests.test_docs import DOCUMENTS, blocks, carousel_commands, command_lines

COMMANDS = ("submit", "status", "cancel", "topics", "dlq", "reap")  # those that end by themselves
# Until Ctrl-C: what they show when they have begun, and their exit status.
STAYING = {
    "broker": (b"ready", 0),
    "worker": (b"ready", 0),
    "top": (b"serves tiny", 130),
    "console": (b"http://", 130),
}
DEAD_LETTER = "0:17"  # in the examples
ADDRESSES = ("127.0.0.1:9092", "localhost:9092", "kafka-1:9092")


def run(words: list[str], bootstrap: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CAROUSEL_BOOTSTRAP": bootstrap, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, encoding="utf-8", check=False, timeout=120
    )


def snippets() -> list[tuple[str, str]]:
    """(document, content) of the Python that opens a client."""
    found = [(file.name, content) for file in DOCUMENTS for language, content in blocks(file) if language == "python"]
    return [(name, content) for name, content in found if "Client(" in content]


def commands(*names: str) -> list[tuple[str, ...]]:
    """Those of carousel with one of these names, each once."""
    lines = (line for file in DOCUMENTS for line in command_lines(file))
    typed = dict.fromkeys(tuple(words) for line in lines for words in carousel_commands(line))
    return [words for words in typed if words[0] in names]


def test_every_command_is_run_below():
    """Those that end, those that stay, and the simulator: no other is told to type."""
    names = {words[0] for file in DOCUMENTS for line in command_lines(file) for words in carousel_commands(line)}
    assert names == {*COMMANDS, *STAYING, "simulate"}


@pytest.mark.broker
def test_what_the_documents_tell_to_type(tmp_path: Path):
    """Every Python snippet that opens a client prints an answer; every command that ends by itself ends with 0."""
    assert len(snippets()) >= 2
    assert len(commands(*COMMANDS)) >= 10
    with EmbeddedBroker() as broker:
        asyncio.run(create_topics(KafkaConnection(bootstrap=broker.bootstrap), partitions=2))
        asyncio.run(write_nonsense(broker.bootstrap))
        worker = WorkerProcess(broker.bootstrap, tmp_path / "worker.log")
        worker.start()
        try:
            for name, content in snippets():
                for address in ADDRESSES:
                    content = content.replace(address, broker.bootstrap)
                done = run(["-c", content], broker.bootstrap)
                assert done.returncode == 0, f"{name}: {done.stderr}"
                assert "Usage(" in done.stdout
            while not worker.logged("request.dead_letter"):
                time.sleep(0.1)
            for words in commands(*COMMANDS):
                given = [{DEAD_LETTER: "0:0"}.get(word, word) for word in words]
                given = [broker.bootstrap if word in ADDRESSES else word for word in given]
                done = run(["-m", "service", *given], broker.bootstrap)
                assert done.returncode == 0, f"carousel {' '.join(words)}: {done.stderr}"
        finally:
            worker.end()


async def write_nonsense(bootstrap: str) -> None:
    """A request that nobody can decode or answer: the worker makes a dead letter of it."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    try:
        await producer.send_and_wait("prompts.standard", b"\xc1")
    finally:
        await producer.stop()


@pytest.mark.broker
def test_what_stays_until_ctrl_c(tmp_path: Path):
    """Each begins to serve or to show, and Ctrl-C ends it with its exit status.

    The model is the small one here, and the GPU one if there is one.
    """
    with EmbeddedBroker() as broker:
        asyncio.run(create_topics(KafkaConnection(bootstrap=broker.bootstrap), partitions=2))
        with WorkerProcess(broker.bootstrap, tmp_path / "worker.log", "--metrics-port", "0") as worker:
            url = f"http://127.0.0.1:{worker.logged('health.serving')[-1]['port']}"
            for words in commands(*STAYING):
                replaced = dict.fromkeys(ADDRESSES, broker.bootstrap) | {"smollm2": "tiny", "9100": "0", "cuda": "auto"}
                given = [{"http://127.0.0.1:9100": url}.get(word, replaced.get(word, word)) for word in words]
                if words[0] == "broker":
                    given = ["127.0.0.1:0" if word == broker.bootstrap else word for word in given]
                stays(given, broker.bootstrap, url)


def stays(words: list[str], bootstrap: str, url: str) -> None:
    """On a terminal, for `carousel top` draws."""
    environment = os.environ | {"CAROUSEL_BOOTSTRAP": bootstrap, "CAROUSEL_WORKER_URL": url, "PYTHONPATH": str(ROOT)}
    environment |= {"TERM": "xterm", "COLUMNS": "120", "LINES": "50"}
    begins, status = STAYING[words[0]]
    terminal, its_side = pty.openpty()
    command = [sys.executable, "-m", "service", *words]
    with subprocess.Popen(command, env=environment, stdout=its_side, stderr=subprocess.DEVNULL) as process:
        os.close(its_side)
        try:
            shown = b""
            while begins not in shown:
                assert select.select([terminal], [], [], 120)[0], f"{words}: {shown!r}"
                shown += os.read(terminal, 1 << 16)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # the other side is closed
                while os.read(terminal, 1 << 16):
                    pass
            assert process.wait(120) == status, words
        finally:
            process.kill()
    os.close(terminal)


def test_what_the_simulator_is_told(tmp_path: Path):
    """Its commands, with a trace and a profile as the text describes them."""
    lines = [f"{i / 10},t{i % 3},{20 + i},{10 + i % 7}" for i in range(40)]
    for name in ("trace.csv", "load.csv"):
        (tmp_path / name).write_text("\n".join(["arrival_s,tenant,input_tokens,output_tokens", *lines]) + "\n")
    (tmp_path / "budget-1024.toml").write_text('like = "h200"\nmax_num_batched_tokens = 1024\n')
    assert len(commands("simulate")) >= 2
    for words in commands("simulate"):
        done = subprocess.run(
            [sys.executable, "-m", "service", *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"carousel {' '.join(words)}: {done.stderr}"
    assert (tmp_path / "load.svg").read_text().startswith("<svg")


@pytest.mark.kafka
def test_what_kcat_is_told(kafka: Any, tmp_path: Path):
    """The lines of the first hour as a shell has them: the topic, the request, and its answer as headers and values."""
    if shutil.which("kcat") is None:
        pytest.skip("no kcat: install Debian's package kcat")
    lines = [line for file in DOCUMENTS for line in command_lines(file) if file.name == "first-hour.md"]
    make, ask, read = (next(line for line in lines if all(w in line for w in words)) for words in KCAT)
    asyncio.run(create_topics(KafkaConnection(bootstrap=kafka.bootstrap), partitions=2))
    topic_tool = shlex.split(make.replace("localhost:9092", kafka.bootstrap))
    kafka.tool("org.apache.kafka.tools.TopicCommand", *topic_tool[topic_tool.index("--bootstrap-server") :])
    with WorkerProcess(kafka.bootstrap, tmp_path / "worker.log") as worker:
        shell(ask.replace("localhost:9092", kafka.bootstrap))
        while not worker.logged("request.finished"):
            time.sleep(0.1)
        printed = shell(read.replace("localhost:9092", kafka.bootstrap) + " -e")  # it would wait for more
    events = re.findall(r"event=(\w+)", printed)
    assert (events[0], events[-1], set(events[1:-1])) == ("begin", "end", {"tokens"})
    assert '"finish_reason"' in printed


KCAT = (("kafka-topics.sh", "replies.demo"), ("kcat", "-P"), ("kcat", "-C"))


def shell(line: str) -> str:
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
