"""The brokers that the contract suite runs on, and what each of them cannot do."""

import asyncio
import contextlib
import importlib
import os
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from schemas.connection import KafkaConnection
from service.kafka import TopicAdmin, TopicSpec
from worker.transport.kafka_connections import KafkaConnections

VARIABLE = "CAROUSEL_TEST_BOOTSTRAP"  # another broker to run the suite on: noida-db, or a real cluster
SESSION_S = 6.0  # of the lanes' groups
GROUPS = "groups of two"
DELETION = "deleting topics"
METADATA = "commit metadata"
ERRORS = "injected errors"
NODES = "brokers that go down and leaders that move"


@dataclass(slots=True)
class Cluster:
    """A broker under test. `lacks`: ability -> the reason why not."""

    bootstrap: str
    lacks: dict[str, str] = field(default_factory=dict)
    handle: Any = None  # the mock cluster, or Apache Kafka's, for those that can do what only it can

    def needs(self, *abilities: str) -> None:
        """Skips the test where the broker cannot do what it is about."""
        for ability in abilities:
            if ability in self.lacks:
                pytest.skip(f"{ability}: {self.lacks[ability]}")

    async def create(self, *topics: str, partitions: int = 1) -> None:
        async with TopicAdmin(KafkaConnection(bootstrap=self.bootstrap)) as admin:
            await admin.create([TopicSpec(topic, partitions) for topic in topics])
            await admin.wait_for_leaders(topics)

    async def delete(self, *topics: str) -> None:
        async with TopicAdmin(KafkaConnection(bootstrap=self.bootstrap)) as admin:
            await admin.delete(topics)

    async def move_leader(self, topic: str, number: int) -> None:
        """Partition 0 of a topic gets another leader: the broker that leads it stops, and starts again."""
        node = self.handle.nodes[number % 3]
        await asyncio.to_thread(node.stop)
        node.start(wait=False)  # here: the broker ends with the thread that starts it
        await asyncio.to_thread(node.wait)

    async def brokers_away(self, seconds: float) -> None:
        """Nobody answers for a while."""
        for node in self.handle.nodes:
            node.freeze()
        await asyncio.sleep(seconds)
        for node in self.handle.nodes:
            node.thaw()

    @contextlib.asynccontextmanager
    async def connections(self, **settings: int) -> AsyncIterator[KafkaConnections]:
        """The worker's connections to it."""
        session_ms = int(SESSION_S * 1000)
        defaults = {"request_timeout_ms": 20_000, "session_timeout_ms": session_ms, "rebalance_timeout_ms": 15_000}
        connection = KafkaConnection(bootstrap=self.bootstrap)
        async with KafkaConnections(connection, client_id="contract", **(defaults | settings)) as connections:
            yield connections


class Mock(Cluster):
    """librdkafka's mock cluster has no admin calls: its topics are made in process."""

    async def create(self, *topics: str, partitions: int = 1) -> None:
        for topic in topics:
            self.handle.create_topic(topic, partitions, replication=3)

    async def move_leader(self, topic: str, number: int) -> None:
        self.handle.leader(topic, 0, number % 3 + 1)

    async def brokers_away(self, seconds: float) -> None:
        for broker in (1, 2, 3):
            self.handle.down(broker)
        await asyncio.sleep(seconds)
        for broker in (1, 2, 3):
            self.handle.up(broker)


_ONLY_MOCK = {ERRORS: "only librdkafka's mock cluster answers with errors at will"}
_ONE_BROKER = {NODES: "there is one broker"}


def embedded(request: pytest.FixtureRequest) -> Cluster:
    lacks = {METADATA: "Tansu forgets it", DELETION: "Tansu creates a deleted topic again when it is asked for"}
    return Cluster(request.getfixturevalue("broker").bootstrap, _ONLY_MOCK | _ONE_BROKER | lacks)


def mock(request: pytest.FixtureRequest) -> Cluster:
    request.getfixturevalue("checks")
    pytest.importorskip("confluent_kafka", reason="librdkafka's mock cluster comes with confluent-kafka")
    handle = importlib.import_module("mock_cluster").MockCluster(brokers=3)
    request.addfinalizer(handle.close)
    lacks = {GROUPS: "the mock cluster's groups have one member", DELETION: "the mock cluster has no admin calls"}
    return Mock(handle.bootstrap, lacks, handle)


def apache(request: pytest.FixtureRequest) -> Cluster:
    handle = request.getfixturevalue("kafka")
    return Cluster(handle.bootstrap, _ONLY_MOCK | _ONE_BROKER, handle)


def apache_of_three(request: pytest.FixtureRequest) -> Cluster:
    handle = request.getfixturevalue("kafka_of_three")
    return Cluster(handle.bootstrap, dict(_ONLY_MOCK), handle)


def named(_request: pytest.FixtureRequest) -> Cluster:
    nothing = "it is not ours to break"
    return Cluster(os.environ[VARIABLE], {ERRORS: nothing, NODES: nothing})


ALL = [
    pytest.param(embedded, id="embedded", marks=pytest.mark.broker),
    pytest.param(mock, id="mock", marks=pytest.mark.shared),
    pytest.param(apache, id="kafka", marks=pytest.mark.kafka),
    pytest.param(apache_of_three, id="kafka-of-3", marks=[pytest.mark.kafka, pytest.mark.slow]),
    *([pytest.param(named, id="named")] if os.environ.get(VARIABLE) else []),
]


def fresh(prefix: str) -> str:
    """A name that no other test uses."""
    return f"{prefix}.{uuid.uuid4().hex[:12]}"
