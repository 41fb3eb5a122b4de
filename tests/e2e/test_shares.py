"""Limits are of the deployment: two workers in one process, on a broker, keep a tenant's rate together."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from schemas.connection import KafkaConnection
from schemas.records import Begin
from service.broker import EmbeddedBroker
from service.client import Client
from service.topics import create_topics
from worker.app import Worker
from worker.config import Tenant, WorkerConfig
from worker.start import build

RATE, BURST_S, NUM_REQUESTS = 4.0, 1.0, 16


@asynccontextmanager
async def running(config: WorkerConfig) -> AsyncIterator[Worker]:
    worker = Worker(config, *build(config))
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await task


async def until(condition: Callable[[], bool], timeout: float = 60) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.02)


async def begins(client: Client, number: int) -> tuple[float, str]:
    """When a request of the limited tenant was seen to begin, and by which worker it was served."""
    stream = client.stream(prompt="Hello", tenant="slow", key=str(number).encode(), max_tokens=2, ignore_eos=True)
    async with stream:
        events = [(time.monotonic(), event) async for event in stream]
    return next((at, event.worker) for at, event in events if isinstance(event, Begin))


@pytest.mark.broker
async def test_a_tenants_rate_is_that_of_all_workers_together(broker: EmbeddedBroker):
    """The second worker halves the first one's share. Sixteen requests at once then start no faster over both than one
    worker alone would let them; when the second has left, the first has all of it again."""
    await create_topics(KafkaConnection(bootstrap=broker.bootstrap), lane_prefix="shares.", partitions=4)
    configs = [
        WorkerConfig(
            bootstrap=broker.bootstrap,
            lane_prefix="shares.",
            worker=name,
            model="tiny",
            num_threads=1,
            num_blocks=512,
            session_timeout_ms=6000,
            tenants={"slow": Tenant(requests_per_s=RATE)},
            quota_burst_seconds=BURST_S,
        )
        for name in ("first", "second")
    ]
    async with running(configs[0]) as first:
        await until(lambda: first.share == 1.0)
        async with running(configs[1]) as second, Client(broker.bootstrap, lane_prefix="shares.") as client:
            await until(lambda: (first.share, second.share) == (0.5, 0.5))
            num_renewals = first.num_shares + second.num_shares
            published_at = time.monotonic()
            started = await asyncio.gather(*(begins(client, i) for i in range(NUM_REQUESTS)))
            # A slow machine may lose a member for a while; what a worker may have at once grows with its share.
            num_renewals = first.num_shares + second.num_shares - num_renewals
        await until(lambda: first.share == 1.0)
    assert {worker for _, worker in started} == {"first", "second"}
    for number, at in enumerate(sorted(at for at, _ in started), start=1):
        assert number <= RATE * (at - published_at) + RATE * BURST_S * (1 + num_renewals)
