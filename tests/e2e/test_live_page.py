"""A real worker's live page: what a viewer sees of a preemption, of answers, and of a drain."""

import asyncio
from pathlib import Path

import pytest

from schemas.connection import KafkaConnection
from service.broker import EmbeddedBroker
from service.client import Client
from service.topics import create_topics
from tests.e2e.test_operations import until
from tests.e2e.workers import WorkerProcess
from tests.worker.showing import Viewer


@pytest.mark.broker
async def test_a_viewer_of_a_real_worker(broker: EmbeddedBroker, tmp_path: Path):
    """Seats, an urgent request that displaces, its latencies, then `draining`; the viewer does not hold the end up."""
    arguments = ("--lane-prefix", "page.", "--metrics-port", "0", "--max-num-seqs", "2", "--preemption", "swap")
    worker = WorkerProcess(broker.bootstrap, tmp_path / "worker.log", *arguments, "--drain-timeout", "3")
    async with Client(broker.bootstrap, lane_prefix="page.", tenant="acme") as client:
        await create_topics(KafkaConnection(bootstrap=broker.bootstrap), lane_prefix="page.", partitions=1)
        await asyncio.to_thread(worker.start)
        try:
            viewer = await asyncio.to_thread(Viewer, worker.logged("health.serving")[-1]["port"])
            long = {"prompt": "a secret story", "max_tokens": 1500, "ignore_eos": True, "tier": "batch"}
            batch = [asyncio.create_task(client.complete(**long)) for _ in range(2)]
            await until(lambda: viewer.seen and len(viewer.seen[-1][1].seats) == 2, "both have a seat")
            assert {(seat.tier, seat.tenant) for seat in viewer.seen[-1][1].seats} == {("batch", "acme")}
            await client.complete(prompt="now", max_tokens=200, ignore_eos=True, tier="interactive")
            await until(lambda: viewer.seen[-1][1].latencies[0].num_requests == 1, "the urgent one's latency")
            shots = [shot for _, shot in viewer.seen]
            (lost,) = shots[-1].preempted
            assert (lost.cause, lost.mode) == ("seat", "swap")
            assert any(
                lost.beneficiary == seat.request and seat.tier == "interactive" for s in shots for seat in s.seats
            )
            assert any(shot.lanes[2].num_waiting == 1 and shot.host.count("active") for shot in shots)
            assert not any(b"secret" in shot.encode() for shot in shots)
            worker.signal(15)
            await until(lambda: viewer.seen[-1][1].reasons == ("draining",), "the drain")
            assert await asyncio.to_thread(worker.wait) == 0
            await until(lambda: viewer.ended, "the stream's end")
        finally:
            for task in batch:
                task.cancel()
            worker.end()
