"""A responder on lanes of the test's own, and a client of it."""

import uuid
from collections.abc import AsyncIterator

import pytest

from schemas.connection import KafkaConnection
from service.broker import EmbeddedBroker
from service.client import Client
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
