"""The live page and its server-sent events: one feed of snapshots for all who look on, in a worker or in a console."""

import asyncio
import base64
import contextlib
import hashlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from schemas.snapshot import PERIOD_S, NoSnapshot, Snapshot
from worker.health import Health
from worker.snapshots import Snapshots

MAX_VIEWERS = 32
SHARE = 0.008  # of a core, for snapshots and all who look on: the worker has better things to do
MAX_PERIOD_S = 1.0  # a page that is slower is no live page
TAKE_S = 1.0  # for a snapshot; a page that stops turning says why
SEND_S = 30.0  # for a viewer to take what it was sent, when all buffers are full
HEAD_S = 10.0  # something is sent at least so often, so that a viewer who left is noticed

log = structlog.get_logger(__name__)


class Feed:
    """Snapshots as JSON, at most one in PERIOD_S, whoever asks; fewer where they cost more than SHARE of a core.

    Belongs to one event loop.

    take: gets the next one and the CPU seconds that another thread spent on it, or raises NoSnapshot.
    """

    def __init__(self, take: Callable[[], Awaitable[tuple[bytes, float]]]) -> None:
        self._take = take
        self._lock = asyncio.Lock()
        self._latest = b""
        self._taken_at = float("-inf")
        self._cpu_at: float | None = None  # of the thread that asks, which encodes and sends
        self._period = PERIOD_S
        self._reason: str | None = None
        self.num_viewers = 0

    async def latest(self, max_age: float = 0.0) -> bytes:
        """The last one, not older than the period, or than `max_age` where that is longer. Raises NoSnapshot."""
        async with self._lock:
            if time.monotonic() - self._taken_at >= max(self._period, max_age):
                elsewhere = 0.0
                try:
                    (self._latest, elsewhere), self._reason = await self._take(), None
                except NoSnapshot as away:
                    self._reason = str(away)
                except Exception as error:  # whatever it is, it is told, and looked again: the page stays
                    log.warning("live.failed", error=repr(error))
                    self._reason = f"no snapshot could be had: {error!r}"
                self._taken_at = time.monotonic()
                self._pace(elsewhere)
            if self._reason is not None:
                raise NoSnapshot(self._reason)
            return self._latest

    def _pace(self, elsewhere: float) -> None:
        """`elsewhere`: CPU seconds of the last snapshot on another thread; on this one, all since the one before it."""
        cpu = time.thread_time()
        here = 0.0 if self._cpu_at is None else cpu - self._cpu_at
        spent, self._cpu_at = elsewhere + here, cpu
        self._period = min(MAX_PERIOD_S, max(PERIOD_S, spent / SHARE))


def worker_feed(snapshots: Snapshots, health: Health, loop: asyncio.AbstractEventLoop) -> Feed:
    """A feed for the thread that serves: snapshots are taken on `loop`, the worker's, and encoded here."""

    async def take_there() -> tuple[Snapshot | None, float]:
        began = time.thread_time()
        return snapshots.take(), time.thread_time() - began

    async def take() -> tuple[bytes, float]:
        if health.engine is None:
            raise NoSnapshot("; ".join(health.not_ready()))
        taking = asyncio.run_coroutine_threadsafe(take_there(), loop)
        try:
            snapshot, seconds = await asyncio.wait_for(asyncio.wrap_future(taking), TAKE_S)
        except TimeoutError:
            raise NoSnapshot("the worker's event loop is held up") from None
        assert snapshot is not None, "an engine does not go away"
        return snapshot.encode(), seconds

    return Feed(take)


def live_routes(*feeds: Feed, glance: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None) -> list[Route]:
    """`/` the page, `/events` the stream of snapshots, `/snapshot` one of them, `/workers` whose they are.

    feeds: of a worker each; `?worker=N` of both chooses, the first is 0. glance: how each is, where there are several.
    """
    html = Path(__file__).with_name("live.html").read_text()
    headers = {"Content-Security-Policy": _policy(html), "Cache-Control": "no-cache"}

    async def page(request: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    def chosen(request: Request) -> Feed:
        number = request.query_params.get("worker", "0")
        if number not in map(str, range(len(feeds))):
            raise HTTPException(404, f"there is no worker {number} here: they are 0 to {len(feeds) - 1}")
        return feeds[int(number)]

    async def snapshot(request: Request) -> Response:
        try:
            return Response(await chosen(request).latest(), media_type="application/json")
        except NoSnapshot as away:
            return PlainTextResponse(str(away), status_code=503)

    async def events(request: Request) -> Response:
        feed = chosen(request)
        if sum(each.num_viewers for each in feeds) >= MAX_VIEWERS:
            return PlainTextResponse(f"{MAX_VIEWERS} viewers look on already", status_code=503)
        return _ViewerResponse(feed, request.app.state.stopping)

    async def workers(request: Request) -> Response:
        return JSONResponse([] if glance is None else await glance(), headers={"Cache-Control": "no-store"})

    return [Route("/", page), Route("/snapshot", snapshot), Route("/events", events), Route("/workers", workers)]


class _ViewerResponse(StreamingResponse):
    """Has its place from now on, and ends when its viewer takes nothing for SEND_S: a place is for who looks on."""

    def __init__(self, feed: Feed, stopping: Callable[[], bool]) -> None:
        super().__init__(_events(feed, stopping), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._feed = feed
        feed.num_viewers += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._feed.num_viewers -= 1

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        async with contextlib.aclosing(self.body_iterator):  # type: ignore[type-var]  # a generator
            with contextlib.suppress(TimeoutError):
                await super().stream_response(send_in_time)


async def _events(feed: Feed, stopping: Callable[[], bool]) -> AsyncIterator[bytes]:
    """A snapshot as soon as there is another one; `away` with the reason while there is none."""
    sent, sent_at = b"", time.monotonic()
    yield b"retry: 1000\n\n"
    while not stopping():
        try:
            event = b"data: " + await feed.latest() + b"\n\n"
        except NoSnapshot as away:
            event = b"event: away\ndata: " + str(away).replace("\n", " ").encode() + b"\n\n"
        if event != sent or time.monotonic() - sent_at > HEAD_S:
            sent, sent_at = event, time.monotonic()
            yield event
        await asyncio.sleep(PERIOD_S)


def _policy(html: str) -> str:
    """Nothing but what the page brings with it, by its hashes, may run or be loaded."""
    hashes = {
        tag: base64.b64encode(hashlib.sha256(re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[0].encode()).digest())
        for tag in ("script", "style")
    }
    sources = "; ".join(f"{tag}-src 'sha256-{digest.decode()}'" for tag, digest in hashes.items())
    return f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; {sources}"
