"""Processes that end with the one that started them, even when that one is killed."""

import os
import sys
from collections.abc import Sequence

# The kernel signals the child when the *thread* that forked it ends, hence no thread of an executor may start it. The
# child asks for that itself before it becomes the command: a preexec_fn would fork a process that may have threads.
_LAUNCHER = """
import ctypes, os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the parent has gone")
os.execv(command[0], command)
"""


def bound_to_parent(command: Sequence[str]) -> list[str]:
    """The command, to be started by the main thread of this process, which on Linux gets a SIGTERM when that ends.

    The first word is a path. Elsewhere than on Linux a process that is killed leaves the child behind.
    """
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
