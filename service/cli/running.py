"""Runs a command's coroutine: signals cancel it, logs go to stderr, a failure is one sentence."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from typing import Any

import structlog
import typer

from schemas.errors import RequestError
from schemas.exporting import Exporting
from schemas.log_lines import before_rendering, library_formatter, renderer
from service.errors import ServiceError


def run(main: Coroutine[Any, Any, None], *, log_level: int = logging.WARNING) -> None:
    """Runs `main`. SIGINT and SIGTERM cancel it: its context managers clean up, then the exit status is 128 + signal.

    A ServiceError, a RequestError or a ValueError (bad TLS files) is printed, and the exit status is 1.
    """
    structlog.configure(
        processors=[*before_rendering(json_lines=False), renderer(json_lines=False)],
        wrapper_class=structlog.make_filtering_bound_logger(log_level),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
    if logging.lastResort is not None:  # what libraries say
        logging.lastResort.setFormatter(library_formatter(json_lines=False))
    logging.captureWarnings(True)
    client_log = logging.getLogger("aiokafka")  # a line per failed attempt; we say what matters of it
    client_log.addHandler(logging.NullHandler())
    client_log.propagate = False
    exporting = Exporting("carousel-client", f"{socket.gethostname()}-{os.getpid()}")
    exporting.install()
    try:
        asyncio.run(_cancellable(main))
    except (ServiceError, RequestError, ValueError) as error:
        typer.echo(f"carousel: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        exporting.close()


async def _cancellable(main: Coroutine[Any, Any, None]) -> None:
    received: list[int] = []
    task = asyncio.current_task()
    assert task is not None

    def cancel(number: int) -> None:
        received.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cancel, number)
    try:
        await main
    except asyncio.CancelledError:
        if not received:
            raise
        raise typer.Exit(128 + received[0]) from None
