"""What the worker makes of a cluster's answers, with an admin client of the test's own making."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from aiokafka import TopicPartition
from aiokafka.cluster import ClusterMetadata
from aiokafka.errors import (
    CoordinatorNotAvailableError,
    GroupLoadInProgressError,
    NotCoordinatorForGroupError,
    TopicAuthorizationFailedError,
)
from aiokafka.producer.transaction_manager import TransactionManager
from aiokafka.structs import BrokerMetadata, OffsetAndMetadata

from schemas.connection import KafkaConnection
from service.broker import EmbeddedBroker
from worker.app import check_kafka
from worker.config import WorkerConfig
from worker.transport.kafka_connections import KafkaConnections, KafkaUnavailable

P0, P1 = TopicPartition("prompts.standard", 0), TopicPartition("prompts.standard", 1)


def connections(*, error_code: int = 0, partitions: Any = ((0, 5, "1:1", 0), (1, -1, "", 0))) -> KafkaConnections:
    """Connections to a coordinator that answers so to a question for committed offsets."""
    topics = [("prompts.standard", list(partitions))] if partitions else []
    answer = SimpleNamespace(error_code=error_code, topics=topics)

    async def send(_node: int, _request: object) -> SimpleNamespace:
        return answer

    async def find_coordinator(_group: str) -> int:
        return 1

    made = KafkaConnections(
        KafkaConnection(), client_id="t", request_timeout_ms=1, session_timeout_ms=6000, rebalance_timeout_ms=60_000
    )
    made.admin = SimpleNamespace(find_coordinator=find_coordinator, _client=SimpleNamespace(send=send))
    return made


async def test_committed_offsets_come_with_their_metadata():
    """Offset and done map; -1 is a partition without a commit."""
    found = await connections().committed("g", [P0, P1])
    assert found == {P0: OffsetAndMetadata(5, "1:1"), P1: OffsetAndMetadata(-1, "")}


async def test_t06_an_answer_that_failed_as_a_whole_is_no_group_without_commits():
    """A coordinator that loads its groups answers with an error and no partition (found by reading: aiokafka 0.14
    overlooks it; a worker would have served every request of the log again)."""
    with pytest.raises(GroupLoadInProgressError):
        await connections(error_code=14, partitions=()).committed("g", [P0])
    with pytest.raises(NotCoordinatorForGroupError):
        await connections(partitions=((0, -1, "", 16),)).committed("g", [P0])
    with pytest.raises(CoordinatorNotAvailableError):
        await connections(partitions=()).committed("g", [P0])


class Consumer:
    """Remembers the options that it was made with."""

    def __init__(self, **options: Any) -> None:
        self.options = options


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> KafkaConnections:
    """Connections that make such consumers."""
    monkeypatch.setattr("worker.transport.kafka_connections.LogConsumer", Consumer)
    return connections()


def test_t11_lanes_have_no_static_membership(made: KafkaConnections):
    """Static members leave their partitions idle for a session when they stop; nothing is committed by itself."""
    options = made.lane_consumer("g", "me").options
    assert "group_instance_id" not in options
    assert options["enable_auto_commit"] is False
    assert options["auto_offset_reset"] == "earliest"


def test_a_join_that_is_never_answered_is_made_again(made: KafkaConnections):
    """A request outlives the re-balance that it waits for, and no more; on the embedded broker, which has lost joins,
    that is 20 s."""
    assert made.lane_consumer("g", "me").options["request_timeout_ms"] == 65_000
    made.idempotent = False
    options = made.lane_consumer("g", "me").options
    assert (options["rebalance_timeout_ms"], options["request_timeout_ms"]) == (15_000, 20_000)


def test_t31_reply_logs_are_read_without_a_group(made: KafkaConnections):
    """Nobody commits offsets of a reply topic: such a commit hangs when the topic is deleted."""
    assert "group_id" not in made.consumer(fetch_max_wait_ms=1).options


@pytest.mark.parametrize("value", ["true", "false"])
async def test_t29_a_broker_that_creates_topics_is_warned_of(made: KafkaConnections, value: str):
    """A deleted reply topic may come back there: the worker says so at its start."""
    entries = [{"config_names": "auto.create.topics.enable", "config_value": value}]
    answer = SimpleNamespace(to_object=lambda: {"resources": [{"config_entries": entries}]})

    async def describe_configs(_resources: object) -> list[SimpleNamespace]:
        return [answer]

    made.admin.describe_configs = describe_configs
    made.admin._client.get_random_node = lambda: 1
    with structlog.testing.capture_logs() as logs:
        await made._warn_of_broker()
    assert [entry["event"] for entry in logs] == ["kafka.auto_creates_topics"] * (value == "true")


@pytest.mark.broker
async def test_a_broker_without_idempotent_producers_is_warned_of_once(broker: EmbeddedBroker):
    """At the worker's start; another producer in place of one that broke is no news."""
    made = KafkaConnections(
        KafkaConnection(bootstrap=broker.bootstrap),
        client_id="t",
        request_timeout_ms=10_000,
        session_timeout_ms=6000,
        rebalance_timeout_ms=60_000,
    )
    with structlog.testing.capture_logs() as logs:
        async with made:
            await made.replace_producer(made.producer)
        settings = {"bootstrap": broker.bootstrap, "model": "tiny", "lane_prefix": "nothing."}
        with pytest.raises(KafkaUnavailable, match="these topics do not exist"):
            await check_kafka(WorkerConfig(**settings))  # before the model is loaded
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["kafka.no_idempotent_producer"]


