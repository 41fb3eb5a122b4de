"""Worker processes under a test's control, and requests as any Kafka client makes them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import msgpack
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from schemas.connection import KafkaConnection
from service.topics import create_topics

READY_S = 240  # a busy machine takes a minute to import torch


class WorkerProcess:
    """`python -m worker` with the tiny model; started by `start`, which waits for `ready`.

    Without a supervisor, so that a kill is a kill; the argument --supervisor is for the tests of that. `module`: what
    is run in place of `worker`.
    """

    def __init__(self, bootstrap: str, log: Path, *arguments: str, module: str = "worker") -> None:
        self._command = [sys.executable, "-m", module, "--bootstrap", bootstrap, "--model", "tiny"]
        self._command += ["--num-threads", "1", "--num-blocks", "4096", "--session-timeout-ms", "6000"]
        self._command += ["--no-supervisor", *arguments]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        deadline = time.monotonic() + READY_S
        while b"ready" not in (self._process.stdout.read() or b""):
            assert self._process.poll() is None, f"the worker ended: {self.log_text()[-2000:]}"
            assert time.monotonic() < deadline, f"the worker is not ready: {self.log_text()[-2000:]}"
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        """Of the process that was started: the supervisor, where there is one."""
        assert self._process is not None
        return self._process.pid

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The lines of its log with this event."""
        found = []
        for line in self.log_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [line for line in found if isinstance(line, dict) and line.get("event") == event]

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout: float = 45) -> int:
        """The exit status."""
        assert self._process is not None
        status = self._process.wait(timeout)
        self._close()
        return status

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._close()

    def stop(self, timeout: float = 45) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(timeout)
        finally:
            self._process.kill()
            self._process.wait()
            self._close()
        return status

    def end(self) -> None:
        """Whatever it does now: SIGTERM twice, then SIGKILL. For the end of a test that has failed."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
                break
        self._close()

    def _close(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None

    def log_text(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill()


class Producer:
    """Publishes requests, each with a reply topic of its own."""

    def __init__(self, admin: AIOKafkaAdminClient, producer: AIOKafkaProducer, lane_prefix: str) -> None:
        self._admin = admin
        self._producer = producer
        self._lane_prefix = lane_prefix

    async def ask(self, lane: str, **body: object) -> str:
        """Publishes a request; returns its reply topic."""
        request_id = uuid.uuid4().hex
        topic = await self.reply_topic(request_id)
        fields = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "ignore_eos": True} | body
        headers = [("correlation_id", request_id.encode()), ("reply_to", topic.encode())]
        await self._producer.send_and_wait(f"{self._lane_prefix}{lane}", msgpack.packb(fields), headers=headers)
        return topic

    async def reply_topic(self, request_id: str) -> str:
        """Creates the reply topic of a request."""
        topic = f"replies.{request_id}"
        await self._admin.create_topics([NewTopic(topic, 1, 1)])
        return topic

    async def delete(self, topics: list[str]) -> None:
        await self._admin.delete_topics(topics)


@contextlib.asynccontextmanager
async def producing(bootstrap: str, lane_prefix: str, partitions: int = 4) -> AsyncIterator[Producer]:
    """A producer on lanes of its own, which it creates."""
    topics = await create_topics(KafkaConnection(bootstrap=bootstrap), lane_prefix=lane_prefix, partitions=partitions)
    assert any(name.startswith(lane_prefix) for name in topics.created), f"another test has lanes {lane_prefix}*"
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    try:
        yield Producer(admin, producer, lane_prefix)
    finally:
        await producer.stop()
        await admin.close()
