"""A responder on lanes of the test's own, and a client of it; lanes without anybody."""

import logging
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from schemas.connection import KafkaConnection
from service.broker import EmbeddedBroker
from service.client import Client
from tests.service.operated import Cluster
from tests.service.responder import Responder


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


@pytest.fixture
def cluster(broker: EmbeddedBroker) -> Iterator[Cluster]:
    """Fresh lanes on the embedded broker; logging as it was afterwards."""
    yield Cluster(broker.bootstrap)
    client_log = logging.getLogger("aiokafka")
    client_log.propagate = True
    client_log.handlers.clear()
