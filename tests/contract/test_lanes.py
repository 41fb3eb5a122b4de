"""Lanes on every broker: each record is delivered, what is done is committed, and a group shares its partitions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition

from tests.contract.brokers import ERRORS, GROUPS, METADATA, NODES, Cluster, fresh
from worker.transport.kafka_connections import KafkaConnections
from worker.transport.kafka_lane import KafkaLane
from worker.transport.protocols import Delivery

FETCH, OFFSET_COMMIT, OFFSET_FETCH, HEARTBEAT = 1, 8, 9, 12  # of Kafka's APIs
LOADING, NO_COORDINATOR, NOT_COORDINATOR, REBALANCING = 14, 15, 16, 27
PARTITIONS = 4


class Consuming:
    """A running lane, and what it was given."""

    def __init__(self, connections: KafkaConnections, topic: str, max_outstanding: int) -> None:
        self.deliveries: list[Delivery] = []
        self.num_losses = 0
        self._done: set[int] = set()  # indices of deliveries
        self.lane = KafkaLane(
            "standard",
            topic,
            connections.lane_consumer(f"carousel.{topic}", "contract"),
            deliver=self.deliveries.append,
            lost=self._count_loss,
            shared=lambda: None,
            partitions_of=connections.partitions_of,
            num_partitions=PARTITIONS,
            committed=connections.committed,
            max_outstanding=max_outstanding,
            max_outstanding_bytes=10**7,
            commit_interval=0.1,
        )

    def _count_loss(self, _tier: str) -> None:
        self.num_losses += 1

    @property
    def values(self) -> list[int]:
        return sorted(int(d.value or b"-1") for d in self.deliveries)

    @property
    def owned(self) -> set[int]:
        """Values that are ours now."""
        return {int(d.value or b"-1") for d in self.deliveries if self.lane.owns(d)}

    def done(self, *values: int) -> None:
        """Marks these done, or everything: what is ours of it and not done yet."""
        for index, delivery in enumerate(self.deliveries):
            wanted = not values or int(delivery.value or b"-1") in values
            if wanted and index not in self._done and self.lane.owns(delivery):
                self._done.add(index)
                self.lane.done(delivery)


@contextlib.asynccontextmanager
async def consuming(cluster: Cluster, topic: str, max_outstanding: int = 100) -> AsyncIterator[Consuming]:
    async with cluster.connections() as connections:
        worker = Consuming(connections, topic, max_outstanding)
        task = asyncio.create_task(worker.lane.run())
        try:
            async with asyncio.timeout(90):
                await worker.lane.assigned.wait()
            yield worker
        finally:
            worker.lane.stop()
            await asyncio.wait_for(task, 60)


async def until(condition: Callable[[], object], timeout: float = 60) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.02)


async def lane_topic(cluster: Cluster, partitions: int = 1) -> str:
    topic = fresh("prompts")
    await cluster.create(topic, partitions=partitions)
    return topic


async def publish(cluster: Cluster, topic: str, values: range, partitions: int = 1) -> None:
    async with AIOKafkaProducer(bootstrap_servers=cluster.bootstrap) as producer:
        sends = [producer.send_and_wait(topic, b"%d" % v, partition=v % partitions) for v in values]
        await asyncio.gather(*sends)


async def position(cluster: Cluster, topic: str, partition: int = 0) -> int:
    async with cluster.connections() as connections:
        wanted = TopicPartition(topic, partition)
        found = await connections.committed(f"carousel.{topic}", [wanted])
        return found[wanted].offset if wanted in found else -1


async def test_every_record_once_and_committed_to_the_end(cluster: Cluster):
    """Forty waiting records and room for ten, done as they come: never more are outstanding, each is delivered once."""
    topic = await lane_topic(cluster)
    await publish(cluster, topic, range(40))
    async with consuming(cluster, topic, max_outstanding=10) as worker:
        while len(worker.values) < 40:
            taken_in = len(worker.values)
            assert worker.lane.num_outstanding <= 10
            worker.done()
            await until(lambda taken_in=taken_in: len(worker.values) > taken_in)
        assert worker.values == list(range(40))
        worker.done()
    assert await position(cluster, topic) == 40


async def test_t07_what_is_not_done_comes_again(cluster: Cluster):
    """The second of three is not done: the next worker gets that and what is new, and nothing else. Not even when the
    coordinator is loading, or has moved, in the moment in which it asks where to begin."""
    cluster.needs(METADATA)
    topic = await lane_topic(cluster)
    await publish(cluster, topic, range(3))
    async with consuming(cluster, topic) as worker:
        await until(lambda: len(worker.values) == 3)
        worker.done(0, 2)
    assert await position(cluster, topic) == 1
    await publish(cluster, topic, range(3, 4))
    if ERRORS not in cluster.lacks:
        cluster.handle.errors(OFFSET_FETCH, [LOADING, NOT_COORDINATOR] * 2)
    async with consuming(cluster, topic) as worker:
        await until(lambda: 3 in worker.values)
        assert worker.values == [1, 3]


async def test_t17_a_second_worker_joins_and_leaves(cluster: Cluster):
    """What stays keeps running, what moves is delivered to the other, what comes back is delivered again: in the end
    every record is done by somebody, and committed."""
    cluster.needs(GROUPS)
    topic = await lane_topic(cluster, PARTITIONS)
    await publish(cluster, topic, range(40), PARTITIONS)
    async with consuming(cluster, topic) as first:
        await until(lambda: len(first.values) == 40)
        async with consuming(cluster, topic) as second:
            await until(lambda: first.num_losses >= 1 and first.owned | second.owned == set(range(40)))
            assert not first.owned & second.owned
            finished = list(second.owned)[:5]
            second.done(*finished)
        await until(lambda: first.owned >= set(range(40)) - set(finished))
        first.done()
        await until(lambda: first.lane.num_outstanding == 0)
    assert [await position(cluster, topic, p) for p in range(PARTITIONS)] == [10] * PARTITIONS


@pytest.mark.slow
async def test_t01_a_blocked_event_loop(cluster: Cluster):
    """Nothing runs for longer than the session: the member is evicted, comes back by itself and consumes on."""
    topic = await lane_topic(cluster)
    async with consuming(cluster, topic) as worker:
        await publish(cluster, topic, range(1))
        await until(lambda: worker.values == [0])
        time.sleep(10)
        await publish(cluster, topic, range(1, 3))
        await until(lambda: {1, 2} <= set(worker.values))
        async with asyncio.timeout(60):
            while await position(cluster, topic) != 3:  # what came before the eviction was known comes again
                worker.done()
                await asyncio.sleep(0.1)


async def test_t02_commits_that_fail(cluster: Cluster):
    """Whatever a coordinator answers to a commit, the lane goes on, and in the end everything is committed."""
    cluster.needs(ERRORS)
    topic = await lane_topic(cluster)
    async with consuming(cluster, topic) as worker:
        await publish(cluster, topic, range(2))
        await until(lambda: worker.values == [0, 1])
        # Not ILLEGAL_GENERATION: who joins again as a stranger is a second member, which the mock's groups cannot have.
        cluster.handle.errors(OFFSET_COMMIT, [LOADING, NO_COORDINATOR, NOT_COORDINATOR])
        worker.done(0)
        await publish(cluster, topic, range(2, 4))
        await until(lambda: {2, 3} <= set(worker.values))
        async with asyncio.timeout(60):
            while await position(cluster, topic) < 1:
                await asyncio.sleep(0.1)
        worker.done()
        await until(lambda: worker.lane.num_outstanding == 0)
    assert await position(cluster, topic) == 4


async def test_heartbeats_and_fetches_that_fail(cluster: Cluster):
    """Errors of the coordinator and of the leader pass: every record comes once, and is committed."""
    cluster.needs(ERRORS)
    topic = await lane_topic(cluster)
    async with consuming(cluster, topic) as worker:
        cluster.handle.errors(HEARTBEAT, [NOT_COORDINATOR, REBALANCING])
        cluster.handle.errors(FETCH, [6, 3, 7])
        await publish(cluster, topic, range(20))
        await until(lambda: len(set(worker.values)) == 20)
        worker.done()
        await until(lambda: worker.lane.num_outstanding == 0)
    assert await position(cluster, topic) == 20


async def test_t03_brokers_that_go_away_and_come_back(cluster: Cluster):
    """The lane's leader moves, then nobody answers for a while: consuming goes on by itself, nothing is lost."""
    cluster.needs(NODES)
    topic = await lane_topic(cluster)
    async with consuming(cluster, topic) as worker:
        await publish(cluster, topic, range(5))
        await until(lambda: len(worker.values) == 5)
        await cluster.move_leader(topic, 1)
        await publish(cluster, topic, range(5, 10))
        await until(lambda: len(set(worker.values)) == 10)
        await cluster.brokers_away(2.0)
        await publish(cluster, topic, range(10, 15))
        await until(lambda: len(set(worker.values)) == 15)
        worker.done()
        await until(lambda: worker.lane.num_outstanding == 0)
    assert await position(cluster, topic) == 15
