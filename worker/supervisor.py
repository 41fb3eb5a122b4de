"""The supervisor of `carousel worker`: a small process, and the worker as its child (design.md 5).

When the worker dies, its membership in the lanes' groups outlives it by the session time-out. The supervisor, which
knows the member ids because the worker reports them, leaves the groups for it: other workers have its partitions in
about a second. Then it starts the worker again. It is small because it holds nothing: no model, no consumer, no
configuration but how to reach Kafka.

`python -m worker.supervisor DESCRIPTOR COMMAND...`; the descriptor is of a file with the Settings as JSON.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from schemas.tls import client_context
from worker.supervised import VARIABLE
from worker.transport.leave_group import leave_groups

LEAVE_S = 5.0  # for all groups together; without a broker nobody waits for it
AT_ONCE_S = 5.0  # after a second signal
LAST_REPORTS_S = 1.0
MAX_DOUBLINGS = 64  # a float has room for a thousand, and a worker may die more often

Leave = Callable[[Mapping[str, str]], Awaitable[Mapping[str, str]]]
Say = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the supervisor must know, handed over by the process that it replaces."""

    kafka: dict[str, Any]  # options of an aiokafka client, without TLS
    tls: dict[str, Any] | None  # of schemas.tls.client_context
    kill_after: float  # seconds after the first signal; then the worker has not drained as it should
    json_lines: bool


class Restarts:
    """When a dead worker is started again, and when that makes no sense any more. Pure: the caller brings the time.

    Args:
        first: seconds before the first restart; each further one waits twice as long, at most `most`.
        stable: a worker that was ready for so many seconds starts the pauses anew.
        max_deaths: so many within `window` seconds, none of them after `ready`, are a crash loop.
    """

    def __init__(
        self,
        *,
        first: float = 0.5,
        most: float = 30.0,
        stable: float = 60.0,
        max_deaths: int = 5,
        window: float = 3600.0,
    ) -> None:
        self._first = first
        self._most = most
        self._stable = stable
        self._max_deaths = max_deaths
        self._window = window
        self._num_quick = 0  # deaths since the worker was stable
        self._unready_deaths: deque[float] = deque()

    def died(self, now: float, ready_for: float | None) -> float | None:
        """Seconds until the next start; None: give up.

        Args:
            ready_for: seconds since the worker was ready, None when it never was.
        """
        if ready_for is None:
            self._unready_deaths.append(now)
        else:
            self._unready_deaths.clear()
        while self._unready_deaths and self._unready_deaths[0] < now - self._window:
            self._unready_deaths.popleft()
        if len(self._unready_deaths) >= self._max_deaths:
            return None
        if ready_for is not None and ready_for >= self._stable:
            self._num_quick = 0
        pause = min(self._first * 2.0 ** min(self._num_quick, MAX_DOUBLINGS), self._most)
        self._num_quick += 1
        return pause


