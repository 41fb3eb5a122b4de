"""Creating the topics of a deployment."""

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from aiokafka.errors import UnknownError

from schemas.connection import KafkaConnection
from schemas.topics import CANCEL_TTL_MS
from service.broker import EmbeddedBroker
from service.errors import BrokerUnavailable, TopicsFailed
from service.kafka import TopicAdmin, TopicSpec, _without_aiokafkas_complaint, start_producer, stop_producer
from service.reply_reader import ReplyReader
from service.topics import create_topics, topic_plan
from worker.transport.kafka_connections import KafkaConnections, KafkaUnavailable


def test_plan() -> None:
    """Lanes have the partitions asked for, the others one, and control keeps cancels as long as they count."""
    plan = {spec.name: spec for spec in topic_plan(partitions=7, lane_prefix="m.")}
    assert {name: spec.partitions for name, spec in plan.items()} == {
        "m.interactive": 7,
        "m.standard": 7,
        "m.batch": 7,
        "m.control": 1,
        "m.dlq": 1,
        "usage": 1,
    }
    assert int(plan["m.control"].config["retention.ms"]) >= CANCEL_TTL_MS


@pytest.mark.broker
async def test_creates_what_is_missing(broker: EmbeddedBroker) -> None:
    """The first call creates all, the second finds all; partitions are as asked for."""
    connection = KafkaConnection(bootstrap=broker.bootstrap)
    prefix = f"t{uuid.uuid4().hex[:8]}."
    first = await create_topics(connection, lane_prefix=prefix)
    second = await create_topics(connection, lane_prefix=prefix, partitions=3)
    lanes = {prefix + name for name in ("interactive", "standard", "batch", "control", "dlq")}
    assert lanes <= set(first.created)
    assert second.created == ()
    assert lanes < set(second.existed)
    async with TopicAdmin(connection) as admin:
        assert lanes <= await admin.list()
        await admin.wait_for_leaders(sorted(lanes))
        await admin.delete([*lanes, f"{prefix}never-was"])
        assert not lanes & await admin.list()


async def test_unreachable_broker_is_one_sentence() -> None:
    """A refused connection names the address and the cause."""
    with pytest.raises(BrokerUnavailable, match=r"no Kafka at 127\.0\.0\.1:1: nobody listens there"):
        await create_topics(KafkaConnection(bootstrap="127.0.0.1:1"))


START: dict[str, Callable[[KafkaConnection], Any]] = {
    "admin": lambda connection: TopicAdmin(connection).start(),
    "producer": start_producer,
    "reader": lambda connection: ReplyReader(connection, list).start(),
    "worker": lambda connection: KafkaConnections(
        connection, client_id="w", request_timeout_ms=30_000, session_timeout_ms=10_000, rebalance_timeout_ms=60_000
    ).__aenter__(),
}


@pytest.mark.parametrize("who", START)
async def test_whoever_takes_connections_and_says_nothing_is_no_kafka(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up after CONNECT_S, by callers and by workers, with one sentence, and nothing is left open."""
    monkeypatch.setattr("schemas.connection.CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connection = KafkaConnection(bootstrap=f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises((BrokerUnavailable, KafkaUnavailable), match=r":\d+: (no|it does not) answer"):
            async with asyncio.timeout(20):
                await START[who](connection)


class _Answers:
    """Stands in for aiokafka's admin client: each call gets the next error code and message."""

    def __init__(self, *answers: tuple[int, str | None]) -> None:
        self._answers = list(answers)
        self._client = self
        self.cluster = SimpleNamespace(controller="1")

    def force_metadata_update(self) -> None:
        pass

    async def create_topics(self, topics: list) -> SimpleNamespace:
        code, message = self._answers.pop(0)
        return SimpleNamespace(topic_errors=[(topic.name, code, message) for topic in topics])


async def test_t10_creation_waits_for_a_cluster_that_changes() -> None:
    """The controller has moved; or brokers start or stop, and it blames the replication factor (found by bench.faults):
    that passes. A factor that was asked for and that the cluster cannot have does not."""
    fenced = "Unable to replicate the partition 1 time(s): All brokers are currently fenced."
    too_few = "The target replication factor of 3 cannot be reached because only 2 broker(s) are registered."
    admin = TopicAdmin(KafkaConnection())
    admin._client = _Answers((38, too_few), (41, None), (0, None), (38, fenced), (0, None), (38, too_few))
    assert await admin.create([TopicSpec("the cluster's default")]) == frozenset()
    assert await admin.create([TopicSpec("one", replication_factor=1)]) == frozenset()
    with pytest.raises(TopicsFailed, match="InvalidReplicationFactor"):
        await admin.create([TopicSpec("three", replication_factor=3)])


class _Elections:
    """Stands in for aiokafka's admin client: each look at the topics finds the next of `leaders` (None: no topic)."""

    def __init__(self, *looks: dict[str, int | None]) -> None:
        self.looks = list(looks)
        self.asked: list[list[str]] = []
        self._client = self

    def force_metadata_update(self) -> None:
        pass

    async def describe_topics(self, names: list[str]) -> list[dict[str, Any]]:
        self.asked.append(names)
        leaders = self.looks.pop(0)
        partitions = {n: [] if leaders[n] is None else [{"partition": 0, "leader": leaders[n]}] for n in names}
        return [{"topic": name, "partitions": partitions[name]} for name in names]


async def test_t30_new_topics_are_waited_for_until_each_has_a_leader() -> None:
    """A creation that was answered says nothing of the brokers: the topic may not show yet, or have no leader."""
    admin = TopicAdmin(KafkaConnection())
    elections = admin._client = _Elections({"a": None, "b": 2}, {"a": -1}, {"a": 0})
    await admin.wait_for_leaders(["b", "a"])
    assert elections.asked == [["a", "b"], ["a"], ["a"]]
    never = TopicAdmin(KafkaConnection(), patience=0.0)
    never._client = _Elections(*[{"a": -1}] * 10)
    with pytest.raises(BrokerUnavailable, match="could not find the leaders of new topics"):
        await never.wait_for_leaders(["a"])


@pytest.mark.broker
async def test_a_broker_without_idempotent_producers_is_worth_no_line(
    broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    """Every command would say it: neither we nor aiokafka do, whose other complaints are heard as before."""
    with structlog.testing.capture_logs() as entries:
        await stop_producer(await start_producer(KafkaConnection(bootstrap=broker.bootstrap)))
    assert entries == []
    assert caplog.records == []
    with _without_aiokafkas_complaint():
        logging.getLogger("aiokafka.producer.sender").error("Unexpected error during %s", UnknownError)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
