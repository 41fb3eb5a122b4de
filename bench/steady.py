"""Many small requests through one worker: is memory flat, and what does Kafka add? `python -m bench.steady --help`."""

import asyncio
import itertools
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from rich.console import Console
from rich.table import Table

from bench.beside import Missing, kafka_cluster
from bench.fleet import Fleet
from bench.machine import machine_facts
from bench.measure import percentile
from bench.traffic import LANES
from schemas.command_help import Command
from schemas.connection import KafkaConnection
from service.client import Client
from service.topics import create_topics

MAX_TOKENS = 32
NUM_ALONE = 100  # requests one at a time, for what Kafka adds to the first token
SAMPLE_S = 0.5
SETTLED_SHARE = 0.1  # of the run: what a process takes at its start says nothing about growth
app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@dataclass(slots=True)
class Steady:
    """What was measured."""

    num_requests: int
    in_flight: int
    num_lost: int = 0
    seconds: float = 0.0
    resident_mb: list[float] = field(default_factory=list)
    added_ms: list[float] = field(default_factory=list)  # publish to first token, less the engine's own time
    producer_topics: int | None = None  # that the worker's producer still asks for, at the end

    @property
    def halves_mb(self) -> tuple[float, float]:
        """Mean resident memory of the worker in the first and in the last half of the run, its start left out."""
        settled = self.resident_mb[int(len(self.resident_mb) * SETTLED_SHARE) :]
        half = len(settled) // 2
        return statistics.mean(settled[:half]), statistics.mean(settled[half:])

    @property
    def growth(self) -> float:
        first, last = self.halves_mb
        return last / first - 1

    def to_fields(self) -> dict[str, Any]:
        first, last = self.halves_mb
        return {
            "requests": self.num_requests,
            "in_flight": self.in_flight,
            "lost": self.num_lost,
            "seconds": round(self.seconds, 1),
            "requests_per_s": round(self.num_requests / self.seconds, 1),
            "resident_mb": {"first_half": round(first, 1), "last_half": round(last, 1)},
            "growth": round(self.growth, 4),
            "producer_topics": self.producer_topics,
            "added_to_first_token_ms": {
                "median": round(statistics.median(self.added_ms), 2),
                "p99": round(percentile(self.added_ms, 99), 2),
            },
        }


@app.command(cls=Command)
def steady(
    requests: Annotated[int, typer.Option(min=100, help=f"Each of {MAX_TOKENS} tokens.")] = 10_000,
    in_flight: Annotated[int, typer.Option(min=1, help="Open at once, on three lanes.")] = 64,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")] = None,
) -> None:
    """Send requests through one worker (model `tiny`) on Apache Kafka; watch its memory.

    The exit status is 1 when an answer is missing or incomplete, when the worker's memory in the last half is more than
    5 % above that of the first, or when its producer still asks for reply topics at the end.

    What Kafka adds to the first token is measured before, one request at a time: from publishing to the first token at
    the client, less the time that the engine itself reports from seat to first token.
    """
    console = Console(stderr=True)
    try:
        cluster = kafka_cluster()
    except Missing as reason:
        console.print(str(reason), markup=False)
        raise typer.Exit(2) from None
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    with cluster.Cluster() as kafka, console.status("starting") as status:
        measured = asyncio.run(_measure(kafka.bootstrap, Steady(requests, in_flight), status.update))
    fields = measured.to_fields()
    table = Table(show_header=False)
    for name, value in fields.items():
        table.add_row(name.replace("_", " "), json.dumps(value))
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine_facts(1)} | fields, indent=1) + "\n")
    if measured.num_lost or measured.growth > 0.05 or (measured.producer_topics or 0) > 10:
        raise typer.Exit(1)


async def _measure(bootstrap: str, steady: Steady, said: Callable[[str], None]) -> Steady:
    connection = KafkaConnection(bootstrap=bootstrap)
    await create_topics(connection)
    with tempfile.TemporaryDirectory(prefix="carousel-steady-") as folder:
        fleet = Fleet(bootstrap, Path(folder), ["--model", "tiny", "--num-threads", "1", "--num-blocks", "4096"])
        try:
            worker = await fleet.add()
            await fleet.ready(worker)
            async with Client(connection=connection) as client:
                for _ in range(NUM_ALONE):
                    await _ask_alone(client, steady)
                sampling = asyncio.create_task(_sample(worker.serving_pid, steady.resident_mb))
                began = time.monotonic()
                numbers = itertools.count()
                callers = (_call(client, numbers, steady, said) for _ in range(steady.in_flight))
                await asyncio.gather(*callers)
                steady.seconds = time.monotonic() - began
                sampling.cancel()
            await fleet.drain(worker)
            steady.producer_topics = _producer_topics(worker.log)
        finally:
            await fleet.close()
    return steady


async def _ask_alone(client: Client, steady: Steady) -> None:
    stream = client.stream(prompt="Once", max_tokens=2, temperature=0, ignore_eos=True, tier="interactive")
    await stream.completion()
    assert stream.ttft is not None
    assert stream.end is not None
    timing = stream.end.timing
    assert timing is not None
    assert timing.ttft_ms is not None
    steady.added_ms.append(stream.ttft * 1000 - (timing.ttft_ms - timing.queued_ms))


async def _call(client: Client, numbers: "itertools.count[int]", steady: Steady, said: Callable[[str], None]) -> None:
    while (number := next(numbers)) < steady.num_requests:
        completion = await client.complete(
            prompt=f"Request {number}", max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, tier=LANES[number % 3]
        )
        steady.num_lost += len(completion.token_ids) != MAX_TOKENS
        if number % 100 == 0:
            said(f"{number} of {steady.num_requests}")


async def _sample(pid: int, resident_mb: list[float]) -> None:
    while True:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        resident_mb.append(int(fields["VmRSS"].split()[0]) / 1024)
        await asyncio.sleep(SAMPLE_S)


def _producer_topics(log: Path) -> int | None:
    for line in reversed(log.read_text().splitlines()):
        if line.startswith("{") and (entry := json.loads(line))["event"] == "worker.stopped":
            return int(entry["producer_topics"])
    return None


if __name__ == "__main__":
    app()
