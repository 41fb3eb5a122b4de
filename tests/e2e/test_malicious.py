"""A malicious producer: it disturbs no other request, and every record of it is answered or on the DLQ."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from bench.judge import all_records
from tests.e2e.hostile import Hostility, Record
from tests.e2e.test_survival import LANES, read_all
from tests.e2e.workers import Producer, WorkerProcess, producing

PREFIX = "hostile."
Place = tuple[str, int, int]  # topic, partition, offset


@pytest.mark.kafka
@pytest.mark.shared
@pytest.mark.parametrize("number", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_a_malicious_producer_disturbs_nobody(kafka: Any, checks: Path, tmp_path: Path, number: int):
    """Honest requests between hostile records are answered as ever; each hostile one is accounted for."""
    async with producing(kafka.bootstrap, PREFIX, partitions=2) as producer:
        log = tmp_path / "worker.log"
        arguments = ("--lane-prefix", PREFIX, "--commit-interval", "0.2")
        with WorkerProcess(kafka.bootstrap, log, *arguments) as worker:
            logs = [await producer.reply_topic(f"shared-{number}-{i}") for i in range(3)]
            calm = [await producer.ask(lane, **body(i)) for i, lane in enumerate(LANES * 2)]
            expected = await read_all(kafka.bootstrap, calm)
            honest, places = await publish(kafka.bootstrap, producer, logs, number)
            streams = await read_all(kafka.bootstrap, honest, timeout=number / 10 + 60)
            await until_committed(kafka.bootstrap)
            assert worker.stop(timeout=60) == 0
    for i, topic in enumerate(honest):
        assert streams[topic].end is not None
        assert streams[topic].token_ids == expected[calm[i % len(calm)]].token_ids
    await assert_accounted_for(kafka.bootstrap, places, log.read_text())


def body(number: int) -> dict[str, Any]:
    return {"prompt": f"Honest {number % 6}", "max_tokens": 20 + number % 6}


async def publish(bootstrap: str, producer: Producer, logs: list[str], number: int) -> tuple[list[str], set[Place]]:
    """Hostile records on all lanes, an honest one after every twenty; their reply topics, and the hostile places."""
    forbidden = [f"{PREFIX}{name}" for name in (*LANES, "control", "dlq")]
    honest, sends = [], []
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, max_request_size=2**21) as raw:
        for i, record in enumerate(Hostility(number, logs, forbidden).records(number)):
            sends.append(asyncio.ensure_future(raw.send_and_wait(PREFIX + LANES[i % 3], **fields(record))))
            if i % 20 == 19:
                places = len(honest)
                honest.append(await producer.ask(LANES[places % 3], **body(places)))
        acknowledged = await asyncio.gather(*sends, return_exceptions=True)
    taken = [a for a in acknowledged if not isinstance(a, KafkaError)]  # the broker refuses some by itself
    assert len(taken) > number * 0.9
    return honest, {(a.topic, a.partition, a.offset) for a in taken}


def fields(record: Record) -> dict[str, Any]:
    value = record.value if record.value or record.key else b""
    return {"value": value, "key": record.key, "headers": record.headers, "timestamp_ms": record.timestamp_ms}


async def until_committed(bootstrap: str, timeout: float = 300) -> None:
    """Every record of every lane is done."""
    async with asyncio.timeout(timeout), AIOKafkaConsumer(bootstrap_servers=bootstrap) as consumer:
        for lane in LANES:
            partitions = [TopicPartition(f"{PREFIX}{lane}", p) for p in range(2)]
            ends = await consumer.end_offsets(partitions)
            while await committed(bootstrap, f"carousel.{PREFIX}{lane}", partitions) != ends:
                await asyncio.sleep(0.2)


async def committed(bootstrap: str, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=group, enable_auto_commit=False)
    consumer.assign(partitions)
    async with consumer:
        return {p: await consumer.committed(p) or 0 for p in partitions}


async def assert_accounted_for(bootstrap: str, places: set[Place], log: str) -> None:
    """By usage records, by the DLQ, and, where no log exists that they name, by the worker's word."""
    answered = {tuple(msgpack.unpackb(r.value)["input"][:3]) for r in await all_records(bootstrap, "usage")}
    buried = {place_of(r) for r in await all_records(bootstrap, f"{PREFIX}dlq")}
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    gone = {tuple(e["input"][:3]) for e in lines if e.get("outcome") in ("reply_undeliverable", "duplicate")}
    assert places <= answered | buried | gone, sorted(places - answered - buried - gone)[:5]
    assert len(gone & places) < len(places) / 10
    bugs = [e for e in lines if e["event"] in ("request.failed", "request.abandoned", "request.not_taken_in")]
    assert not bugs, bugs[:2]
    assert "Traceback" not in log


def place_of(record: Any) -> Place:
    headers = dict(record.headers)
    partition, offset = (headers[f"kafka_dlt-original-{name}"] for name in ("partition", "offset"))
    return headers["kafka_dlt-original-topic"].decode(), int.from_bytes(partition), int.from_bytes(offset)
