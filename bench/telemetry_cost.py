"""What telemetry costs a step: CPU seconds of the whole process, exporting thread included.

    python -m bench.telemetry_cost --model smollm2

The same requests, each with a sampled `traceparent`, through a worker's server and engine on an in-memory broker:
`off` counts and traces nothing, `metrics` counts, `dead` counts and traces to an endpoint that is configured and
refuses every connection. A round is many short turns, there and back (off metrics dead dead metrics off, and so on
with another one first), each of which serves all requests; a round's figure is its CPU seconds by its steps, so that
what drifts slowly falls on all three. The figures are medians of the rounds; all rounds and their range are shown.

The thread that exports wakes every 5 s and tries a dead endpoint for seconds, which is longer than a turn. So it is
one thread for all rounds, as a worker has one for its life, and its CPU seconds count for `dead` whenever it has them,
also in the turns of the others: none of its cost can fall between two turns. One thread for the model: others that
wait for work burn CPU. Run it on an idle machine.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from statistics import median
from typing import Any

from bench.engine import CountingRunner
from bench.turns import palindromes
from schemas.exporting import Exporting
from worker.admission_gate import AdmissionGate
from worker.app import MonotonicClock
from worker.call import ServerConfig
from worker.config import WorkerConfig
from worker.logs import start_logging
from worker.loop import EngineLoop
from worker.measured_sink import MeasuredSink
from worker.metrics import Metrics
from worker.server import RequestServer
from worker.start import build
from worker.telemetry import Telemetry
from worker.tracing import Tracing
from worker.transport.memory import MemoryBroker, MemoryRecord, MemorySink, MemorySource
from worker.transport.protocols import ReplySink

VARIANTS = ("off", "metrics", "dead")
LANE = "prompts.standard"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class _Nothing:
    """In place of Metrics: whatever is told, nothing is done."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Bench:
    """One model, and a fresh server on it for every run. What counts and traces lives on, as a worker's does.

    `exporting`: goes where OTEL_* say.
    """

    def __init__(self, model: str, num_seats: int) -> None:
        self.config = WorkerConfig(model=model, max_num_seqs=num_seats, num_threads=1)
        self._facts, runner, self._scheduler, self._step_model, self._admission = build(self.config)
        self._runner = CountingRunner(runner)
        self._clock = MonotonicClock()
        others = set(threading.enumerate())
        self.exporting = Exporting("bench", "bench")
        self._exporters = set(threading.enumerate()) - others
        metrics = {variant: Metrics("bench", self.config.tiers) for variant in ("metrics", "dead")}
        self._metrics: dict[str, Any] = {"off": _Nothing(), **metrics}
        self._telemetry = {
            variant: Telemetry(
                self._metrics[variant],
                Tracing(self.exporting.tracer if variant == "dead" else None, self._clock, self._facts.name),
            )
            for variant in VARIANTS
        }

    @property
    def exporting_seconds(self) -> float:
        """CPU seconds that exporting has had so far, whatever runs."""
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in self._exporters if thread.ident is not None]
        return sum(time.clock_gettime(clock) for clock in clocks)

    def measure(self, variant: str, num_requests: int, num_tokens: int) -> tuple[float, int]:
        """(CPU seconds but for those of exporting, steps) of one run."""
        telemetry = self._telemetry[variant]
        engine = EngineLoop(
            self._scheduler,
            self._runner,
            self._clock,
            step_model=self._step_model,
            observer=None if variant == "off" else telemetry,
        )
        self._runner.reset()
        began, exported = time.process_time(), self.exporting_seconds
        asyncio.run(self._serve(engine, telemetry, self._metrics[variant], num_requests, num_tokens))
        took = time.process_time() - began
        return took - (self.exporting_seconds - exported), self._runner.num_steps

    @contextlib.asynccontextmanager
    async def sink(self, broker: MemoryBroker) -> AsyncIterator[ReplySink]:
        """Where the answers go."""
        yield MemorySink(broker)

    async def _serve(
        self, engine: EngineLoop, telemetry: Telemetry, metrics: Any, num_requests: int, num_tokens: int
    ) -> None:
        config, broker = self.config, MemoryBroker()
        for topic in (LANE, config.dlq_topic, config.usage_topic):
            broker.create(topic)
        for i in range(num_requests):
            broker.create(f"replies.r{i}")
            broker.topics[LANE][0].append(_request(i, num_tokens))
        source = MemorySource(broker, "standard", LANE)
        async with self.sink(broker) as sink, asyncio.TaskGroup() as tasks:
            server = RequestServer(
                ServerConfig(
                    worker="bench",
                    tiers=config.tiers,
                    tiers_of=config.tiers_of,
                    priority_class=config.priority_class,
                    reply_prefixes=("replies.",),
                    forbidden_topics=config.forbidden_topics,
                    default_reply_topic=None,
                    dlq_topic=config.dlq_topic,
                    usage_topic=config.usage_topic,
                    max_fruitless_attempts=config.max_fruitless_attempts,
                ),
                self._facts,
                engine,
                AdmissionGate(self._admission, engine.clock),
                MeasuredSink(sink, metrics),
                {"standard": source},
                tasks,
                telemetry=telemetry,
            )
            running = tasks.create_task(engine.run())
            for delivery in source.deliveries():
                server.deliver(delivery)
            while server.num_calls:
                await asyncio.sleep(0.01)
            engine.stop()
            await running


