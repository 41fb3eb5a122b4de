"""Worker processes under fire: started, killed, frozen, drained, replaced. Linux only (it looks into /proc).

What serves is the last in the line of processes below `python -m worker`: that process itself, or its child where a
supervisor stands between. A fault hits what serves; whoever is left afterwards is the fleet's to judge.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.child import bound_to_parent

READY_S = 120.0
STOP_S = 60.0


class WorkerDied(Exception):
    """A worker ended that nobody had told to. The message has the end of its log."""


@dataclass(eq=False, slots=True)
class Member:
    """One worker of the fleet. `busy`: a fault is at work on it, or it is not ready yet."""

    name: str
    process: asyncio.subprocess.Process
    folder: Path
    busy: bool = True
    leaving: bool = False  # told to end
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    watch: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def step_log(self) -> Path:
        return self.folder / f"{self.name}.steps"

    @property
    def serving_pid(self) -> int:
        """The process that serves: the last below `python -m worker`."""
        pid = self.process.pid
        while children := _children(pid):
            pid = children[0]
        return pid

    def last_step(self) -> dict[str, Any] | None:
        """The newest line of the step log, which may be of a process that is no more."""
        if not self.step_log.exists():
            return None
        lines = self.step_log.read_text().splitlines()
        return json.loads(lines[-1]) if lines else None


class Fleet:
    """Starts workers that share lanes, and does to them what a fault says."""

    def __init__(self, bootstrap: str, folder: Path, arguments: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "worker", "--bootstrap", bootstrap, *arguments]
        self._folder = folder
        self._num_started = 0
        self.members: list[Member] = []
        self.deaths: list[str] = []  # of workers that nobody had told to end

    def idle(self) -> list[Member]:
        """Those that serve and that no fault is at work on."""
        return [m for m in self.members if m.alive and not m.busy]

    def staying(self) -> list[Member]:
        """Those that nobody has told to end, ready or not."""
        return [m for m in self.members if m.alive and not m.leaving]

    async def add(self) -> Member:
        """Starts a worker; it becomes idle when it is ready."""
        self._num_started += 1
        name = f"w{self._num_started}"
        command = bound_to_parent([*self._command, "--worker", name, "--step-log", str(self._folder / f"{name}.steps")])
        with (self._folder / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True
            )
        member = Member(name, process, self._folder)
        member.watch = asyncio.create_task(self._watch(member), name=f"watch {name}")
        self.members.append(member)
        return member

    async def _watch(self, member: Member) -> None:
        assert member.process.stdout is not None
        while line := await member.process.stdout.readline():
            if line.strip() == b"ready":
                member.ready.set()
                member.busy = False

    async def ready(self, member: Member, timeout: float = READY_S) -> None:
        """Returns when the worker serves. One that does not in time is killed, and all with it. Raises WorkerDied."""
        end = time.monotonic() + timeout
        while not member.ready.is_set():
            if time.monotonic() > end:
                self._kill_group(member)
                await member.process.wait()
            if not member.alive:
                raise WorkerDied(self.epitaph(member))
            await asyncio.sleep(0.05)

    def epitaph(self, member: Member) -> str:
        lines = member.log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join([f"{member.name}: status {member.process.returncode}; {member.log}", *lines])

    async def kill(self, member: Member) -> bool:
        """kill -9 of what serves. Tells whether a supervisor is left, which starts another by itself."""
        member.busy = True
        member.ready.clear()
        os.kill(member.serving_pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(member.process.wait(), 0.5)
        return member.alive

    async def freeze(self, member: Member, seconds: float) -> None:
        """SIGSTOP of what serves, and SIGCONT after a while."""
        member.busy = True
        pid = member.serving_pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):  # a supervisor may have given it up
                os.kill(pid, signal.SIGCONT)
            member.busy = not member.alive

    async def drain(self, member: Member) -> int:
        """SIGTERM; returns the exit status."""
        member.busy = member.leaving = True
        member.process.terminate()
        return await asyncio.wait_for(member.process.wait(), STOP_S)

    def bury(self) -> list[Member]:
        """Takes out who has ended, and returns them; those that no fault was at work on are deaths."""
        dead = [m for m in self.members if not m.alive]
        for member in dead:
            self.members.remove(member)
            if not member.busy:
                self.deaths.append(self.epitaph(member))
        return dead

    async def close(self) -> None:
        """Ends all that still run, without ceremony."""
        for member in self.members:
            self._kill_group(member)
        await asyncio.gather(*(m.process.wait() for m in self.members))
        await asyncio.gather(*(m.watch for m in self.members if m.watch is not None))

    @staticmethod
    def _kill_group(member: Member) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(member.process.pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
