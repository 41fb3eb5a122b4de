"""What the documents tell to type, typed: Python snippets and commands against a broker and a worker."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.connection import KafkaConnection
from service.broker import EmbeddedBroker
from service.topics import create_topics
from tests.deploy.stack import ROOT
from tests.e2e.workers import WorkerProcess
from tests.test_docs import DOCUMENTS, blocks, carousel_commands, command_lines

COMMANDS = ("submit", "status", "cancel", "topics", "dlq", "reap")  # those that end by themselves
NO_SUCH_RECORD = ("show", "redrive")  # their example names a dead letter that is not there
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


def commands() -> list[tuple[str, ...]]:
    """Each once."""
    lines = (line for file in DOCUMENTS for line in command_lines(file))
    typed = dict.fromkeys(tuple(words) for line in lines for words in carousel_commands(line))
    return [words for words in typed if words[0] in COMMANDS and not set(words) & set(NO_SUCH_RECORD)]


@pytest.mark.broker
def test_what_the_documents_tell_to_type(tmp_path: Path):
    """Every Python snippet that opens a client prints an answer; every command that ends by itself ends with 0."""
    assert len(snippets()) >= 2
    assert len(commands()) >= 8
    with EmbeddedBroker() as broker:
        asyncio.run(create_topics(KafkaConnection(bootstrap=broker.bootstrap), partitions=2))
        worker = WorkerProcess(broker.bootstrap, tmp_path / "worker.log")
        worker.start()
        try:
            for name, content in snippets():
                for address in ADDRESSES:
                    content = content.replace(address, broker.bootstrap)
                done = run(["-c", content], broker.bootstrap)
                assert done.returncode == 0, f"{name}: {done.stderr}"
                assert "Usage(" in done.stdout
            for words in commands():
                given = [broker.bootstrap if word in ADDRESSES else word for word in words]
                done = run(["-m", "service", *given], broker.bootstrap)
                assert done.returncode == 0, f"carousel {' '.join(words)}: {done.stderr}"
        finally:
            worker.end()
