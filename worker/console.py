"""`carousel console`: the live page of workers from a small server of its own, which stays when they go."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route

from schemas.snapshot import FETCH_S, NoSnapshot, Snapshot, WorkerAddress
from worker.health_server import listening, new_server
from worker.live import Feed, live_routes

GLANCE_S = 2.0  # how old may be what is told of a worker that nobody has chosen
ANSWER_S = 0.5  # for workers to say how they are; of those that take longer, what is known is told
PATIENCE_S = FETCH_S + 0.5  # a fetch has its own limit, but for the look-up of a name


class RemoteWorker:
    """The worker whose metrics port is at `url`. What it was called is known when it is away."""

    def __init__(self, url: str, threads: ThreadPoolExecutor) -> None:
        self._address = WorkerAddress(url)
        self._threads = threads
        self._fetching: asyncio.Future[bytes] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._name = self._model = ""
        self._how: dict[str, Any] = {"here": False, "ready": False, "words": "it has not answered yet"}
        self.feed = Feed(self._take)

    async def _take(self) -> tuple[bytes, float]:
        """One fetch at a time: a worker that does not answer has one thread, and no other waits for it."""
        if self._fetching is None:
            self._fetching = asyncio.get_running_loop().run_in_executor(self._threads, self._address.fetch)
            self._fetching.add_done_callback(self._fetched)
        fetching = self._fetching
        await asyncio.wait([fetching], timeout=PATIENCE_S)
        if not fetching.done():
            raise NoSnapshot(f"no worker answers at {self._address.url}: it took more than {PATIENCE_S:g} s")
        return fetching.result(), 0.0  # it is the worker that paces

    def _fetched(self, fetching: asyncio.Future[bytes]) -> None:
        self._fetching = None
        if not fetching.cancelled():
            fetching.exception()  # told to whoever still waits, and else to nobody

    def look(self) -> asyncio.Task[None]:
        """Ends when `told` is as it is now."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        return self._looking

    async def _look(self) -> None:
        here, ready, words = True, False, ""
        try:
            found = Snapshot.decode(await self.feed.latest(GLANCE_S))
        except (NoSnapshot, ValueError) as away:
            here, words = False, str(away)
        else:
            self._name, self._model, ready = found.worker, found.model, not found.reasons
            words = "; ".join(found.reasons) or f"{len(found.seats)} of {found.num_seats} seats"
        self._how = {"here": here, "ready": ready, "words": words}

    @property
    def told(self) -> dict[str, Any]:
        """Who it is and how it was: as few words as fit beside those of the others."""
        return {"url": self._address.url, "name": self._name, "model": self._model} | self._how


def console_routes(urls: Sequence[str]) -> list[Route]:
    """The live page of the workers whose metrics ports are at `urls`."""
    threads = ThreadPoolExecutor(max_workers=len(urls), thread_name_prefix="fetch")
    workers = [RemoteWorker(url, threads) for url in urls]

    async def glance() -> list[dict[str, Any]]:
        await asyncio.wait([worker.look() for worker in workers], timeout=ANSWER_S)
        return [worker.told for worker in workers]

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
