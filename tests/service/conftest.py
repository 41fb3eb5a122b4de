"""A broker for the session, and a responder on lanes of the test's own."""

import importlib.util
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.connection import KafkaConnection
from service.broker import EmbeddedBroker
from service.client import Client
from tests.service.responder import Responder


@pytest.fixture(scope="session")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as running:
        yield running


@pytest.fixture
async def responder(broker: EmbeddedBroker) -> AsyncIterator[Responder]:
    """A running responder on lanes of its own, on the embedded broker."""
    connection = KafkaConnection(bootstrap=broker.bootstrap)
    async with Responder(connection, f"t{uuid.uuid4().hex[:8]}.").running() as running:
        yield running


@pytest.fixture
async def client(responder: Responder) -> AsyncIterator[Client]:
    """A client of the responder's lanes."""
    async with Client(connection=responder.connection, lane_prefix=responder.lane_prefix) as running:
        yield running


@pytest.fixture(scope="session")
def kafka() -> Iterator[Any]:
    """Apache Kafka, one broker: the `cluster.Cluster` of the folder that has it."""
    folder = Path(os.environ.get("KAFKA_HOME") or Path(__file__).parents[3] / "shared" / "kafka")
    spec = importlib.util.spec_from_file_location("cluster", folder / "cluster.py")
    if spec is None or spec.loader is None or not (folder / "cluster.py").is_file():
        pytest.skip(f"no Apache Kafka: {folder} has no cluster.py (KAFKA_HOME names another folder)")
    cluster = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cluster)
    if reason := cluster.available():
        pytest.skip(reason)
    with cluster.Cluster() as running:
        yield running
