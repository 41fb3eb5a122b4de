"""`carousel demo`: the whole path on this machine, and how it looks."""

import asyncio
import contextlib
import functools
import json
import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from schemas.connection import KafkaConnection
from schemas.topics import DEFAULT_LANE_PREFIX
from service.broker import EmbeddedBroker
from service.cli.connection import with_connection
from service.cli.running import run
from service.client import Client
from service.demo import MIN_REQUESTS, TIERS, ask, demo_answers, preemption_lines, seats_chart, summarise
from service.errors import ServiceError
from service.kafka import TopicAdmin
from service.topics import create_topics
from service.worker_process import WorkerProcess, running_worker

_STYLES = dict(zip(TIERS, ("cyan", "green", "yellow"), strict=True))
_MAX_CHART_WIDTH = 100


@functools.partial(with_connection, without="a broker of its own")
def demo(
    connection: KafkaConnection | None,
    model: Annotated[
        str, typer.Option(help="smollm2, tiny (random, no download), a folder, or a name on the Hugging Face hub.")
    ] = "smollm2",
    requests: Annotated[int, typer.Option(min=MIN_REQUESTS, help="How many prompts, on three lanes.")] = MIN_REQUESTS,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, max=64, help="Seats in the batch; fewer than requests, so that some wait.")
    ] = 8,
    tight: Annotated[
        bool,
        typer.Option(
            "--tight",
            help="Half the seats, and the urgent prompts last: they displace running ones, which come back by swap or "
            "recompute.",
        ),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write prompts, answers and steps to this file.")
    ] = None,
) -> None:
    """Show it: a broker, a worker, and prompts on three lanes at once, streaming.

    Starts everything it needs on this machine, and stops it again. With --bootstrap it uses that Kafka, on lanes of its
    own. The exit status is 0 only if every answer ended without an error.
    """
    seats = max(1, max_num_seqs // 2) if tight else max_num_seqs
    run(_Demo(model, requests, seats, tight, json_file).run(connection), log_level=logging.ERROR)


class _Demo:
    def __init__(self, model: str, num_requests: int, max_num_seqs: int, tight: bool, json_file: Path | None) -> None:
        self._console = Console(highlight=False)
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._tight = tight
        self._json_file = json_file
        self._answers = demo_answers(num_requests)
        self._said: dict[int, str] = {}  # index of an answer -> its state when a line was printed
        self._start = 0.0

    async def run(self, given: KafkaConnection | None) -> None:
        """Everything in order. Raises ServiceError, and then leaves the folder with the logs."""
        folder = Path(tempfile.mkdtemp(prefix="carousel-demo-"))
        keep = True  # what failed can be looked at
        try:
            steps = await self._run_in(folder, given)
            self._report(steps)
            if self._json_file is not None:
                self._json_file.write_text(json.dumps(self._result(steps), ensure_ascii=False, indent=1))
            keep = any(answer.failure is not None for answer in self._answers)
        except asyncio.CancelledError:
            keep = False
            raise
        finally:
            if not keep or not any(folder.iterdir()):
                shutil.rmtree(folder)
        if keep:
            failures = [answer.failure for answer in self._answers if answer.failure is not None]
            raise ServiceError(f"{len(failures)} answers failed, the first: {failures[0]}; logs are in {folder}")

    async def _run_in(self, folder: Path, given: KafkaConnection | None) -> list[dict[str, Any]]:
        """Starts everything, fills the answers in, stops everything. The worker's step records."""
        step_log = folder / "steps.jsonl"
        async with contextlib.AsyncExitStack() as stack:
            connection, lane_prefix, broker = await stack.enter_async_context(self._kafka(given))
            arguments = [
                *("--model", self._model, "--max-num-seqs", str(self._max_num_seqs)),
                *("--lane-prefix", lane_prefix, "--step-log", str(step_log)),
            ]
            with self._loading() as on_progress:
                log_path = folder / "worker.log"
                starting = running_worker(connection, arguments=arguments, log_path=log_path, on_progress=on_progress)
                worker = await stack.enter_async_context(starting)
            client = await stack.enter_async_context(Client(connection=connection, lane_prefix=lane_prefix))
            with self._streams():
                await self._ask(client, worker, broker)
        return [json.loads(line) for line in step_log.read_text().splitlines()]

    @contextlib.asynccontextmanager
    async def _kafka(
        self, given: KafkaConnection | None
    ) -> AsyncIterator[tuple[KafkaConnection, str, EmbeddedBroker | None]]:
        """(connection, lane prefix, own broker) with the topics there; on a Kafka that was given, ones of its own."""
        if given is None:
            async with EmbeddedBroker() as broker:
                connection = KafkaConnection(bootstrap=broker.bootstrap)
                await create_topics(connection)
                self._console.print(f"broker: embedded, {broker.bootstrap}")
                yield connection, DEFAULT_LANE_PREFIX, broker
            return
        lane_prefix = f"demo-{uuid.uuid4().hex[:8]}."
        topics = await create_topics(given, lane_prefix=lane_prefix, partitions=3)
        self._console.print(f"broker: {given.bootstrap}, lanes {lane_prefix}*")
        try:
            yield given, lane_prefix, None
        finally:
            async with TopicAdmin(given) as admin:
                await admin.delete([name for name in topics.created if name.startswith(lane_prefix)])

    @contextlib.contextmanager
    def _loading(self) -> Iterator[Callable[[str], None]]:
        """Shows what the worker does until it is ready."""
        start = time.monotonic()
        what = f"worker: loading {self._model}"
        if self._console.is_terminal:
            with self._console.status(what) as status:
                yield lambda progress: status.update(f"worker: {progress}")
        else:
            self._console.print(what)
            last: list[str] = []

            def say(progress: str) -> None:
                words = progress.rsplit(" ", 2)
                if last[:1] != words[:1] or words[1] == "100":
                    last[:] = words
                    self._console.print(f"worker: {progress}", soft_wrap=True)

            yield say
        self._console.print(f"worker: {self._model} ready after {time.monotonic() - start:.1f} s")

    async def _ask(self, client: Client, worker: WorkerProcess, broker: EmbeddedBroker | None) -> None:
        """Sends the prompts and waits for the answers, or for the failure of worker or broker, which it raises."""
        self._start = time.monotonic()
        asking = asyncio.create_task(ask(client, self._answers, self._on_change, urgent_last=self._tight))
        failing: list[asyncio.Task[ServiceError]] = [asyncio.create_task(worker.failed())]
        if broker is not None:
            failing.append(asyncio.create_task(broker.failed()))
        try:
            await asyncio.wait({asking, *failing}, return_when=asyncio.FIRST_COMPLETED)
            for failure in failing:
                if failure.done():
                    worker.kill()  # without a broker it would drain for long
                    raise failure.result()
            await asking
        finally:
            for task in (asking, *failing):
                task.cancel()
            await asyncio.gather(asking, *failing, return_exceptions=True)

    @contextlib.contextmanager
    def _streams(self) -> Iterator[None]:
        """Shows the answers as they grow: a live table, or where that cannot be a line per event that matters."""
        self._console.print(f"{len(self._answers)} prompts on {len(TIERS)} lanes, {self._max_num_seqs} seats")
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=8):
            yield

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        narrow = self._console.width < 60
        for justify in ("left", "right", "left") if narrow else ("left", "right", "left", "left"):
            table.add_column(no_wrap=True, justify=justify)
        width = max(self._console.width - (8 if narrow else 28), 10)
        for answer in self._answers:
            tier = answer.prompt.tier
            text = answer.text if answer.state != "waiting" else ""
            table.add_row(
                Text(tier[0].upper() if narrow else tier, _STYLES[tier]),
                str(len(answer.token_ids)),
                *([] if narrow else [Text(answer.state, "red" if answer.failure else "dim")]),
                Text(_one_line(text)[-width:]),
            )
        return table

    def _on_change(self, index: int) -> None:
        answer = self._answers[index]
        if self._console.is_terminal or self._said.get(index) == answer.state:
            return
        self._said[index] = answer.state
        if answer.state != "waiting":
            elapsed = time.monotonic() - self._start
            line = f"{elapsed:6.1f} s  {answer.prompt.tier:<11}  {answer.state:<8}  {len(answer.token_ids):>3} tokens"
            excerpt = "" if answer.end is None else "  " + _one_line(answer.text)[:60]
            self._console.print(line + excerpt, markup=False, soft_wrap=True)

    def _report(self, steps: Sequence[dict[str, Any]]) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("tier", no_wrap=True)
        for heading in ("requests", "tokens", "TTFT", "worst", "a token", "displaced"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in summarise(self._answers):
            table.add_row(
                Text(row.tier, _STYLES[row.tier]),
                *(str(number) for number in (row.num_requests, row.num_tokens)),
                *("-" if seconds is None else f"{seconds:.2f} s" for seconds in (row.ttft, row.worst_ttft)),
                "-" if row.tpot is None else f"{row.tpot * 1000:.0f} ms",
                str(row.num_preemptions),
            )
        self._console.print()
        self._console.print(table)
        self._console.print()
        if lines := preemption_lines(steps):
            self._console.print("\n".join(lines) + "\n", markup=False)
        width = min(self._console.width - 12, _MAX_CHART_WIDTH)
        chart = seats_chart(steps, max_num_seqs=self._max_num_seqs, width=width)
        self._console.print(f"seats in {len(steps)} steps: " + ", ".join(f"{tier[0].upper()} {tier}" for tier in TIERS))
        for line in chart:
            text = Text(line)
            for tier in TIERS:
                text.highlight_regex(f"(?<=[│·A-Z]){tier[0].upper()}", _STYLES[tier])
            self._console.print(text, no_wrap=True, crop=True)

    def _result(self, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "model": self._model,
            "max_num_seqs": self._max_num_seqs,
            "answers": [answer.to_fields() for answer in self._answers],
            "steps": steps,
        }


def _one_line(text: str) -> str:
    """What a model says, without what would move the terminal's cursor."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())
