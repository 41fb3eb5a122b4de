"""`carousel console`: the live page of a worker from a small server of its own, which stays when the worker goes."""

import asyncio
import http.client
import socket
import urllib.error
import urllib.request
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from worker.live import Away, Feed, live_routes

TIMEOUT_S = 3.0
MAX_BYTES = 16 * 2**20


def remote_feed(url: str) -> Feed:
    """The snapshots of the worker whose metrics port is at `url`."""

    def fetch() -> bytes:
        try:
            with urllib.request.urlopen(f"{url}/snapshot", timeout=TIMEOUT_S) as response:  # noqa: S310 http(s) only
                return bytes(response.read(MAX_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                words = error.read(1000).decode(errors="replace")
            raise Away(words if error.code == 503 else f"{url} is no worker's metrics port: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            raise Away(f"no worker answers at {url}: {error}") from None

    return Feed(lambda: asyncio.to_thread(fetch))


def run_console(url: str, host: str, port: int, on_bound: Callable[[int], None]) -> None:
    """Serves the live page of the worker at `url` until a signal. Raises OSError when the port cannot be had.

    on_bound: told of the port that was bound.
    """
    app = Starlette(routes=live_routes(remote_feed(url)))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none"))
    app.state.stopping = lambda: server.should_exit
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        on_bound(listener.getsockname()[1])
        server.run([listener])
