"""`carousel console`: the live page of workers from a small server of its own, which stays when they go."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route

from schemas.snapshot import NoSnapshot, Snapshot, WorkerAddress
from worker.health_server import listening, new_server
from worker.live import Feed, live_routes

GLANCE_S = 2.0  # how old may be what is told of a worker that nobody has chosen


class RemoteWorker:
    """The worker whose metrics port is at `url`. What it was called is known when it is away."""

    def __init__(self, url: str) -> None:
        self._address = WorkerAddress(url)
        self._name = self._model = ""
        self.feed = Feed(self._take)

    async def _take(self) -> tuple[bytes, float]:
        return await asyncio.to_thread(self._address.fetch), 0.0  # it is the worker that paces

    async def glance(self) -> dict[str, Any]:
        """Who it is and how it is: as few words as fit beside those of the others."""
        here, ready, words = True, False, ""
        try:
            found = Snapshot.decode(await self.feed.latest(GLANCE_S))
        except (NoSnapshot, ValueError) as away:
            here, words = False, str(away)
        else:
            self._name, self._model, ready = found.worker, found.model, not found.reasons
            words = "; ".join(found.reasons) or f"{len(found.seats)} of {found.num_seats} seats"
        about = {"url": self._address.url, "name": self._name, "model": self._model}
        return about | {"here": here, "ready": ready, "words": words}


def console_routes(urls: Sequence[str]) -> list[Route]:
    """The live page of the workers whose metrics ports are at `urls`."""
    workers = [RemoteWorker(url) for url in urls]

    async def glance() -> list[dict[str, Any]]:
        return await asyncio.gather(*(worker.glance() for worker in workers))

    return live_routes(*(worker.feed for worker in workers), glance=glance if len(workers) > 1 else None)


def run_console(urls: Sequence[str], host: str, port: int, on_bound: Callable[[int], None]) -> int:
    """Serves the live page of the workers at `urls` until SIGINT or SIGTERM, and returns which. Raises OSError when the
    port cannot be had.

    on_bound: told of the port that was bound.
    """
    server = new_server(Starlette(routes=console_routes(urls)))
    received: list[int] = []

    def leave(number: int, _frame: object) -> None:
        received.append(number)
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)  # uvicorn has its own while it runs, and then hands them on to these
    with listening(host, port) as listener:
        on_bound(listener.getsockname()[1])
        server.run([listener])
    return received[0]
