"""The whole path in one process, so that the engine's own records can be looked at."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from schemas.connection import KafkaConnection
from schemas.reasons import FinishReason
from service.broker import EmbeddedBroker
from service.client import Client
from service.topics import create_topics
from worker.app import Worker
from worker.config import WorkerConfig
from worker.start import build


@pytest.mark.broker
async def test_64_requests_on_16_seats(broker: EmbeddedBroker, tmp_path: Path):
    """No errors, seats refilled in the step after one leaves, and every block free at the end."""
    await create_topics(KafkaConnection(bootstrap=broker.bootstrap), lane_prefix="seats.", partitions=2)
    config = WorkerConfig(
        bootstrap=broker.bootstrap,
        lane_prefix="seats.",
        model="tiny",
        num_threads=1,
        max_num_seqs=16,
        num_blocks=2048,
        session_timeout_ms=6000,
        step_log=tmp_path / "steps.jsonl",
    )
    ready = asyncio.Event()
    worker = Worker(config, *build(config), on_ready=ready.set)
    running = asyncio.create_task(worker.run())
    await asyncio.wait_for(ready.wait(), 30)
    async with Client(broker.bootstrap, lane_prefix="seats.") as client:
        answers = await asyncio.gather(
            *(
                client.complete(
                    prompt=f"Request {i} " + "x" * (i * 7 % 200),
                    tier=("interactive", "standard", "batch")[i % 3],
                    max_tokens=20 + i * 5 % 61,
                    ignore_eos=True,
                    temperature=0,
                )
                for i in range(64)
            )
        )
    stats = worker.engine.scheduler.stats()
    worker.engine.scheduler.check_integrity()
    worker.stop()
    await running

    assert [len(a.token_ids) for a in answers] == [20 + i * 5 % 61 for i in range(64)]
    assert {a.finish_reason for a in answers} == {FinishReason.LENGTH}
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    steps = [json.loads(line) for line in config.step_log.read_text().splitlines()]
    assert max(s["num_running"] for s in steps) == 16
    refilled = 0
    for before, after in itertools.pairwise(steps):
        # A slow machine finds 64 prompts waiting at its first step: then it is the token budget that is used up.
        is_full = after["num_running"] == 16 or after["num_budget_left"] == 0
        assert is_full or after["num_waiting"] == 0, "a free seat while somebody waits"
        refilled += bool(before["finished"] and after["admitted"])
    assert refilled > 5
