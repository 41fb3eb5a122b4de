"""The worker's side of its supervisor: what it reports, and how it ends when the supervisor has died.

Both hold one end of a socket pair. The worker writes lines of JSON to it; the supervisor writes nothing, so what there
is to read is the end of it.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Self

VARIABLE = "CAROUSEL_SUPERVISOR_LINK"  # supervisor's process id : file descriptor : restarts so far
_PR_SET_PDEATHSIG = 1
_ORPHAN_S = 20.0  # an orphan that has not handed over and ended by then cannot


class SupervisorLink:
    """Where a supervised worker reports to."""

    def __init__(self, end: socket.socket, supervisor_pid: int, num_restarts: int) -> None:
        self._end = end
        self._supervisor_pid = supervisor_pid
        self.num_restarts = num_restarts  # of the worker, before this process

    @classmethod
    def from_environment(cls) -> Self | None:
        """The link, made once; None when nobody supervises this process. From now on it dies with the supervisor:
        by SIGTERM, and whatever it does by then, 20 s later. Call it early, on the main thread."""
        words = os.environ.pop(VARIABLE, "")  # processes that this one starts are not supervised
        if not words:
            return None
        supervisor_pid, descriptor, num_restarts = map(int, words.split(":"))
        link = cls(socket.socket(fileno=descriptor), supervisor_pid, num_restarts)
        os.set_inheritable(descriptor, False)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if link.orphaned:
            raise SystemExit("the supervisor has gone")
        threading.Thread(target=link._end_with_supervisor, name="supervisor's end", daemon=True).start()
        return link

    @property
    def orphaned(self) -> bool:
        """Whether the supervisor has died."""
        return os.getppid() != self._supervisor_pid

    def joined(self, group: str, member: str) -> None:
        """This process is that member of that group, in place of any earlier one."""
        self._report(group=group, member=member)

    def ready(self) -> None:
        """Every lane consumes."""
        self._report(ready=True)

    def refused(self) -> None:
        """The worker ends because it cannot run as configured, and has said why."""
        self._report(refused=True)

    def _report(self, **facts: object) -> None:
        # A supervisor that does not read (stopped, dead) must not stop the worker: it then waits for the session.
        with contextlib.suppress(OSError):
            self._end.send(json.dumps(facts).encode() + b"\n", socket.MSG_DONTWAIT)

    def _end_with_supervisor(self) -> None:
        with contextlib.suppress(OSError):
            self._end.recv(1)  # returns when the supervisor's end is closed
        if sys.platform != "linux":
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHAN_S)
        os._exit(1)