def _request(number: int, num_tokens: int) -> MemoryRecord:
    body = {"prompt": f"Request {number}", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"reply_to": f"replies.r{number}", "correlation_id": f"r{number}", "traceparent": TRACEPARENT}
    named = [("content-type", b"application/json"), *((name, value.encode()) for name, value in headers.items())]
    return MemoryRecord(None, json.dumps(body).encode(), named)


def compare(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over rounds: milliseconds of CPU per step, and how much more than `off` in percent."""
    per_step: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    more: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for variant in VARIANTS:
        bench.measure(variant, options.requests, options.tokens)  # warm
    gc.collect()  # what starting left over is nobody's
    for number in range(options.rounds):
        seconds, steps = one_round(bench, options)
        for variant in VARIANTS:
            per_step[variant].append(1000 * seconds[variant] / steps[variant])
            more[variant].append(100 * (per_step[variant][-1] / per_step["off"][-1] - 1))
        shown = ", ".join(f"{variant} {values[-1]:+.2f} %" for variant, values in more.items())
        print(f"round {number + 1} of {options.rounds}: {shown}", file=sys.stderr, flush=True)
    return {
        "model": bench.config.model,
        "rounds": options.rounds,
        "turns_of_each": 2 * options.palindromes,
        "steps": steps["off"],
        "cpu_ms_per_step": {variant: round(median(values), 3) for variant, values in per_step.items()},
        "percent_more_than_off": {variant: round(median(values), 2) for variant, values in more.items()},
        "percent_range": {variant: [round(min(values), 2), round(max(values), 2)] for variant, values in more.items()},
        "all_rounds_percent": {variant: [round(v, 2) for v in values] for variant, values in more.items()},
    }


def one_round(bench: Bench, options: argparse.Namespace) -> tuple[Counter[str], Counter[str]]:
    """(CPU seconds, steps) of each variant, over all its turns. All that was exported meanwhile is `dead`'s."""
    seconds: Counter[str] = Counter()
    steps: Counter[str] = Counter()
    exported = bench.exporting_seconds
    for variant in palindromes(VARIANTS, options.palindromes):
        took, num_steps = bench.measure(variant, options.requests, options.tokens)
        seconds[variant] += took
        steps[variant] += num_steps
    seconds["dead"] += bench.exporting_seconds - exported
    return seconds, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="tiny, smollm2, or a folder")
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--requests", type=int, default=16, help="of each turn")
    parser.add_argument("--tokens", type=int, default=24, help="of each request")
    parser.add_argument("--palindromes", type=int, default=6, help="of each round: two turns of each variant")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    start_logging("bench", "error", json_lines=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = address  # nobody listens there any more
    bench = Bench(options.model, options.seats)
    print(json.dumps(compare(bench, options), indent=2))
    bench.exporting.close()


if __name__ == "__main__":
    main()
