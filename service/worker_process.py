"""A worker in a process of its own, for the demonstration."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import IO

from schemas.connection import ENV_PREFIX, KafkaConnection
from service.child import bound_to_parent
from service.errors import ServiceError

_STOP_S = 20.0  # for draining; then it is killed


class WorkerFailed(ServiceError):
    """The worker process ended. Says where its log is, and the log's end."""


class WorkerProcess:
    """A worker in a process of its own, which ends with this one. Its log goes to a file."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process = process
        self.log_path = log_path

    def kill(self) -> None:
        """At once, without a drain."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def failed(self) -> WorkerFailed:
        """Waits until the process has ended, and says how."""
        status = await self._process.wait()
        lines = self.log_path.read_text(errors="replace").splitlines()[-5:]
        return WorkerFailed("\n".join([f"the worker ended with status {status}; its log is {self.log_path}", *lines]))


@contextlib.asynccontextmanager
async def running_worker(
    connection: KafkaConnection,
    *,
    arguments: Sequence[str],
    log_path: Path,
    on_progress: Callable[[str], None],
) -> AsyncIterator[WorkerProcess]:
    """A worker that is ready. `on_progress` hears what it does until then. Raises WorkerFailed."""
    command = bound_to_parent([sys.executable, "-m", "worker", "--log-format", "json", *arguments])
    with log_path.open("wb") as log_file:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | connection.environment() | {f"{ENV_PREFIX}SUPERVISOR": "false"},  # a crash is to be seen
            start_new_session=True,  # Ctrl-C is for us: we stop it when the client has closed
        )
        assert process.stdout is not None
        assert process.stderr is not None
        log = asyncio.create_task(_keep_log(process.stderr, log_file, on_progress))
        try:
            worker = WorkerProcess(process, log_path)
            while line := await process.stdout.readline():
                if line.strip() == b"ready":
                    break
            else:
                raise await worker.failed()
            yield worker
        finally:
            await _stop(process)
            await log


async def _keep_log(stream: asyncio.StreamReader, log_file: IO[bytes], on_progress: Callable[[str], None]) -> None:
    while line := await stream.readline():
        log_file.write(line)
        log_file.flush()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            if entry["event"] == "model.progress":
                on_progress(f"{entry['doing']} {entry['percent']} %")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
