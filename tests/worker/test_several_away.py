"""A console of workers some of which take connections and say nothing, or almost: the others do not feel it."""

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from schemas import snapshot
from schemas.snapshot import NoSnapshot, fetch_snapshot
from tests.worker.showing import Showing, Viewer
from tests.worker.test_live import get
from tests.worker.test_several_workers import console_of, url_of


@contextlib.contextmanager
def frozen() -> Iterator[str]:
    """Its address: it takes connections, as a stopped process does, and nothing more."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def dripping(head: bytes) -> Iterator[str]:
    """Its address: it sends `head`, and then a byte every tenth of a second."""
    over = threading.Event()

    def drip(server: socket.socket) -> None:
        with contextlib.suppress(OSError), server.accept()[0] as connection:
            connection.sendall(head)
            while not over.wait(0.1):
                connection.sendall(b"1")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=[server])
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        over.set()
        thread.join()


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nX-Slow: ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 503 Away\r\nContent-Length: 9999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
)
def test_a_fetch_has_a_limit_as_a_whole(head: bytes, monkeypatch: pytest.MonkeyPatch):
    """Wherever in its answer the worker begins to drip."""
    monkeypatch.setattr(snapshot, "FETCH_S", 0.5)
    with dripping(head) as url:
        began = time.monotonic()
        with pytest.raises(NoSnapshot, match=f"no worker answers at {url}: it took more than 0.5 s"):
            fetch_snapshot(url)
        assert time.monotonic() - began < 2.0


async def test_frozen_workers_slow_no_other():
    """Twelve are frozen: the page of the one that lives goes on, and all are told of at once."""
    async with Showing(seats=4, blocks=256).running() as show, contextlib.AsyncExitStack() as stack:
        urls = [stack.enter_context(frozen()) for _ in range(12)]
        port = stack.enter_context(console_of(url_of(show), *urls))
        show.serve(show.request("batch", max_tokens=1900))
        others = [await asyncio.to_thread(Viewer, port, number) for number in range(1, 13)]
        viewer = await asyncio.to_thread(Viewer, port)
        for _ in range(3):
            began = time.monotonic()
            told = json.loads(await asyncio.to_thread(get, port, "/workers"))
            assert time.monotonic() - began < 2.0
            assert [each["here"] for each in told] == [True] + 12 * [False]
        await asyncio.sleep(4)
        times = [at for at, _ in viewer.seen]
        assert len(times) >= 8
        assert max(later - sooner for sooner, later in itertools.pairwise(times)) < 2.5
        told = json.loads(await asyncio.to_thread(get, port, "/workers"))
        assert {each["words"].partition("http")[0] for each in told[1:]} == {"no worker answers at "}
    for each in (viewer, *others):
        await asyncio.to_thread(each.join)
