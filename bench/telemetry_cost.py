"""What telemetry costs a step: CPU seconds of the whole process, exporting thread included.

    python -m bench.telemetry_cost --model smollm2

The same requests, each with a sampled `traceparent`, through a worker's server and engine on an in-memory broker:
`off` counts and traces nothing, `metrics` counts, `dead` counts and traces to an endpoint that is configured and
refuses every connection. Rounds are interleaved; the figures are medians. One thread for the model: others that wait
for work burn CPU. Run it on an idle machine.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from statistics import median
from time import process_time
from typing import Any

from bench.engine import CountingRunner
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
    """One model, and a fresh server on it for every run."""

    def __init__(self, model: str, num_seats: int) -> None:
        self.config = WorkerConfig(model=model, max_num_seqs=num_seats, num_threads=1)
        self._facts, runner, self._scheduler, self._step_model, self._admission = build(self.config)
        self._runner = CountingRunner(runner)

    def measure(self, variant: str, num_requests: int, num_tokens: int) -> tuple[float, int]:
        """(CPU seconds, steps) of one run."""
        exporting = Exporting("bench", "bench") if variant == "dead" else None
        clock = MonotonicClock()
        metrics: Any = _Nothing() if variant == "off" else Metrics("bench", self.config.tiers)
        tracer = None if exporting is None else exporting.tracer
        telemetry = Telemetry(metrics, Tracing(tracer, clock, self._facts.name))
        engine = EngineLoop(
            self._scheduler,
            self._runner,
            clock,
            step_model=self._step_model,
            observer=None if variant == "off" else telemetry,
        )
        self._runner.reset()
        began = process_time()
        asyncio.run(self._serve(engine, telemetry, metrics, num_requests, num_tokens))
        took = process_time() - began
        if exporting is not None:
            exporting.close()  # before the next run: what it has left is not that one's
        return took, self._runner.num_steps

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


def compare(bench: Bench, num_rounds: int, num_requests: int, num_tokens: int) -> dict[str, Any]:
    """Medians over interleaved rounds: milliseconds of CPU per step, and how much more than `off` in percent."""
    per_step: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    more: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    bench.measure("off", num_requests, num_tokens)  # warm
    num_steps = 0
    for number in range(num_rounds):
        for variant in VARIANTS[number % 3 :] + VARIANTS[: number % 3]:  # each is first, last and in between
            seconds, num_steps = bench.measure(variant, num_requests, num_tokens)
            per_step[variant].append(1000 * seconds / num_steps)
        for variant in VARIANTS:
            more[variant].append(100 * (per_step[variant][-1] / per_step["off"][-1] - 1))
        shown = ", ".join(f"{variant} {values[-1]:+.2f} %" for variant, values in more.items())
        print(f"round {number + 1} of {num_rounds}: {shown}", file=sys.stderr, flush=True)
    return {
        "model": bench.config.model,
        "rounds": num_rounds,
        "steps": num_steps,
        "cpu_ms_per_step": {variant: round(median(values), 3) for variant, values in per_step.items()},
        "percent_more_than_off": {variant: round(median(values), 2) for variant, values in more.items()},
        "all_rounds_percent": {variant: [round(v, 2) for v in values] for variant, values in more.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="tiny, smollm2, or a folder")
    parser.add_argument("--seats", type=int, default=16)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    start_logging("bench", "error", json_lines=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = address  # nobody listens there any more
    bench = Bench(options.model, options.seats)
    print(json.dumps(compare(bench, options.rounds, options.requests, options.tokens), indent=2))


if __name__ == "__main__":
    main()
