"""A request that kills the process of every worker that computes it, on Apache Kafka."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.connection import KafkaConnection
from schemas.topics import DEFAULT_GROUP_PREFIX
from service.dead_letters import list_dead_letters, redrive
from service.lane_status import read_status
from tests.e2e.deadly_worker import DEADLY_SEED
from tests.e2e.test_survival import read_all
from tests.e2e.workers import WorkerProcess, producing

BOUND = 2
PREFIX = "deadly."


async def until(condition: Callable[[], Awaitable[Any]], timeout: float = 120) -> None:
    async with asyncio.timeout(timeout):
        while not await condition():
            await asyncio.sleep(0.2)


@pytest.mark.kafka
@pytest.mark.shared
@pytest.mark.slow  # tests/worker/test_fruitless.py covers it
async def test_a_request_that_kills_every_worker_is_given_up(kafka: Any, checks: Path, tmp_path: Path):
    """Its supervisor starts the worker again, and it dies again, until the request has used up its attempts: then the
    caller has an error, the operator a dead letter, and those beside it have their answers. Redriven, it kills one more
    worker at most, and is done."""
    connection = KafkaConnection(bootstrap=kafka.bootstrap)
    settings = ("--lane-prefix", PREFIX, "--supervisor", "--max-fruitless-attempts", str(BOUND))

    async def nothing_open() -> bool:
        status = await read_status(
            connection, lane_prefix=PREFIX, group_prefix=DEFAULT_GROUP_PREFIX, reply_prefix="replies.", max_requests=0
        )
        return all(lane.lag == 0 for lane in status.lanes)

    async with producing(kafka.bootstrap, PREFIX, partitions=1) as producer:
        worker = WorkerProcess(kafka.bootstrap, tmp_path / "worker.log", *settings, module="tests.e2e.deadly_worker")
        with worker:
            before = [await producer.ask("standard", max_tokens=40) for _ in range(3)]
            bad = await producer.ask("standard", seed=DEADLY_SEED)
            after = [await producer.ask("standard", max_tokens=40) for _ in range(3)]
            streams = await read_all(kafka.bootstrap, [*before, bad, *after], timeout=200)
            await until(nothing_open)
            num_deaths = len(worker.logged("supervisor.restarting"))
            assert BOUND <= num_deaths <= BOUND + 1, "the first may have died before its `begin` was written"
            (letter,) = await list_dead_letters(connection, lane_prefix=PREFIX, limit=10)
            await redrive(connection, [letter], lane_prefix=PREFIX)
            await until(nothing_open)
            assert len(worker.logged("supervisor.restarting")) <= num_deaths + 1
            again = await read_all(kafka.bootstrap, [bad])
            late = await producer.ask("standard", max_tokens=4)
            assert (await read_all(kafka.bootstrap, [late]))[late].end["finish_reason"] == "length"
            assert worker.stop() == 0
        letters = await list_dead_letters(connection, lane_prefix=PREFIX, limit=10)
    for topic in before + after:
        assert streams[topic].end["finish_reason"] == "length"
        assert len(streams[topic].token_ids[0]) == 40
    end = streams[bad].end
    assert end["error"]["code"] == "internal"
    assert end["error"]["message"].startswith(f"{BOUND} attempts in a row ended without a token")
    # A suspect of whom no commit tells has begun before it is known to be one: it leaves, and begins again in its turn.
    num_left = sum(event == "left" for event, _ in streams[bad].headers)
    assert (streams[bad].token_ids, len(streams[bad].attempts) - num_left) == ({}, BOUND + 1)
    assert again[bad].end == end
    assert [each.text("dlq_reason") for each in letters] == ["fruitless_attempts"]
    assert letter.correlation_id == bad.removeprefix("replies.")
