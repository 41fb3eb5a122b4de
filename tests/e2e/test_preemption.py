"""Preemption through the whole worker: broker, engine, model, and back, with a pool that is made too small."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from schemas.connection import KafkaConnection
from schemas.records import Preemptions
from service.broker import EmbeddedBroker
from service.client import Client
from service.stream import Completion
from service.topics import create_topics
from worker.app import Worker
from worker.config import WorkerConfig
from worker.start import build

BATCH = [f"Batch {i} " + "b" * 30 * i for i in range(4)]
URGENT = [f"Urgent {i} " + "u" * 20 * i for i in range(6)]


@contextlib.asynccontextmanager
async def serving(bootstrap: str, lane_prefix: str, **fields: object) -> AsyncIterator[tuple[Worker, Client]]:
    """A worker in this process and a client of it."""
    await create_topics(KafkaConnection(bootstrap=bootstrap), lane_prefix=lane_prefix, partitions=2)
    config = WorkerConfig(
        bootstrap=bootstrap, lane_prefix=lane_prefix, model="tiny", num_threads=1, session_timeout_ms=6000, **fields
    )
    ready = asyncio.Event()
    worker = Worker(config, *build(config), on_ready=ready.set)
    running = asyncio.create_task(worker.run())
    await asyncio.wait_for(ready.wait(), 30)
    async with Client(bootstrap, lane_prefix=lane_prefix) as client:
        yield worker, client
    worker.stop()
    await running


async def answers(client: Client, *, urgent_after: int) -> list[Completion]:
    """Of all batch prompts at once, and of the urgent ones when each of the former has so many tokens."""
    under_way = asyncio.Barrier(len(BATCH) + 1)

    async def batch(number: int) -> Completion:
        # With sampling and penalties: what is displaced must bring all of its state back.
        options = {"temperature": 0.8, "seed": number, "frequency_penalty": 0.4}
        stream = client.stream(prompt=BATCH[number], tier="batch", max_tokens=100, ignore_eos=True, **options)
        async with stream:
            async for _ in stream:
                if len(stream.token_ids) >= urgent_after:
                    break
            await under_way.wait()
            return await stream.completion()

    async def urgent(number: int) -> Completion:
        return await client.complete(
            prompt=URGENT[number], tier="interactive", max_tokens=30, ignore_eos=True, temperature=0
        )

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(batch(number)) for number in range(len(BATCH))]
        await under_way.wait()
        running += [tasks.create_task(urgent(number)) for number in range(len(URGENT))]
    return [task.result() for task in running]


def essence(completion: Completion) -> tuple[Any, ...]:
    return completion.text, completion.token_ids, completion.finish_reason


@pytest.mark.broker
@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_what_was_displaced_gives_the_tokens_of_an_undisturbed_run(
    broker: EmbeddedBroker, tmp_path: Path, mode: str
):
    """A higher class takes seats and blocks of a lower one, which goes on later as if nothing had been."""
    async with serving(broker.bootstrap, "calm.", num_blocks=1024, max_num_seqs=16) as (_, client):
        calm = await answers(client, urgent_after=4)
    assert {completion.preemptions for completion in calm} == {Preemptions()}
    step_log = tmp_path / "steps.jsonl"
    limits = {"num_blocks": 40, "num_host_blocks": 64, "max_num_seqs": 4, "preemption": mode, "step_log": step_log}
    async with serving(broker.bootstrap, "tight.", **limits) as (worker, client):
        tight = await answers(client, urgent_after=4)
        scheduler = worker.engine.scheduler
        scheduler.check_integrity()
        assert scheduler.stats().num_blocks_used == scheduler.stats().num_host_blocks_used == 0
    assert [essence(completion) for completion in tight] == [essence(completion) for completion in calm]
    steps = [json.loads(line) for line in step_log.read_text().splitlines()]
    assert {preemption["mode"] for step in steps for preemption in step["preempted"]} == {mode}
    num_seats_taken = 0
    for step in steps:
        beneficiaries = {taken["beneficiary"] for taken in step["preempted"] if taken["cause"] == "seat"}
        assert beneficiaries <= set(step["admitted"]), "who displaces for a seat has it in the very step"
        num_seats_taken += len(beneficiaries)
    assert num_seats_taken
