"""What callers see when workers die and brokers go away: every token, once, in order."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from service.broker import EmbeddedBroker
from tests.e2e.workers import WorkerProcess, producing

LANES = ("interactive", "standard", "batch")

# Greedy, drawn, and drawn with what depends on the tokens before: all of it goes on after a crash.
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 7, "top_p": 0.95},
    {"repetition_penalty": 1.2, "logit_bias": {"65": 2.0}},
    {
        "temperature": 0.9,
        "seed": 8,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.5,
        "min_tokens": 250,
        "logprobs": 1,
    },
)


async def read_all(bootstrap: str, topics: list[str], timeout: float = 120) -> dict[str, Any]:
    """Reads reply logs with the independent reader, which raises on a gap or a contradiction."""
    from reader import read  # of the black-box checks; importable after the fixture `checks`

    return await read(bootstrap, topics, timeout=timeout)


async def outlive(bootstrap: str, away: Callable[[], Awaitable[None]], log: Path) -> None:
    """Nine streams run while the broker goes away: all come out complete, and the worker serves on."""
    async with producing(bootstrap, "away.") as producer:
        with WorkerProcess(bootstrap, log, "--lane-prefix", "away.") as worker:
            topics = [await producer.ask(LANES[i % 3], max_tokens=800) for i in range(9)]
            await asyncio.sleep(0.5)
            await away()
            streams = await read_all(bootstrap, topics)
            assert [len(streams[t].token_ids.get(0, [])) for t in topics] == [800] * 9
            late = await producer.ask("interactive")
            assert (await read_all(bootstrap, [late]))[late].end is not None
            assert worker.stop() == 0


@pytest.mark.kafka
@pytest.mark.shared
@pytest.mark.slow  # the short campaign of test_faults.py covers it
async def test_kill_9_with_20_requests_in_flight(kafka: Any, checks: Path, tmp_path: Path):
    """The worker is killed twice and another started: all 20 streams end complete, and equal an undisturbed run."""
    log = tmp_path / "worker.log"
    async with producing(kafka.bootstrap, "kill.") as producer:
        bodies = [{"prompt": f"Tale {i}", "max_tokens": 300 + i} | SAMPLING[i % len(SAMPLING)] for i in range(20)]
        worker = WorkerProcess(kafka.bootstrap, log, "--lane-prefix", "kill.")
        with worker:
            topics = [await producer.ask(LANES[i % 3], **body) for i, body in enumerate(bodies)]
            for _ in range(2):
                await asyncio.sleep(1.0)
                worker.kill()
                await asyncio.to_thread(worker.start)
            streams = await read_all(kafka.bootstrap, topics)
            undisturbed = [await producer.ask(LANES[i % 3], **body) for i, body in enumerate(bodies)]
            expected = await read_all(kafka.bootstrap, undisturbed)
            assert worker.stop() == 0
    attempts = [len(streams[t].attempts) for t in topics]
    assert max(attempts) >= 2, f"the worker was too quick to be killed in the act: {attempts}"
    for topic, calm in zip(topics, undisturbed, strict=True):
        assert streams[topic].end is not None
        assert streams[topic].end["finish_reason"] == "length"
        assert streams[topic].token_ids == expected[calm].token_ids
        assert streams[topic].text == expected[calm].text
        assert streams[topic].repeated == 0


@pytest.mark.kafka
@pytest.mark.shared
async def test_apache_kafka_restarts_under_load(kafka_module: Any, checks: Path, tmp_path: Path):
    """The only broker is stopped for 10 s and started again: everything resumes, and new requests are served."""
    with kafka_module.Cluster() as kafka:

        async def away() -> None:
            kafka.nodes[0].stop()
            await asyncio.sleep(10)
            kafka.nodes[0].start()

        await outlive(kafka.bootstrap, away, tmp_path / "worker.log")


@pytest.mark.broker
@pytest.mark.shared
async def test_the_embedded_broker_freezes_under_load(checks: Path, tmp_path: Path):
    """SIGSTOP for 10 s, then SIGCONT: everything resumes, and new requests are served."""
    async with EmbeddedBroker() as broker:

        async def away() -> None:
            os.kill(broker.pid, signal.SIGSTOP)
            await asyncio.sleep(10)
            os.kill(broker.pid, signal.SIGCONT)

        await outlive(broker.bootstrap, away, tmp_path / "worker.log")


@pytest.mark.kafka
@pytest.mark.shared
async def test_drain_hands_over_what_does_not_fit(kafka: Any, checks: Path, tmp_path: Path):
    """SIGTERM with a drain time-out of 0: nothing is ended early, and the next worker resumes every stream."""
    async with producing(kafka.bootstrap, "drain.") as producer:
        arguments = ("--lane-prefix", "drain.", "--drain-timeout", "0")
        with WorkerProcess(kafka.bootstrap, tmp_path / "worker.log", *arguments) as worker:
            topics = [await producer.ask(LANES[i % 3], max_tokens=500) for i in range(6)]
            await asyncio.sleep(0.4)
            assert worker.stop() == 0
            await asyncio.to_thread(worker.start)
            streams = await read_all(kafka.bootstrap, topics)
    assert [len(streams[t].token_ids[0]) for t in topics] == [500] * 6


@pytest.mark.kafka
@pytest.mark.shared
@pytest.mark.slow  # the short campaign of test_faults.py covers it
async def test_two_workers_share_and_take_over(kafka: Any, checks: Path, tmp_path: Path):
    """A second worker joins under load (a re-balance), then the first is killed: no token is lost or doubled."""
    async with producing(kafka.bootstrap, "pair.") as producer:
        first = WorkerProcess(kafka.bootstrap, tmp_path / "first.log", "--lane-prefix", "pair.")
        second = WorkerProcess(kafka.bootstrap, tmp_path / "second.log", "--lane-prefix", "pair.")
        with first:
            topics = [await producer.ask(LANES[i % 3], max_tokens=900) for i in range(12)]
            with second:
                topics += [await producer.ask(LANES[i % 3], max_tokens=300) for i in range(12)]
                await asyncio.sleep(1)
                first.kill()
                streams = await read_all(kafka.bootstrap, topics)
    assert [len(streams[t].token_ids.get(0, [])) for t in topics] == [900] * 12 + [300] * 12
