"""`carousel console`: the live page of a worker from a small server of its own, which stays when the worker goes."""

import asyncio
import signal
import socket
from collections.abc import Callable

from starlette.applications import Starlette

from schemas.snapshot import fetch_snapshot
from worker.health_server import new_server
from worker.live import Feed, live_routes


def remote_feed(url: str) -> Feed:
    """The snapshots of the worker whose metrics port is at `url`."""

    async def take() -> tuple[bytes, float]:
        return await asyncio.to_thread(fetch_snapshot, url), 0.0  # it is the worker that paces

    return Feed(take)


def run_console(url: str, host: str, port: int, on_bound: Callable[[int], None]) -> int:
    """Serves the live page of the worker at `url` until SIGINT or SIGTERM, and returns which. Raises OSError when the
    port cannot be had.

    on_bound: told of the port that was bound.
    """
    server = new_server(Starlette(routes=live_routes(remote_feed(url))))
    received: list[int] = []

    def leave(number: int, _frame: object) -> None:
        received.append(number)
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)  # uvicorn has its own while it runs, and then hands them on to these
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        on_bound(listener.getsockname()[1])
        server.run([listener])
    return received[0]
