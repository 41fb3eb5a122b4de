"""Runs a function in a process of its own, so that no contender inherits from another.

Memory, thread pools and what a library sets for its process stay apart, and only one model is loaded at a time.
"""

import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import structlog

_T = TypeVar("_T")
_OnTokens = Callable[[int], None]
_REPORT_S = 0.25


class ChildFailed(Exception):
    """The message is the child's traceback, or how it ended."""


def in_child(function: Callable[[_OnTokens], _T], on_tokens: _OnTokens) -> _T:
    """`function(on_tokens)`, called in a new process; both ends and what they hand over can be pickled.

    `on_tokens` is called here, with what the child has reported, a few times a second. Raises ChildFailed.
    """
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(function, writer), daemon=True)
    process.start()
    writer.close()
    try:
        while True:
            kind, value = reader.recv()
            if kind == "tokens":
                on_tokens(value)
            elif kind == "result":
                return value
            else:
                raise ChildFailed(value)
    except EOFError:
        process.join()
        raise ChildFailed(f"the process ended with status {process.exitcode}") from None
    finally:
        process.join()
        reader.close()


def _call(function: Callable[[_OnTokens], _T], parent: Connection) -> None:
    # OpenMP's threads spin at barriers by default, and lose much where cores are shared; the worker tells them not to
    # (worker/model/__init__.py), and here too, whatever is imported first. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    num_unreported, reported_at = 0, time.monotonic()

    def on_tokens(number: int) -> None:
        nonlocal num_unreported, reported_at
        num_unreported += number
        if time.monotonic() - reported_at >= _REPORT_S:
            parent.send(("tokens", num_unreported))
            num_unreported, reported_at = 0, time.monotonic()

    try:
        result = function(on_tokens)
    except Exception:
        parent.send(("failure", traceback.format_exc()))
    else:
        parent.send(("tokens", num_unreported))
        parent.send(("result", result))
