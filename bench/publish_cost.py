"""What publishing costs a step: CPU seconds of everything that writes answers, against those of the model.

    python -m bench.publish_cost --model smollm2

Sixty-four requests at once through a worker's server and engine, every token of every step in a record of its own (as
interactive requests have it), to reply topics on Apache Kafka (`kafka`), and to a sink that takes records and does
nothing (`nowhere`). What the process uses more per step, beside the model, is publishing: encoding, the producer, the
acknowledgements. A step is the CPU time of the thread that runs the model, with one torch thread. CPU time, so that a
busy machine changes little; rounds are interleaved, the figures are medians. The broker's own work is not in it.
"""

import argparse
import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from statistics import median
from time import process_time, thread_time
from typing import Any

from bench.beside import kafka_cluster
from bench.telemetry_cost import Bench
from schemas.connection import KafkaConnection
from schemas.records import ReplyRecord
from schemas.topics import REPLY_TOPIC_CONFIG
from service.kafka import TopicAdmin, TopicSpec
from worker.engine.outputs import StepOutcome, StepPlan
from worker.engine.protocols import Runner
from worker.logs import start_logging
from worker.transport.kafka_connections import KafkaConnections
from worker.transport.kafka_replies import KafkaReplies
from worker.transport.memory import MemoryBroker, MemorySink
from worker.transport.protocols import Headers, ReplyAddress, ReplySink

VARIANTS = ("nowhere", "kafka")
MOST_PERCENT = 5.0


class TimedRunner:
    """A Runner that adds up the CPU seconds of the thread that executes another's steps."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.seconds = 0.0

    def execute(self, plan: StepPlan) -> StepOutcome:
        began = thread_time()
        outcome = self._runner.execute(plan)
        self.seconds += thread_time() - began
        return outcome


class Nowhere(MemorySink):
    """Acknowledges everything, encodes and keeps nothing."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self._offsets: dict[str, int] = {}

    async def send(self, address: ReplyAddress, record: ReplyRecord, trace: str | None = None) -> int | None:
        offset = self._offsets[address.topic] = self._offsets.get(address.topic, -1) + 1
        await asyncio.sleep(0)  # an acknowledgement never comes at once
        return offset

    async def publish(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> bool:
        return True


class PublishBench(Bench):
    """One model, and a fresh server on it for every run."""

    def __init__(self, model: str, num_seats: int, bootstrap: str) -> None:
        super().__init__(model, num_seats)
        self._connection = KafkaConnection(bootstrap=bootstrap)
        self._timed = self._runner._runner = TimedRunner(self._runner._runner)
        self._num_requests = num_seats
        self._variant = VARIANTS[0]
        self._outside = 0.0  # CPU seconds of the last run that are no serving: topics, connections

    def cost(self, variant: str, num_tokens: int) -> tuple[float, float, int]:
        """(CPU seconds of the process, CPU seconds of the model's steps, steps) of one run."""
        self._variant, self._timed.seconds = variant, 0.0
        seconds, num_steps = self.measure("off", self._num_requests, num_tokens)
        return seconds - self._outside, self._timed.seconds, num_steps

    @contextlib.asynccontextmanager
    async def sink(self, broker: MemoryBroker) -> AsyncIterator[ReplySink]:
        began = process_time()
        if self._variant == "nowhere":
            self._outside = process_time() - began
            yield Nowhere(broker)
            return
        names = [f"replies.r{i}" for i in range(self._num_requests)]
        async with TopicAdmin(self._connection) as admin:
            others = [TopicSpec(topic) for topic in (self.config.dlq_topic, self.config.usage_topic)]
            await admin.create([*others, *(TopicSpec(name, config=REPLY_TOPIC_CONFIG) for name in names)])
            await admin.wait_for_leaders(names)
            times = {"request_timeout_ms": 30_000, "session_timeout_ms": 10_000, "rebalance_timeout_ms": 60_000}
            async with KafkaConnections(self._connection, client_id="bench", **times) as connections:
                replies = KafkaReplies(connections, self.config.max_record_bytes)
                self._outside = process_time() - began
                yield replies
                began = process_time()
                await replies.close()
            await admin.delete(names)
        self._outside += process_time() - began


def compare(bench: PublishBench, num_rounds: int, num_tokens: int) -> dict[str, Any]:
    """Medians over interleaved rounds: milliseconds of CPU per step."""
    bench.cost("nowhere", num_tokens)  # warm
    around: dict[str, list[float]] = {variant: [] for variant in VARIANTS}  # what is not the model's
    steps: list[float] = []
    for number in range(num_rounds):
        for variant in VARIANTS if number % 2 else reversed(VARIANTS):
            seconds, in_steps, num_steps = bench.cost(variant, num_tokens)
            around[variant].append(1000 * (seconds - in_steps) / num_steps)
            steps.append(1000 * in_steps / num_steps)
    publishing = [kafka - nowhere for kafka, nowhere in zip(around["kafka"], around["nowhere"], strict=True)]
    return {
        "model": bench.config.model,
        "streams": bench.config.max_num_seqs,
        "rounds": num_rounds,
        "step_cpu_ms": round(median(steps), 3),
        "publishing_cpu_ms_per_step": round(median(publishing), 3),
        "publishing_percent_of_step": round(100 * median(publishing) / median(steps), 2),
        "all_rounds_publishing_ms": [round(value, 3) for value in publishing],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="tiny, smollm2, or a folder")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    start_logging("bench", "error", json_lines=True)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    with kafka_cluster().Cluster() as kafka:
        bench = PublishBench(options.model, options.streams, kafka.bootstrap)
        found = compare(bench, options.rounds, options.tokens)
    print(json.dumps(found, indent=2))
    raise SystemExit(found["publishing_percent_of_step"] > MOST_PERCENT)


if __name__ == "__main__":
    main()