class Cluster:
    """An admin client that answers questions about topics, and a producer with aiokafka's own state."""

    def __init__(self, made: KafkaConnections) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self.metadata = ClusterMetadata()
        self.metadata._brokers = {1: BrokerMetadata(1, "h", 1, None)}
        self.manager = TransactionManager(None, 60_000)
        client = SimpleNamespace(cluster=self.metadata, _topics=set())
        made.producer = SimpleNamespace(client=client, _txn_manager=self.manager)
        made.admin = SimpleNamespace(_client=SimpleNamespace(send=self.send, get_random_node=lambda: 1))

    async def send(self, _node: int, request: Any) -> Any:
        topics = [self.answers.get(name, topic(name, error_code=3, leaders=())) for name in request._topics or ()]
        return SimpleNamespace(to_object=lambda: {"topics": topics})


def topic(name: str, *, error_code: int = 0, leaders: tuple[int, ...] = (1,)) -> dict[str, Any]:
    fields = {"error_code": 0, "replicas": [1], "isr": [1]}
    partitions = [{"partition": number, "leader": leader} | fields for number, leader in enumerate(leaders)]
    return {"topic": name, "error_code": error_code, "partitions": partitions}


@pytest.fixture
async def cluster(made: KafkaConnections) -> Cluster:
    return Cluster(made)


async def test_what_is_known_of_a_topic_spares_the_producer_its_question(made: KafkaConnections, cluster: Cluster):
    """Its first record goes straight to the leader; a topic without one, or with an unknown one, it asks about."""
    cluster.answers = {name: topic(name, leaders=(leader,)) for name, leader in (("a", 1), ("b", -1), ("c", 9))}
    assert [await made.partitions_of(name) for name in ("a", "b", "c", "gone")] == [1, 1, 1, 0]
    assert cluster.metadata.leader_for_partition(TopicPartition("a", 0)) == 1
    assert cluster.metadata.topics() == {"a"}


async def test_t29_what_a_producer_remembers_is_bounded(
    made: KafkaConnections, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """Ten thousand logs that are over leave no metadata; their sequence numbers go with the producer, in time."""
    replaced: list[Any] = []

    async def start() -> Any:
        return SimpleNamespace(client=made.producer.client, _txn_manager=TransactionManager(None, 60_000))

    async def stop() -> None:
        replaced.append(1)

    monkeypatch.setattr(made, "_start_producer", start)
    monkeypatch.setattr("worker.transport.kafka_connections.MAX_SEQUENCES", 1000)
    made.producer.stop = stop
    for number in range(10_000):
        name = f"replies.{number}"
        cluster.answers = {name: topic(name)}
        await made.partitions_of(name)
        made.remember_topic(name)
        made.producer._txn_manager.increment_sequence_number(TopicPartition(name, 0), 1)
        made.forget_topic(name)
        await asyncio.sleep(0)
        if made._stopping:
            made.producer.stop = stop
            await asyncio.gather(*made._stopping)
            made._stopping.clear()
    assert 8 <= len(replaced) <= 10
    assert made.num_sequences <= 1001
    assert made.num_producer_topics == 0
    assert not cluster.metadata._partitions
    assert not any(cluster.metadata._broker_partitions.values())


async def test_a_topic_that_this_user_may_not_see_is_not_taken_for_missing(made: KafkaConnections, cluster: Cluster):
    """Of a reply topic that is the caller's affair; of one that the worker needs it is a sentence at start."""
    cluster.answers = {"secret": topic("secret", error_code=29, leaders=()), "open": topic("open")}
    with pytest.raises(TopicAuthorizationFailedError):
        await made.partitions_of("secret")
    with pytest.raises(KafkaUnavailable, match=r"may not use the topic .*secret.*docs/security.md"):
        await made.count_partitions(["open", "secret"])
    assert await made.count_partitions(["open", "gone"]) == {"open": 1, "gone": 0}
