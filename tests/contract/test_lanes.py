"""Lanes on every broker: each record is delivered, what is done is committed, and a group shares its partitions."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition

from tests.contract.brokers import ERRORS, GROUPS, METADATA, NODES, SESSION_S, Cluster, fresh
from worker.transport.kafka_connections import KafkaConnections
from worker.transport.kafka_lane import KafkaLane
from worker.transport.protocols import Delivery
from worker.watchdog import LaneWatchdog

FETCH, OFFSET_COMMIT, OFFSET_FETCH, HEARTBEAT = 1, 8, 9, 12  # of Kafka's APIs
LOADING, NO_COORDINATOR, NOT_COORDINATOR, REBALANCING = 14, 15, 16, 27
PARTITIONS = 4
SLOW_MACHINE_S = 10.0  # that shares its cores with a whole run of the tests


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
    """Nothing runs for longer than the session: the member is evicted, comes back by itself and consumes on, and
    commits, within twice the session (seen: under a second on every broker) and what a slow machine takes beyond."""
    topic = await lane_topic(cluster)
    async with consuming(cluster, topic) as worker:
        await publish(cluster, topic, range(1))
        await until(lambda: worker.values == [0])
        time.sleep(SESSION_S + 4)
        async with asyncio.timeout(2 * SESSION_S + SLOW_MACHINE_S):
            await publish(cluster, topic, range(1, 3))
            await until(lambda: {1, 2} <= set(worker.values))
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


class Polls:
    """A lane's polls. `hold`: what they have found they give back no more."""

    def __init__(self, lane: KafkaLane) -> None:
        self.num_pending = 0
        self.hold = False
        self.holding = asyncio.Event()
        self._getmany = lane._consumer.getmany
        lane._consumer.getmany = self._poll

    async def _poll(self, **options: Any) -> dict[TopicPartition, list[Any]]:
        self.num_pending += 1
        try:
            batch = await self._getmany(**options)
            if batch and self.hold:
                self.holding.set()
                await asyncio.Event().wait()
            return batch
        finally:
            self.num_pending -= 1


async def cut_off(
    lane: KafkaLane, task: asyncio.Task[None], polls: Polls, moment: str, publish_more: Callable[[], Awaitable[None]]
) -> None:
    """Ends the task of a lane in the middle of a fetch, before, while or after more is published."""
    if moment in ("while it waits", "told to stop"):
        await until(lambda: polls.num_pending == 1)
        _ = task.cancel() if moment == "while it waits" else lane.stop()
    elif moment == "with records in hand":
        polls.hold = True
        await publish_more()
        await asyncio.wait_for(polls.holding.wait(), 60)
        task.cancel()
    else:
        deliver = lane._deliver

        def deliver_and_cancel(delivery: Delivery) -> None:
            deliver(delivery)
            task.cancel()

        lane._deliver = deliver_and_cancel
        await publish_more()
    await asyncio.wait([task], timeout=20)
    assert task.done()
    assert task.cancelled() == (moment != "told to stop")
    assert polls.num_pending == 0
    if moment in ("while it waits", "told to stop"):
        await publish_more()


async def test_t09_a_poll_that_is_cut_off_loses_nothing(cluster: Cluster):
    """Four lanes, one after the other, end in the middle of a fetch: cancelled, as the watchdog does, or told to stop.
    Each ends at once; the next gets what is not done, also what the poll had in its hands, and nothing that is done."""
    topic = await lane_topic(cluster)
    await publish(cluster, topic, range(3))
    moments = ("while it waits", "with records in hand", "among its records", "told to stop")
    for life, moment in enumerate(moments):
        undone, end = list(range(life, 3 * life + 3)), 3 * life + 3
        async with cluster.connections() as connections:
            worker = Consuming(connections, topic, max_outstanding=100)
            polls = Polls(worker.lane)
            task = asyncio.create_task(worker.lane.run())
            await until(lambda worker=worker, undone=undone: worker.values == undone, timeout=90)
            worker.done(life)
            await cut_off(worker.lane, task, polls, moment, partial(publish, cluster, topic, range(end, end + 3)))
            if moment == "with records in hand":
                assert worker.values == undone, "they were fetched, and never taken in"
    async with consuming(cluster, topic) as heir:
        await until(lambda: len(heir.values) >= 11)
        await asyncio.sleep(0.5)
        assert heir.values == list(range(4, 15))
        heir.done()
    assert await position(cluster, topic) == 15


async def end_fetching(lane: KafkaLane) -> None:
    """As aiokafka's task does after an error that it does not expect, without a word. What it has asked for comes."""
    fetcher = lane._consumer._fetcher
    fetcher._fetch_task.cancel()
    await until(lambda: fetcher._fetch_task.done() and all(task.done() for task in fetcher._pending_tasks))


async def test_t04_a_fetching_task_that_ends_shows_as_lag(cluster: Cluster):
    """Polls go on without an error and find nothing, however much there is: the lane says that it is broken, and its
    partition that it lags."""
    topic = await lane_topic(cluster)
    async with consuming(cluster, topic) as worker:
        await publish(cluster, topic, range(2))
        await until(lambda: worker.values == [0, 1])
        assert not worker.lane.broken
        await end_fetching(worker.lane)
        for value in range(2, 5):  # in batches of their own: of a batch, Tansu's end of the log counts one record
            await publish(cluster, topic, range(value, value + 1))
        began = asyncio.get_running_loop().time()
        await until(lambda: worker.lane.polled_at > began + 1.0)  # several polls
        await worker.lane.look_for_ends()
        assert worker.values == [0, 1]
        assert worker.lane.lags() == {0: 3}
        assert worker.lane.broken


async def test_t04_a_lane_that_fetches_no_more_is_replaced(cluster: Cluster):
    """The watchdog gives it another consumer, with a poll of the dead one in flight: that gets what came meanwhile and
    what was not done, and nothing else. It lives on."""
    topic = await lane_topic(cluster)
    await publish(cluster, topic, range(2))
    made: list[Consuming] = []
    replaced: list[str] = []
    async with cluster.connections() as connections:

        def new_lane(_tier: str) -> KafkaLane:
            made.append(Consuming(connections, topic, max_outstanding=100))
            return made[-1].lane

        lanes = {"standard": new_lane("standard")}
        watchdog = LaneWatchdog(lanes, new_lane, replaced.append, connections.reachable, silence_limit=1000)
        keeping = asyncio.create_task(watchdog.keep("standard"))
        await until(lambda: made[0].values == [0, 1], timeout=90)
        made[0].done(0)
        await end_fetching(lanes["standard"])
        await publish(cluster, topic, range(2, 5))
        await until(lambda: len(made) == 2 and len(made[1].values) >= 4)
        assert made[0].values == [0, 1]
        assert made[1].values == [1, 2, 3, 4]
        await publish(cluster, topic, range(5, 6))
        await until(lambda: made[1].values == [1, 2, 3, 4, 5])
        made[1].done()
        lanes["standard"].stop()
        await asyncio.wait_for(keeping, 60)
        assert (len(made), replaced) == (2, ["standard"])
    assert await position(cluster, topic) == 6
