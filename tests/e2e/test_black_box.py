"""The independent checks of the wire contract against a running worker, on both brokers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.connection import KafkaConnection
from service.broker import EmbeddedBroker
from service.topics import create_topics
from tests.e2e.workers import WorkerProcess


async def run_checks(bootstrap: str, checks: Path, tmp_path: Path) -> None:
    await create_topics(KafkaConnection(bootstrap=bootstrap))
    with WorkerProcess(bootstrap, tmp_path / "worker.log") as worker:
        command = [sys.executable, str(checks / "raw_client.py"), "--bootstrap", bootstrap, "--timeout", "30"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert result.returncode == 0, result.stdout + result.stderr[-2000:]
        assert worker.stop() == 0


@pytest.mark.broker
@pytest.mark.shared
async def test_raw_client_on_the_embedded_broker(broker: EmbeddedBroker, checks: Path, tmp_path: Path):
    """A client that knows only Kafka, msgpack and the contract finds nothing wrong; the worker stops cleanly."""
    await run_checks(broker.bootstrap, checks, tmp_path)


@pytest.mark.kafka
@pytest.mark.shared
async def test_raw_client_on_apache_kafka(kafka: Any, checks: Path, tmp_path: Path):
    """The same on Apache Kafka."""
    await run_checks(kafka.bootstrap, checks, tmp_path)


@pytest.mark.kafka
@pytest.mark.shared
async def test_spring_clients_on_apache_kafka(kafka: Any, checks: Path, tmp_path: Path):
    """Spring's ReplyingKafkaTemplate and AggregatingReplyingKafkaTemplate work unchanged (Java)."""
    await create_topics(KafkaConnection(bootstrap=kafka.bootstrap))
    with WorkerProcess(kafka.bootstrap, tmp_path / "worker.log"):
        command = ["bash", str(checks / "spring" / "run"), kafka.bootstrap]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
