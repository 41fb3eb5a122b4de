"""The control topic is read from the right place, and read on whatever happens to the consumer."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.structs import OffsetAndTimestamp

from schemas.codec import ContentType
from schemas.records import Cancel, encode_cancel
from schemas.topics import CANCEL_TTL_MS
from worker.transport import kafka_control
from worker.transport.kafka_control import KafkaControl

P0 = TopicPartition("prompts.control", 0)


class FakeConsumer:
    """Reads one log of (timestamp, value); fails where it is told to."""

    def __init__(self, log: list[tuple[int, bytes]], failures: dict[str, KafkaError]) -> None:
        self.log = log
        self.failures = failures
        self.position = 0
        self.has_died = False
        self.stopped = False

    def _fail(self, where: str) -> None:
        if where in self.failures:
            raise self.failures.pop(where)

    async def start(self) -> None:
        self._fail("start")

    async def stop(self) -> None:
        self.stopped = True

    def assign(self, partitions: list[TopicPartition]) -> None:
        assert partitions == [P0]

    async def offsets_for_times(self, times: dict[TopicPartition, int]) -> dict[TopicPartition, Any]:
        self._fail("seek")
        found = [i for i, (at, _) in enumerate(self.log) if at >= times[P0]]
        return {P0: OffsetAndTimestamp(found[0], 0) if found else None}

    async def end_offsets(self, _partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {P0: len(self.log)}

    def seek(self, _partition: TopicPartition, offset: int) -> None:
        self.position = offset

    async def getmany(self, timeout_ms: int) -> dict[TopicPartition, list[Any]]:
        await asyncio.sleep(0.001)
        self._fail("poll")
        new, self.position = self.log[self.position :], len(self.log)
        headers = [("content-type", b"application/json")]
        return {P0: [SimpleNamespace(timestamp=at, headers=headers, value=v, offset=0) for at, v in new]}


class Bench:
    """A control reader, the consumers that it makes, and the ids that it was told to cancel."""

    def __init__(self) -> None:
        self.log: list[tuple[int, bytes]] = []
        self.failures: dict[str, KafkaError] = {}
        self.consumers: list[FakeConsumer] = []
        self.cancelled: list[bytes] = []
        self.control = KafkaControl(self, "prompts.control", lambda c: self.cancelled.append(c.correlation_id))  # type: ignore[arg-type]

    def consumer(self, **_: Any) -> FakeConsumer:
        self.consumers.append(FakeConsumer(self.log, self.failures))
        return self.consumers[-1]

    async def partitions_of(self, _topic: str) -> int:
        return 1

    def publish(self, name: bytes, age_ms: int = 0) -> None:
        at = round(time.time() * 1000) - age_ms
        self.log.append((at, encode_cancel(Cancel(name), ContentType.JSON)))

    async def heard(self, *names: bytes) -> None:
        async with asyncio.timeout(20):
            while not set(names) <= set(self.cancelled):
                await asyncio.sleep(0.001)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(kafka_control, "RETRY_S", 0.001)
    return Bench()


async def running(bench: Bench) -> asyncio.Task[None]:
    return asyncio.create_task(bench.control.run())


async def test_cancels_from_before_the_start_count(bench: Bench):
    """A new worker hears of those of the last ten minutes, and of no older ones; rubbish between them is passed."""
    bench.publish(b"old", age_ms=CANCEL_TTL_MS + 60_000)
    bench.publish(b"recent", age_ms=1000)
    bench.log.append((round(time.time() * 1000), b"\xc1"))
    task = await running(bench)
    bench.publish(b"new")
    await bench.heard(b"recent", b"new")
    assert b"old" not in bench.cancelled
    bench.control.stop()
    await task
    assert all(consumer.stopped for consumer in bench.consumers)


@pytest.mark.parametrize("where", ["start", "seek", "poll"])
async def test_a_broker_that_is_away_does_not_end_it(bench: Bench, where: str):
    """Whatever call fails, it begins again, and hears of the cancels that came meanwhile."""
    bench.failures[where] = KafkaConnectionError("away")
    bench.publish(b"a")
    task = await running(bench)
    await bench.heard(b"a")
    assert not bench.failures
    bench.control.stop()
    await task
    assert all(consumer.stopped for consumer in bench.consumers)


async def test_a_dead_consumer_is_replaced(bench: Bench):
    """Its fetching has ended, so its polls find nothing for ever: another one reads on."""
    task = await running(bench)
    while not bench.consumers:
        await asyncio.sleep(0)
    bench.consumers[0].has_died = True
    bench.publish(b"a")
    await bench.heard(b"a")
    while len(bench.consumers) < 2:
        await asyncio.sleep(0)
    bench.control.stop()
    await task
