"""What operators rely on: a dead worker's work moves at once, drains are in order, health and commands are true."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from schemas.connection import KafkaConnection
from schemas.null_value import NULL, serialised
from schemas.records import Tokens
from service.broker import EmbeddedBroker
from service.client import Client
from service.dead_letters import DeadLetter, NotRedrivable, list_dead_letters, redrive
from service.kafka import TopicAdmin
from service.lane_status import ServiceStatus, read_status
from service.topic_reader import TopicReader
from service.topics import create_topics
from tests.e2e.test_survival import LANES, read_all
from tests.e2e.workers import WorkerProcess, producing
from worker.app import Worker
from worker.config import WorkerConfig
from worker.health import Health
from worker.start import build

LIMIT_S = 90
LONG_SESSION = ("--session-timeout-ms", "45000")  # so that what comes earlier is not the session's end

LONG = {"max_tokens": 600, "ignore_eos": True, "temperature": 0}


async def until(condition: Callable[[], Any | Awaitable[Any]], what: str) -> Any:
    """Waits until a condition is true, and returns what it gave."""
    end = time.monotonic() + LIMIT_S
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < end, f"not within {LIMIT_S} s: {what}"
        await asyncio.sleep(0.05)


def child_of(worker: WorkerProcess) -> int:
    """The process id of a supervised worker, which is part of its name."""
    return int(worker.logged("worker.ready")[-1]["worker"].rpartition("-")[2])


async def get(worker: WorkerProcess, path: str) -> tuple[int, dict[str, Any]]:
    port = worker.logged("health.serving")[-1]["port"]

    def fetch() -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    status, body = await asyncio.to_thread(fetch)
    return status, json.loads(body)


async def status_of(bootstrap: str, lane_prefix: str) -> ServiceStatus:
    return await read_status(
        KafkaConnection(bootstrap=bootstrap),
        lane_prefix=lane_prefix,
        group_prefix="carousel.",
        reply_prefix="replies.",
        max_requests=50,
    )


async def first_tokens_of(bootstrap: str, topics: list[str], worker: str) -> list[float]:
    """For each log that `worker` has begun: the Unix time of its first `tokens` record."""
    import msgpack

    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        partitions = [TopicPartition(topic, 0) for topic in topics]
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        attempts: dict[str, int] = {}
        found: dict[str, float] = {}
        while any([await consumer.position(p) < end for p, end in ends.items()]):
            for records in (await consumer.getmany(timeout_ms=200)).values():
                for record in records:
                    event, fields = dict(record.headers)["event"], msgpack.unpackb(record.value)
                    if event == b"begin" and fields["worker"] == worker:
                        attempts[record.topic] = record.offset
                    if event == b"tokens" and fields["attempt"] == attempts.get(record.topic):
                        found.setdefault(record.topic, record.timestamp / 1000)
        return list(found.values())
    finally:
        await consumer.stop()


@pytest.mark.broker
async def test_an_answer_behind_a_long_one_is_not_open(broker: EmbeddedBroker, tmp_path: Path):
    """On the embedded broker, which keeps no done map: what has been answered is neither listed nor in the lag, also
    when its caller has deleted the reply topic."""
    arguments = ("--lane-prefix", "behind.", "--max-num-seqs", "4")
    worker = WorkerProcess(broker.bootstrap, tmp_path / "worker.log", *arguments)
    async with Client(broker.bootstrap, lane_prefix="behind.") as client:
        await create_topics(KafkaConnection(bootstrap=broker.bootstrap), lane_prefix="behind.", partitions=1)
        await asyncio.to_thread(worker.start)
        long = client.stream(prompt="Once", max_tokens=1900, ignore_eos=True, tier="standard")
        running = asyncio.create_task(long.completion())
        try:
            await until(lambda: long.ttft is not None, "the long one runs")
            async with Client(broker.bootstrap, lane_prefix="behind.") as other:  # deletes its topics when it leaves
                for _ in range(3):
                    await other.complete(prompt="Once", max_tokens=3, ignore_eos=True, tier="standard")

            async def only_the_long_one() -> bool:
                found = await status_of(broker.bootstrap, "behind.")
                assert not {r.state for r in found.requests} & {"waiting", "caller gone"}
                return [r.state for r in found.requests] == ["running"] and sum(lane.lag for lane in found.lanes) == 1

            await until(only_the_long_one, "the answered ones are done")
            assert not running.done(), "the long one was not long enough"
        finally:
            running.cancel()
            worker.end()


ODD_RECORDS: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]] = [
    (b"k\xff", b"{ not JSON", []),
    (None, bytes(range(256)), [("correlation_id", b"\xff"), ("empty", b""), ("null", None), ("empty", b"2")]),
    (b"", zlib.compress(b"x")[:-2], [("reply_to", b"__consumer_offsets"), ("dlq_reason", b"its own")]),
    (b"k", None, []),
    (None, None, [("tenant", b"acme")]),
    (b"", b"", [("content-type", b"?")]),
]


@pytest.mark.broker
async def test_dead_letters_go_back_as_they_came(broker: EmbeddedBroker, tmp_path: Path):
    """From a lane through a worker to the DLQ and back by `redrive`: the same bytes. What had to be cut is refused."""
    arguments = ("--lane-prefix", "back.", "--max-record-bytes", "20000")
    connection = KafkaConnection(bootstrap=broker.bootstrap)
    await create_topics(connection, lane_prefix="back.", partitions=1)
    lane = TopicPartition("back.standard", 0)
    large = [(b"k" * 30_000, b"x", []), (None, b"x" * 30_000, []), (None, b"x", [("h", b"x" * 30_000)])]
    letters: list[DeadLetter] = []

    async def buried(number: int) -> bool:
        letters[:] = await list_dead_letters(connection, lane_prefix="back.", limit=100)
        return len(letters) == number

    async with (
        TopicReader(connection) as reader,
        AIOKafkaProducer(bootstrap_servers=broker.bootstrap, value_serializer=serialised) as producer,
    ):
        with WorkerProcess(broker.bootstrap, tmp_path / "worker.log", *arguments) as worker:
            for key, value, headers in [*ODD_RECORDS, *large]:
                await producer.send_and_wait(lane.topic, NULL if value is None else value, key=key, headers=headers)
            await until(lambda: buried(len(ODD_RECORDS) + len(large)), "all of them are dead letters")
            worker.stop()
        letters.sort(key=lambda letter: letter.source)  # a worker has many in hand at once
        for letter, part in zip(letters[-3:], ("key", "value", "headers"), strict=True):
            with pytest.raises(NotRedrivable, match=f"is not all there: its {part} had 30[0-9]* bytes"):
                await redrive(connection, [letter], lane_prefix="back.")
        await redrive(connection, letters[:-3], lane_prefix="back.")
        begin, end = (await reader.bounds([lane]))[lane]
        records = [(r.key, r.value, list(r.headers)) async for r in reader.records({lane: (begin, end)})]
    assert records[: len(ODD_RECORDS)] == ODD_RECORDS
    assert records[len(ODD_RECORDS) + len(large) :] == ODD_RECORDS


@pytest.mark.kafka
@pytest.mark.shared
async def test_a_killed_worker_hands_over_at_once_and_comes_back(kafka: Any, checks: Path, tmp_path: Path):
    """kill -9 of the worker under its supervisor: a warm second one goes on long before the session's end, every token
    is there once, and the first serves again. Supervisors are small, their workers end with them, and say how they are.
    """
    arguments = ("--lane-prefix", "hand.", "--supervisor", "--metrics-port", "0", *LONG_SESSION)
    first = WorkerProcess(kafka.bootstrap, tmp_path / "first.log", *arguments)
    second = WorkerProcess(kafka.bootstrap, tmp_path / "second.log", *arguments)
    async with producing(kafka.bootstrap, "hand.", partitions=2) as producer:
        async with asyncio.TaskGroup() as starting:
            for worker in (first, second):
                starting.create_task(asyncio.to_thread(worker.start))
        with contextlib.ExitStack() as stack:
            stack.callback(first.end)
            stack.callback(second.end)

            async def both_serve() -> bool:
                found = await status_of(kafka.bootstrap, "hand.")
                return len(found.workers) == 2 and all(all(w.partitions.values()) for w in found.workers)

            await until(both_serve, "each worker has a partition of each lane")
            for worker in (first, second):
                assert (await get(worker, "/livez"))[0] == (await get(worker, "/readyz"))[0] == 200
            topics = [await producer.ask(LANES[i % 3], max_tokens=900) for i in range(9)]
            victim = first.logged("worker.ready")[-1]["worker"]

            async def victim_runs() -> bool:
                found = await status_of(kafka.bootstrap, "hand.")
                return any(r.worker == victim and r.num_tokens for r in found.requests)

            await until(victim_runs, "the first worker has given tokens")
            killed_at = time.time()
            os.kill(child_of(first), signal.SIGKILL)
            streams = await read_all(kafka.bootstrap, topics)
            assert [len(streams[t].token_ids.get(0, [])) for t in topics] == [900] * 9
            resumed = [t for t in topics if len(streams[t].attempts) > 1]
            heir = second.logged("worker.ready")[-1]["worker"]
            times = await first_tokens_of(kafka.bootstrap, resumed, heir)
            assert times, "nothing was resumed by the second worker"
            assert min(times) - killed_at < 30, "as late as the session's end"
            print(f"first resumed token after {min(times) - killed_at:.2f} s")
            (left,) = first.logged("supervisor.left_groups")
            assert sorted(left["groups"]) == sorted(f"carousel.hand.{lane}" for lane in LANES)
            assert left["failures"] == {}
            await until(lambda: len(first.logged("worker.ready")) == 2, "the first worker is there again")
            resident = Path(f"/proc/{first.pid}/status").read_text().partition("VmRSS:")[2].split()[0]
            assert int(resident) < 40_000
            assert first.stop() == 0
            orphan = child_of(second)
            second.kill()  # its supervisor, that is
            await until(lambda: not Path(f"/proc/{orphan}").exists(), "the worker ends with its supervisor")
            (drained,) = second.logged("worker.draining")
            assert drained["timeout"] == 0, "somebody may have started another one already"


@pytest.mark.kafka
@pytest.mark.shared
async def test_a_drain_serves_the_urgent_first_and_a_second_signal_stops_at_once(
    kafka: Any, checks: Path, tmp_path: Path
):
    """After SIGTERM the interactive requests end though batch ones have the seats; the lane without work is left at
    once; then a second SIGTERM ends it with status 143, and what was open is not ended."""
    arguments = ("--lane-prefix", "order.", "--supervisor", "--max-num-seqs", "2", "--metrics-port", "0")
    arguments += ("--drain-timeout", "50", *LONG_SESSION)
    async with producing(kafka.bootstrap, "order.", partitions=1) as producer:
        worker = WorkerProcess(kafka.bootstrap, tmp_path / "worker.log", *arguments)
        await asyncio.to_thread(worker.start)
        with contextlib.ExitStack() as stack:
            stack.callback(worker.end)
            batch = [await producer.ask("batch", max_tokens=4000) for _ in range(12)]
            urgent = [await producer.ask("interactive", max_tokens=30) for _ in range(6)]

            async def taken_in() -> bool:
                found = await status_of(kafka.bootstrap, "order.")
                return sum(r.worker is not None for r in found.requests) == 18 or len(found.requests) < 18

            await until(taken_in, "all requests have begun")
            worker.signal(signal.SIGTERM)
            await until(lambda: worker.logged("worker.draining"), "it drains")
            code, body = await get(worker, "/readyz")
            assert (code, body["reasons"]) == (503, ["draining"])
            assert (await get(worker, "/livez"))[0] == 200
            ends = await read_all(kafka.bootstrap, urgent)
            assert [s.end["finish_reason"] for s in ends.values()] == ["length"] * 6

            async def only_batch_is_left() -> bool:
                found = await status_of(kafka.bootstrap, "order.")
                return [w.partitions.keys() for w in found.workers] == [{"batch"}]

            await until(only_batch_is_left, "the lanes without work are left before the drain ends")
            worker.signal(signal.SIGTERM)
            assert await asyncio.to_thread(worker.wait) == 128 + signal.SIGTERM
            found = await status_of(kafka.bootstrap, "order.")
            assert found.workers == ()
            left = {f"replies.{r.correlation_id}" for r in found.requests}
            assert left, "the machine is too quick for this test: more tokens"
            assert left <= set(batch)
            assert {r.state for r in found.requests} == {"running"}


@pytest.mark.kafka
@pytest.mark.shared
async def test_cancel_and_reap_as_operators_do_them(kafka: Any, checks: Path, tmp_path: Path):
    """`carousel cancel` ends a running request that `carousel status` shows; its reply topic, left behind, is deleted
    by the worker that has the lease."""

    def carousel(*arguments: str) -> str:
        command = [
            sys.executable,
            "-m",
            "service",
            *arguments,
            "--bootstrap",
            kafka.bootstrap,
            "--lane-prefix",
            "oper.",
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    arguments = ("--lane-prefix", "oper.", "--reap-after", "1", "--drain-timeout", "0.5")
    async with producing(kafka.bootstrap, "oper.", partitions=2) as producer:
        with WorkerProcess(kafka.bootstrap, tmp_path / "worker.log", *arguments) as worker:
            for _ in range(8):  # alone, it could end before the cancel comes
                await producer.ask("batch", max_tokens=4000)
            topic = await producer.ask("standard", max_tokens=4000)
            request_id = topic.removeprefix("replies.")

            async def running() -> bool:
                found = await status_of(kafka.bootstrap, "oper.")
                return (request_id, "running") in [(r.correlation_id, r.state) for r in found.requests]

            await until(running, "status shows the request as running")
            reading = asyncio.create_task(read_all(kafka.bootstrap, [topic]))  # before it can be deleted
            assert request_id in await asyncio.to_thread(carousel, "cancel", request_id)
            assert (await reading)[topic].end["finish_reason"] == "cancelled"

            async def reaped() -> bool:
                async with TopicAdmin(KafkaConnection(bootstrap=kafka.bootstrap)) as admin:
                    return topic not in await admin.list()

            await until(reaped, "the reply topic is deleted")
            await until(lambda: any(line["deleted"] for line in worker.logged("reaper.done")), "the worker says so")
            assert worker.stop() == 0


async def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path):
    """The supervisor passes on that the worker cannot run as configured, without trying it again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "worker", "--model", "tiny", "--bootstrap", "127.0.0.1:1"]
        process = await asyncio.create_subprocess_exec(
            *command, "--metrics-port", port, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        async with asyncio.timeout(LIMIT_S):
            _, stderr = await process.communicate()
    assert process.returncode == 1
    assert stderr.decode().startswith(f"carousel worker: --metrics-port {port} of 127.0.0.1 cannot be had: ")
    assert stderr.count(b"\n") == 1


@pytest.mark.kafka
async def test_a_dead_consumer_is_replaced_under_load(kafka: Any):
    """A lane's fetching ends without a word, as aiokafka's does: the lane gets a new consumer, the other lanes do not
    notice, and every answer is complete."""
    await create_topics(KafkaConnection(bootstrap=kafka.bootstrap), lane_prefix="dead.", partitions=2)
    config = WorkerConfig(
        bootstrap=kafka.bootstrap,
        lane_prefix="dead.",
        model="tiny",
        num_threads=1,
        num_blocks=1024,
        session_timeout_ms=6000,
    )
    ready, health = asyncio.Event(), Health(config.stuck_after)
    worker = Worker(config, *build(config), on_ready=ready.set, health=health)
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(LIMIT_S):
        await ready.wait()
        async with Client(kafka.bootstrap, lane_prefix="dead.") as client:
            streams = {tier: client.stream(prompt=f"Go on, {tier}", tier=tier, **LONG) for tier in LANES}
            events = {tier: aiter(stream) for tier, stream in streams.items()}
            for each in events.values():
                while not isinstance(await anext(each), Tokens):
                    pass
            before = dict(worker.lanes)
            worker.lanes["standard"]._consumer._fetcher._fetch_task.cancel()
            answers = {tier: await streams[tier].completion() for tier in LANES}
            assert {len(answer.token_ids) for answer in answers.values()} == {LONG["max_tokens"]}
            again = await client.complete(prompt="Again", tier="standard", max_tokens=3, ignore_eos=True)
            assert len(again.token_ids) == 3
        replaced = [tier for tier in LANES if worker.lanes[tier] is not before[tier]]
        assert replaced == ["standard"]
        assert health.stuck() == []
        worker.stop()
        await running
