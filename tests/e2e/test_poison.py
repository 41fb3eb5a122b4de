"""Records that only a careless or hostile producer writes: each is answered or buried, and nobody is disturbed."""

import asyncio
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import msgpack
import pytest
from aiokafka import AIOKafkaProducer

from tests.e2e.test_survival import read_all
from tests.e2e.workers import Producer, WorkerProcess, producing

BROKER_LIMIT = 1_048_588  # Kafka's message.max.bytes

# In a process of its own: aiokafka's C extension refuses to write a header name that is not UTF-8, its Python code
# takes it from a string that lies. Three requests in one batch, the second with such a name.
BAD_HEADER_NAME = """
import asyncio, sys, msgpack
from aiokafka import AIOKafkaProducer
class Name(str):
    def encode(self, *_): return b"\\xff\\xfe"
async def main(bootstrap, lane, *ids):
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=500) as producer:
        value = msgpack.packb({"prompt": "x", "max_tokens": 3, "ignore_eos": True})
        sends = []
        for number, name in enumerate(ids):
            headers = [("correlation_id", name.encode()), ("reply_to", f"replies.{name}".encode())]
            headers += [(Name("x"), b"1")] * (number == 1)
            sends.append(await producer.send(lane, value, partition=0, headers=headers))
        offsets = [(await send).offset for send in sends]
        assert offsets == list(range(offsets[0], offsets[0] + 3)), offsets
asyncio.run(main(*sys.argv[1:]))
"""


async def assert_serves(producer: Producer, bootstrap: str) -> None:
    """Ordinary requests on every lane are answered: the worker lives and nothing holds it up."""
    topics = [await producer.ask(lane, max_tokens=4) for lane in ("interactive", "standard", "batch") for _ in range(4)]
    streams = await read_all(bootstrap, topics, timeout=30)
    assert [s.end and s.end["finish_reason"] for s in streams.values()] == ["length"] * len(topics)


@pytest.mark.kafka
@pytest.mark.shared
async def test_poison_disturbs_nobody(kafka: Any, checks: Path, tmp_path: Path):
    """One worker outlives all of it, serves on, commits everything, and stops within its drain time."""
    async with producing(kafka.bootstrap, "poison.", partitions=2) as producer:
        log = tmp_path / "worker.log"
        with WorkerProcess(kafka.bootstrap, log, "--lane-prefix", "poison.", "--drain-timeout", "5") as worker:
            raw = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, max_request_size=2**21)
            await raw.start()
            try:
                await send_poison(raw, producer, kafka.bootstrap)
                await assert_serves(producer, kafka.bootstrap)
            finally:
                await raw.stop()
            await send_compressed(producer, kafka.bootstrap)
            await send_bad_header_name(producer, kafka.bootstrap)
            await assert_serves(producer, kafka.bootstrap)
            assert worker.stop(timeout=30) == 0
            assert "Traceback" not in log.read_text().replace("request.not_taken_in", "")


async def send_poison(raw: AIOKafkaProducer, producer: Producer, bootstrap: str) -> None:
    """Each with a usable reply topic gets an end; the rest is for the DLQ."""
    expected = {}
    for body, finish in (
        ({"temperature": 1.0, "top_k": 2**63 - 1}, "length"),
        ({"temperature": 1e308}, "length"),
        ({"temperature": 1.0, "top_k": 2**64 - 1}, None),  # served or refused
        ({"model": "\x00" * 400_000}, "error"),
        ({"stream": False, "logprobs": 20, "max_tokens": 4000}, "error"),  # does not fit into one record
    ):
        expected[await producer.ask("standard", **body)] = finish
    lane = "poison.standard"
    for headers in ([("traceparent", None)], [("baggage", None)], [("ce_id", b"z" * 500_000)]):
        await raw.send_and_wait(lane, msgpack.packb({"prompt": "x"}), headers=headers)
    huge = b"\xc1" * (BROKER_LIMIT - 500)
    await raw.send_and_wait(lane, huge, headers=[("reply_to", b"replies.nowhere"), ("correlation_id", b"y" * 20)])
    await raw.send_and_wait(lane, huge, headers=[("reply_to", b"prompts.batch")])
    streams = await read_all(bootstrap, list(expected), timeout=90)
    for topic, finish in expected.items():
        end = streams[topic].end
        assert end is not None
        assert finish is None or end["finish_reason"] == finish, end


async def send_bad_header_name(producer: Producer, bootstrap: str) -> None:
    """What our Kafka library cannot read hides nothing: that request and those around it in its batch are answered."""
    ids = [uuid.uuid4().hex for _ in range(3)]
    topics = [await producer.reply_topic(name) for name in ids]
    code = [sys.executable, "-c", BAD_HEADER_NAME, bootstrap, "poison.standard", *ids]
    subprocess.run(code, check=True, timeout=60, env=os.environ | {"AIOKAFKA_NO_EXTENSIONS": "1"})
    streams = await read_all(bootstrap, topics, timeout=30)
    assert [len(streams[topic].token_ids.get(0, [])) for topic in topics] == [3] * 3


