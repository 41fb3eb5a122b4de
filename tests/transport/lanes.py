"""A lane on a consumer of the test's own making, which behaves as aiokafka 0.14 does where it matters."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from types import SimpleNamespace
from typing import Any

from aiokafka import TopicPartition
from aiokafka.errors import IllegalStateError
from aiokafka.structs import OffsetAndMetadata

from worker.transport.kafka_lane import KafkaLane
from worker.transport.protocols import Delivery

TOPIC = "prompts.standard"
P0, P1 = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)


class FakeConsumer:
    """Logs as lists of values (None: a hole). Positions, pauses and assignments are aiokafka's; a test re-balances."""

    def __init__(self, logs: dict[TopicPartition, list[bytes | None]]) -> None:
        self.logs = logs
        self.committed: dict[TopicPartition, OffsetAndMetadata] = {}
        self.commits: list[dict[TopicPartition, OffsetAndMetadata]] = []
        self.on_commit: Callable[[], Any] = lambda: None  # may raise, or return something to wait for
        self.on_poll: Callable[[], Any] = lambda: None
        self.positions: dict[TopicPartition, int] = {}
        self.highwaters: dict[TopicPartition, int] = {}  # as the last fetch told
        self.num_polls = 0
        self.stopped = False
        self._paused: set[TopicPartition] = set()
        self._group_id = "group"
        self._coordinator = SimpleNamespace(member_id="member-1")
        self.has_died = False

    def subscribe(self, topics: list[str], listener: Any) -> None:
        self.listener = listener

    async def start(self) -> None:
        await self.rebalance(self.logs)

    async def stop(self) -> None:
        self.stopped = True

    async def rebalance(self, assigned: Iterable[TopicPartition], between: Callable[[], Any] = lambda: None) -> None:
        """Eager: all are revoked, pauses are lost, positions are the committed ones until somebody seeks."""
        await self.listener.on_partitions_revoked(set(self.positions))
        if (waiting := between()) is not None:
            await waiting
        self._paused.clear()
        self.positions = {p: self.committed[p].offset if p in self.committed else 0 for p in assigned}
        await self.listener.on_partitions_assigned(set(self.positions))

    async def getmany(self, timeout_ms: int) -> dict[TopicPartition, list[Any]]:
        self.num_polls += 1
        await asyncio.sleep(0)
        self.on_poll()
        batch = {}
        for partition, position in self.positions.items():
            if partition not in self._paused and (records := self._records(partition, position)):
                batch[partition] = records
                self.highwaters[partition] = len(self.logs[partition])
                self.positions[partition] = records[-1].offset + 1
        return batch

    def _records(self, partition: TopicPartition, start: int) -> list[Any]:
        return [
            SimpleNamespace(
                topic=partition.topic,
                partition=partition.partition,
                offset=offset,
                timestamp=offset,
                key=None,
                value=value,
                headers=(),
            )
            for offset, value in enumerate(self.logs[partition])
            if offset >= start and value is not None
        ]

    async def commit(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        if (waiting := self.on_commit()) is not None:
            await waiting
        if not offsets.keys() <= self.positions.keys():
            raise IllegalStateError("not assigned")
        self.commits.append(offsets)
        self.committed |= offsets

    async def beginning_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 0)

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {partition: len(self.logs[partition]) for partition in partitions}

    def highwater(self, partition: TopicPartition) -> int | None:
        assert partition in self.positions
        return self.highwaters.get(partition)

    def paused(self) -> set[TopicPartition]:
        return set(self._paused)

    def pause(self, partition: TopicPartition) -> None:
        self._paused.add(partition)

    def resume(self, partition: TopicPartition) -> None:
        self._paused.discard(partition)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        if partition not in self.positions:
            raise IllegalStateError("not assigned")
        self.positions[partition] = offset


class Bench:
    """A lane, its consumer, and what it has delivered and lost."""

    def __init__(self, consumer: FakeConsumer, **settings: Any) -> None:
        self.consumer = consumer
        self.deliveries: list[Delivery] = []
        self.num_losses = 0

        async def committed(group: str, partitions: list[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata]:
            return {p: consumer.committed[p] for p in partitions if p in consumer.committed}

        def lost(_tier: str) -> None:
            self.num_losses += 1

        async def partitions_of(topic: str) -> int:
            return len(consumer.logs)

        defaults = {"max_outstanding": 10, "max_outstanding_bytes": 10**6, "commit_interval": 0.001}
        self.lane = KafkaLane(
            "standard",
            TOPIC,
            consumer,
            deliver=self.deliveries.append,
            lost=lost,
            shared=lambda: None,
            partitions_of=partitions_of,
            num_partitions=len(consumer.logs),
            **({"committed": committed} | defaults | settings),
        )

    @property
    def offsets(self) -> list[int]:
        return [d.source.offset for d in self.deliveries]

    def done(self, *offsets: int) -> None:
        for delivery in list(self.deliveries):
            if delivery.source.offset in offsets:
                self.lane.done(delivery)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.001)

    async def polls(self, number: int = 3) -> None:
        """So many polls later."""
        goal = self.consumer.num_polls + number
        await self.until(lambda: self.consumer.num_polls >= goal)

    async def committed(self, offset: int, partition: TopicPartition = P0) -> None:
        await self.until(lambda: partition in self.consumer.committed and self.at(partition) == offset)

    def at(self, partition: TopicPartition = P0) -> int:
        """The committed offset."""
        return self.consumer.committed[partition].offset


@contextlib.asynccontextmanager
async def running(*values: bytes | None, **settings: Any) -> AsyncIterator[Bench]:
    """A running lane over one partition with these records."""
    bench = Bench(FakeConsumer({P0: list(values)}), **settings)
    task = asyncio.create_task(bench.lane.run())
    await asyncio.wait_for(bench.lane.assigned.wait(), 20)
    try:
        yield bench
    finally:
        bench.lane.stop()
        await asyncio.wait_for(task, 20)
