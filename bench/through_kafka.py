"""Ours as callers have it: `python -m worker` as a process of its own, a broker, and the client."""

import asyncio
import contextlib
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from bench.measure import Answer, Run
from bench.workload import WARM_UP, BenchRequest, Workload
from schemas.connection import KafkaConnection, KafkaSettings
from schemas.records import Tokens
from service.broker import EmbeddedBroker
from service.client import Client
from service.kafka import TopicAdmin
from service.topics import create_topics
from service.worker_process import running_worker

_SILENCE_S = 600.0  # a worker that says nothing for so long has failed


def run(workload: Workload, on_tokens: Callable[[int], None]) -> Run:
    return asyncio.run(_run(workload, on_tokens))


async def _run(workload: Workload, on_tokens: Callable[[int], None]) -> Run:
    async with serving(workload) as (client, step_log):
        num_warm_up_steps = _num_lines(step_log)
        answers = await asyncio.gather(*(_ask(client, request, on_tokens) for request in workload.requests))
        num_steps = _num_lines(step_log) - num_warm_up_steps
    return Run(tuple(answers), num_steps * workload.max_num_seqs, kv_use=None)


@contextlib.asynccontextmanager
async def serving(workload: Workload) -> AsyncIterator[tuple[Client, Path]]:
    """A worker that has answered once, as (client, step log), with reply topics for all requests of the workload."""
    with tempfile.TemporaryDirectory(prefix="carousel-bench-") as folder:
        step_log = Path(folder, "steps.jsonl")
        async with contextlib.AsyncExitStack() as stack:
            connection, lane_prefix = await stack.enter_async_context(_lanes(workload.bootstrap))
            flags = {
                "model": workload.model,
                "max-num-seqs": workload.max_num_seqs,
                "num-threads": workload.num_threads,
                "lane-prefix": lane_prefix,
                "step-log": step_log,
                "log-level": "warning",
                **{name.replace("_", "-"): value for name, value in workload.options},
            }
            worker = running_worker(
                connection,
                arguments=[f"--{name}={value}" for name, value in flags.items()],
                log_path=Path(folder, "worker.log"),
                on_progress=lambda _: None,
            )
            await stack.enter_async_context(worker)
            client = Client(connection=connection, lane_prefix=lane_prefix, reply_topics=len(workload.requests))
            await stack.enter_async_context(client)
            await _ask(client, WARM_UP, lambda _: None)
            yield client, step_log


@contextlib.asynccontextmanager
async def _lanes(bootstrap: str | None) -> AsyncIterator[tuple[KafkaConnection, str]]:
    """(connection, lane prefix): lanes of this run's own, on the embedded broker or the one given."""
    lane_prefix = f"bench-{uuid.uuid4().hex[:8]}."
    if bootstrap is None:
        async with EmbeddedBroker() as broker:
            connection = KafkaConnection(bootstrap=broker.bootstrap)
            await create_topics(connection, lane_prefix=lane_prefix)
            yield connection, lane_prefix
        return
    connection = KafkaSettings(bootstrap=bootstrap)
    topics = await create_topics(connection, lane_prefix=lane_prefix)
    try:
        yield connection, lane_prefix
    finally:
        async with TopicAdmin(connection) as admin:
            await admin.delete([name for name in topics.created if name.startswith(lane_prefix)])


async def _ask(client: Client, request: BenchRequest, on_tokens: Callable[[int], None]) -> Answer:
    loop = asyncio.get_running_loop()
    submitted = loop.time()
    token_ids: list[int] = []
    ttft = 0.0
    stream = client.stream(
        token_ids=request.token_ids,
        max_tokens=request.max_tokens,
        temperature=0,
        ignore_eos=True,
        timeout=_SILENCE_S,
    )
    async with stream:
        async for event in stream:
            if isinstance(event, Tokens):
                ttft = ttft or loop.time() - submitted
                token_ids.extend(event.token_ids)
                on_tokens(len(event.token_ids))
    if stream.end is None or stream.end.error is not None:
        raise RuntimeError(f"a request failed: {stream.end}")
    return Answer(tuple(token_ids), ttft, loop.time() - submitted)


def _num_lines(file: Path) -> int:
    return len(file.read_text().splitlines())