class _Child:
    """One life of the worker."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.ended = asyncio.Event()
        self.members: dict[str, str] = {}  # group -> member id
        self.ready_at: float | None = None
        self.refused = False

    async def read_reports(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            try:
                report = json.loads(line)
            except ValueError:  # it died while it wrote
                continue
            match report:
                case {"group": str(group), "member": str(member)}:
                    self.members[group] = member
                case {"ready": True}:
                    self.ready_at = time.monotonic()
                case {"refused": True}:
                    self.refused = True


class Supervisor:
    """Runs a command until it ends in order, is stopped by a signal, or dies again and again.

    Args:
        command: of the worker; its first word is a path.
        leave: takes members out of their groups (group -> member id); returns what did not work.
        say: writes a line of the log: an event and its facts.
    """

    def __init__(
        self, command: Sequence[str], leave: Leave, say: Say, *, kill_after: float, restarts: Restarts | None = None
    ) -> None:
        self._command = command
        self._leave = leave
        self._say = say
        self._kill_after = kill_after
        self._restarts = restarts or Restarts()
        self._child: _Child | None = None
        self._stop = asyncio.Event()
        self._was_ready = False
        self._num_signals = 0
        self._num_restarts = 0

    async def run(self) -> int:
        """The exit status: the worker's, or 128 + the signal that ended it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGCHLD, self._on_child)
        while True:
            child = await self._live()
            code = child.process.returncode
            status = 128 - code if code < 0 else code
            if code and child.members:
                await self._leave_for(child)
            if code == 0 or self._stop.is_set() or (child.refused and not self._was_ready):
                return status
            now = time.monotonic()
            pause = self._restarts.died(now, None if child.ready_at is None else now - child.ready_at)
            if pause is None:
                print(
                    f"carousel worker: gave up. The worker died again and again without becoming ready, the last time "
                    f"{_how(code)}; its lines above say why",
                    file=sys.stderr,
                    flush=True,
                )
                return status
            self._num_restarts += 1
            self._say("supervisor.restarting", how=_how(code), again_in=pause, restarts=self._num_restarts)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause)
                return status

    async def _live(self) -> _Child:
        """Starts the worker; returns when it has ended and all that it reported is read."""
        child, link = self._start()
        self._on_child()  # it may be over already
        reader, writer = await asyncio.open_connection(sock=link)
        reports = asyncio.create_task(child.read_reports(reader))
        await child.ended.wait()
        await asyncio.wait([reports], timeout=LAST_REPORTS_S)  # a process of the worker's may hold the other end
        reports.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reports
        writer.close()
        self._was_ready |= child.ready_at is not None
        return child

    def _start(self) -> tuple[_Child, socket.socket]:
        """A new worker, and our end of the link to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            # Not asyncio's: it waits in a thread, and while a second thread lives a child may hear twice of our death.
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {VARIABLE: f"{os.getpid()}:{theirs.fileno()}:{self._num_restarts}"},
                start_new_session=True,  # Ctrl-C is for us, and we pass it on once
            )
        self._child = _Child(process)
        return self._child, ours

    def _on_child(self) -> None:
        if self._child is not None and self._child.process.poll() is not None:
            self._child.ended.set()

    def _on_signal(self, number: int) -> None:
        """The first one drains the worker, the second stops it at once; what takes too long is killed."""
        self._num_signals += 1
        self._stop.set()
        if self._child is not None:
            self._child.process.send_signal(number)
        patience = self._kill_after if self._num_signals == 1 else AT_ONCE_S
        asyncio.get_running_loop().call_later(patience, self._kill)

    def _kill(self) -> None:
        if self._child is not None and self._child.process.poll() is None:
            self._say("supervisor.killing", pid=self._child.process.pid)
            self._child.process.kill()

    async def _leave_for(self, child: _Child) -> None:
        began = time.monotonic()
        failures = await self._leave(child.members)
        self._say(
            "supervisor.left_groups",
            groups=[group for group in child.members if group not in failures],
            failures=dict(failures),
            seconds=round(time.monotonic() - began, 3),
        )


def _how(code: int) -> str:
    if code >= 0:
        return f"with status {code}"
    try:
        return f"by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"by signal {-code}"


def become_supervisor(settings: Settings, command: Sequence[str]) -> NoReturn:
    """This process goes on as the supervisor of `command`, without what it has imported."""
    read, write = os.pipe()
    os.write(write, json.dumps(asdict(settings)).encode())
    os.close(write)
    os.set_inheritable(read, True)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "worker.supervisor", str(read), *command])  # noqa: S606


def _say_lines(json_lines: bool) -> Say:
    """Lines like those of the worker's log (worker.telemetry), without its libraries."""

    def say(event: str, **facts: object) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"event": event, "level": "warning", "timestamp": at} | facts
        text = json.dumps(line) if json_lines else " ".join(f"{name}={value}" for name, value in line.items())
        print(text, file=sys.stderr, flush=True)

    return say


def main() -> None:
    descriptor, *command = sys.argv[1:]
    with os.fdopen(int(descriptor)) as file:
        settings = Settings(**json.load(file))
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())  # we say what came of it

    async def leave(members: Mapping[str, str]) -> Mapping[str, str]:
        try:
            tls = {"ssl_context": client_context(**settings.tls)} if settings.tls else {}
        except ValueError as e:
            return dict.fromkeys(members, str(e))
        with ThreadPoolExecutor(1) as threads:  # to resolve host names; none may be left when the next worker starts
            asyncio.get_running_loop().set_default_executor(threads)
            return await leave_groups(settings.kafka | tls, members, LEAVE_S)

    supervisor = Supervisor(command, leave, _say_lines(settings.json_lines), kill_after=settings.kill_after)
    raise SystemExit(asyncio.run(supervisor.run()))


if __name__ == "__main__":
    main()