async def send_compressed(producer: Producer, bootstrap: str) -> None:
    """Every codec that Kafka's own producers have."""
    topics = []
    for codec in ("gzip", "snappy", "lz4", "zstd"):
        request_id = uuid.uuid4().hex
        topic = await producer.reply_topic(request_id)
        headers = [("correlation_id", request_id.encode()), ("reply_to", topic.encode())]
        value = msgpack.packb({"prompt": "x" * 2000, "max_tokens": 3, "ignore_eos": True})
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, compression_type=codec) as compressing:
            await compressing.send_and_wait("poison.interactive", value, headers=headers)
        topics.append(topic)
    streams = await read_all(bootstrap, topics, timeout=30)
    assert [len(s.token_ids[0]) for s in streams.values()] == [3] * 4


# The same trick, on any topic: one record whose header's name is no text.
BAD_CONTROL = """
import asyncio, sys
from aiokafka import AIOKafkaProducer
class Name(str):
    def encode(self, *_): return b"\\xff\\xfe"
async def main(bootstrap, *topics):
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        for topic in topics:
            await producer.send_and_wait(topic, b"x", partition=0, headers=[(Name("x"), b"1")])
asyncio.run(main(*sys.argv[1:]))
"""
BOMBS = {"gzip": 64, "lz4": 64, "zstd": 200, "snappy": 14}  # MiB that fit into a record as Kafka takes it


@pytest.mark.kafka
@pytest.mark.shared
async def test_what_cannot_be_read_stops_nobody(kafka: Any, checks: Path, tmp_path: Path):
    """Records that our library cannot read on the control topic and in a reply log, and such as are many megabytes
    when decompressed, on a lane and on the control topic: cancels are heard, requests answered, memory is bounded."""
    async with producing(kafka.bootstrap, "bombs.", partitions=1) as producer:
        log = tmp_path / "worker.log"
        with WorkerProcess(kafka.bootstrap, log, "--lane-prefix", "bombs.", "--drain-timeout", "5") as worker:
            await assert_serves(producer, kafka.bootstrap)
            before = resident_mb(worker.pid)
            own = await producer.reply_topic(request_id := uuid.uuid4().hex)
            code = [sys.executable, "-c", BAD_CONTROL, kafka.bootstrap, "bombs.control", own]
            subprocess.run(code, check=True, timeout=60, env=os.environ | {"AIOKAFKA_NO_EXTENSIONS": "1"})
            for codec, megabytes in BOMBS.items():
                async with AIOKafkaProducer(
                    bootstrap_servers=kafka.bootstrap, compression_type=codec, max_request_size=2**30
                ) as raw:
                    for topic in ("bombs.standard", "bombs.control"):
                        await raw.send_and_wait(topic, bytes(megabytes * 2**20))
            headers = [("correlation_id", request_id.encode()), ("reply_to", own.encode())]
            async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as raw:
                await raw.send_and_wait(
                    "bombs.standard", msgpack.packb({"prompt": "x", "max_tokens": 3}), headers=headers
                )
                long = await producer.ask("batch", max_tokens=4000)
                name = long.removeprefix("replies.")
                await raw.send_and_wait("bombs.control", msgpack.packb({"op": "cancel", "correlation_id": name}))
            streams = await read_all(kafka.bootstrap, [long], timeout=60)
            assert streams[long].end is not None
            assert streams[long].end["finish_reason"] == "cancelled"
            await assert_serves(producer, kafka.bootstrap)
            assert resident_mb(worker.pid, "VmHWM") - before < 200
            assert worker.stop(timeout=30) == 0
        lines = worker.logged("request.finished")
        assert [line for line in lines if line["correlation_id"] == request_id and line["outcome"] == "answered"]
        assert len(worker.logged("request.dead_letter")) >= len(BOMBS)
        assert "Traceback" not in log.read_text()


def resident_mb(pid: int, field: str = "VmRSS") -> float:
    """VmHWM: the most that it ever was."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields[field].split()[0]) / 1024


@pytest.mark.kafka
@pytest.mark.shared
async def test_a_reply_topic_deleted_under_a_running_request(kafka: Any, checks: Path, tmp_path: Path):
    """The caller deletes it and leaves: the seat is free again in seconds, not after a send's time-out."""
    async with producing(kafka.bootstrap, "left.", partitions=2) as producer:
        arguments = ("--lane-prefix", "left.", "--max-num-seqs", "2")
        with WorkerProcess(kafka.bootstrap, tmp_path / "worker.log", *arguments) as worker:
            gone = [await producer.ask("standard", max_tokens=4000) for _ in range(4)]
            await asyncio.sleep(1)
            await producer.delete(gone)
            late = await producer.ask("standard", max_tokens=4)
            streams = await read_all(kafka.bootstrap, [late], timeout=20)
            assert streams[late].end is not None
            assert worker.stop() == 0
