"""Keys as they are typed, and being woken by a signal or another thread: what a live picture waits for."""

import contextlib
import os
import re
import select
import signal
import sys
import termios
import tty
from types import TracebackType
from typing import Self

_KEY = re.compile(r"\x1b[\[O][A-D]|.", re.DOTALL)
_WAYS = {"A": -1, "D": -1, "B": 1, "C": 1}  # the arrows, as terminals send them


class Keys:
    """A context manager, for the main thread. Where standard input is no terminal, nothing is ever typed."""

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._typing = sys.stdin.fileno() if sys.stdin.isatty() else None
        if self._typing is not None:
            self._settings = termios.tcgetattr(self._typing)
            tty.setcbreak(self._typing)  # signals stay what they are
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._typing is not None:
            termios.tcsetattr(self._typing, termios.TCSADRAIN, self._settings)
        signal.set_wakeup_fd(self._before)
        write, self._write = self._write, -1
        os.close(write)
        os.close(self._read)

    def wake(self) -> None:
        """Ends a `wait`, or the next one. From any thread, also when nobody waits any more."""
        with contextlib.suppress(OSError):  # it is full, or closed
            os.write(self._write, b"\0")

    def wait(self) -> str:
        """Returns what was typed, "" when it was woken."""
        readable, _, _ = select.select([fd for fd in (self._read, self._typing) if fd is not None], [], [])
        if self._read in readable:
            os.read(self._read, 4096)
        if self._typing not in readable:
            return ""
        typed = os.read(self._typing, 1024) if self._typing is not None else b""
        if not typed:  # the terminal has gone: it would be readable for ever
            self._typing = None
        return typed.decode(errors="replace")


def moved(chosen: int, typed: str, number: int) -> int:
    """Which of `number` is chosen after that: arrows and tab go round, 1 to 9 name one."""
    for key in _KEY.findall(typed):
        if key == "\t" or len(key) > 1:
            chosen = (chosen + _WAYS.get(key[-1], 1)) % number
        elif key in "123456789" and int(key) <= number:
            chosen = int(key) - 1
    return chosen
