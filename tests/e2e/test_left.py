"""Requests that wait for their seats while workers come and go: nothing of that is held against them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.headers import ReplyAddress
from schemas.reply_log import ReplyLog
from service.broker import EmbeddedBroker
from tests.e2e.test_survival import read_all
from tests.e2e.workers import WorkerProcess, producing
from worker.app import Worker
from worker.config import WorkerConfig
from worker.start import build
from worker.transport.kafka_replies import KafkaReplies

# One seat, and a single attempt whose worker vanished is one too many.
STRICT = ("--max-num-seqs", "1", "--max-fruitless-attempts", "1", "--drain-timeout", "0")


def events(stream: Any) -> list[str]:
    return [event for event, _ in stream.headers]


async def until_read(bootstrap: str, topics: list[str], condition: Callable[[Any], bool]) -> dict[str, Any]:
    """The reply logs, once the condition holds for each."""
    async with asyncio.timeout(60):
        while True:
            streams = await read_all(bootstrap, topics, timeout=1)
            if all(map(condition, streams.values())):
                return streams


async def assert_answered_once(bootstrap: str, topics: list[str], num_tokens: int) -> dict[str, Any]:
    """By the independent reader, which raises on a gap, a token twice or a contradiction."""
    streams = await read_all(bootstrap, topics)
    for topic in topics:
        assert streams[topic].end["finish_reason"] == "length", streams[topic].end
        assert [len(ids) for ids in streams[topic].token_ids.values()] == [num_tokens]
        assert streams[topic].repeated == 0
    return streams


@pytest.mark.kafka
@pytest.mark.shared
async def test_drains_leave_what_waits_for_its_seat(kafka: Any, checks: Path, tmp_path: Path):
    """Two workers are stopped while eight requests wait for the one seat; the third answers all of them. Of what waited
    each log says that it was left, and what is its last record by then."""
    async with producing(kafka.bootstrap, "rolling.", partitions=2) as producer:
        worker = WorkerProcess(kafka.bootstrap, tmp_path / "worker.log", "--lane-prefix", "rolling.", *STRICT)
        with worker:
            topics = [await producer.ask("batch", max_tokens=400) for _ in range(9)]
            for num_before in range(2):
                streams = await until_read(
                    kafka.bootstrap, topics, lambda s, n=num_before: len(s.attempts) > n or s.end
                )
                assert sum(not stream.token_ids for stream in streams.values()) >= 6
                assert worker.stop() == 0
                streams = await read_all(kafka.bootstrap, topics, timeout=2)
                waited = [stream for stream in streams.values() if not stream.token_ids]
                assert len(waited) >= 6
                for stream in waited:
                    assert events(stream) == ["begin", "left"] * (num_before + 1)
                await asyncio.to_thread(worker.start)
            streams = await assert_answered_once(kafka.bootstrap, topics, 400)
            assert worker.stop() == 0
    assert all(stream.skipped == 0 for stream in streams.values())
    assert not worker.logged("request.suspect")
    assert not worker.logged("request.dead_letter")


@contextlib.asynccontextmanager
async def consuming(config: WorkerConfig, *, has_seats: bool = True) -> AsyncIterator[Worker]:
    """A worker in this process. Without seats, whatever it takes in waits for one."""
    parts = await asyncio.to_thread(build, config)
    scheduler = parts[2]
    if not has_seats:
        scheduler.schedule = lambda now: (None, scheduler._expire(now))
    ready = asyncio.Event()
    worker = Worker(config, *parts, on_ready=ready.set)
    running = asyncio.create_task(worker.run())
    try:
        await asyncio.wait_for(ready.wait(), 60)
        yield worker
    finally:
        worker.stop()
        await running


def config_of(bootstrap: str, lane_prefix: str, **settings: Any) -> WorkerConfig:
    return WorkerConfig(
        bootstrap=bootstrap,
        lane_prefix=lane_prefix,
        model="tiny",
        num_threads=1,
        num_blocks=2048,
        session_timeout_ms=6000,
        max_fruitless_attempts=4,  # a hand-over may be quicker than its `left`, and count
        **settings,
    )


@pytest.mark.kafka
@pytest.mark.shared
async def test_partitions_that_move_leave_what_waits_for_its_seat(kafka: Any, checks: Path):
    """A second worker joins, as an autoscaler has it, and goes again, and so does the first: whoever had a request that
    waited has left it, and a third one answers all of them, once."""

    def config(name: str) -> WorkerConfig:
        return config_of(kafka.bootstrap, "moves.", worker=name, drain_timeout=0)

    async with producing(kafka.bootstrap, "moves.", partitions=4) as producer:
        async with consuming(config("w1"), has_seats=False):
            topics = [await producer.ask("batch", max_tokens=50) for _ in range(16)]
            await until_read(kafka.bootstrap, topics, lambda stream: len(stream.attempts) == 1)
            async with consuming(config("w2"), has_seats=False) as second:
                moved: list[str] = []
                async with asyncio.timeout(60):
                    while not moved or len(moved) != second.lanes["batch"].num_outstanding:
                        streams = await read_all(kafka.bootstrap, topics, timeout=1)
                        moved = [
                            topic for topic in topics if sorted(events(streams[topic])) == ["begin", "begin", "left"]
                        ]
            assert len(moved) < 16
            await until_read(kafka.bootstrap, moved, lambda stream: len(stream.attempts) == 3)
        async with consuming(config("w3")):
            streams = await assert_answered_once(kafka.bootstrap, topics, 50)
    for topic in topics:
        found = events(streams[topic])
        assert (found.count("begin"), found.count("left")) == ((4, 3) if topic in moved else (2, 1))
        assert streams[topic].skipped == 0


@pytest.mark.broker
@pytest.mark.shared
async def test_of_a_backlog_that_nobody_served_no_log_is_read(
    broker: EmbeddedBroker, checks: Path, monkeypatch: pytest.MonkeyPatch
):
    """Thirty prompts lie there when the first worker starts: by their offsets alone somebody may have begun them."""
    read_logs: list[str] = []
    read = KafkaReplies.read

    async def noted(self: KafkaReplies, address: ReplyAddress, start: int, until: int | None) -> ReplyLog:
        read_logs.append(address.topic)
        return await read(self, address, start, until)

    monkeypatch.setattr(KafkaReplies, "read", noted)
    async with producing(broker.bootstrap, "backlog.", partitions=1) as producer:
        topics = [await producer.ask("batch", max_tokens=20) for _ in range(30)]
        async with consuming(config_of(broker.bootstrap, "backlog.", max_num_seqs=4)) as worker:
            await assert_answered_once(broker.bootstrap, topics, 20)
            (tracker,) = worker.lanes["batch"]._trackers.values()
            assert tracker.is_inherited(29)
    assert read_logs == []
