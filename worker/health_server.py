"""/livez, /readyz and more over HTTP, from a thread of its own: it answers also when the event loop does not."""

import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from schemas.errors import reason_of
from worker.health import Health, PortUnavailable

LEAVE_S = 3  # for open streams to end; one whose viewer takes nothing would not
SEND_BYTES = 1 << 16

log = structlog.get_logger(__name__)


@contextlib.contextmanager
def serving_health(health: Health, host: str, port: int, more: Sequence[BaseRoute] = ()) -> Iterator[int]:
    """Serves while the block runs; yields the port. Raises PortUnavailable.

    Args:
        port: 0 for any free one.
        more: further routes.
    """
    try:
        listener = listening(host, port)
    except OSError as e:
        words = f"--metrics-port {port} of {host} cannot be had: {reason_of(e)}. Give another, or 0 for any"
        raise PortUnavailable(words) from e
    server = new_server(health_app(health, more))
    thread = threading.Thread(target=server.run, args=([listener],), name="health", daemon=True)
    thread.start()
    bound: int = listener.getsockname()[1]
    log.info("health.serving", host=host, port=bound)
    try:
        yield bound
    finally:
        server.should_exit = True
        thread.join(timeout=5)
        listener.close()


def listening(host: str, port: int) -> socket.socket:
    """A socket whose connections buffer SEND_BYTES. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    # Linux hands it on to what is accepted. It would take megabytes for a viewer who reads nothing.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    return listener


def new_server(app: Starlette) -> uvicorn.Server:
    """A server for `app`, whose `state.stopping` tells open streams that they are to end."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=LEAVE_S
    )
    server = uvicorn.Server(config)
    app.state.stopping = lambda: server.should_exit  # uvicorn waits for them
    return server


def health_app(health: Health, more: Sequence[BaseRoute] = ()) -> Starlette:
    """200 when all is well, else 503 with the reasons."""
    return Starlette(
        routes=[
            Route("/livez", _endpoint(health, health.stuck)),
            Route("/readyz", _endpoint(health, health.not_ready)),
            *more,
        ]
    )


def page(path: str, render: Callable[[str], tuple[bytes, str]]) -> Route:
    """A route to a page. `render`: its content and content type for an `Accept` header."""

    async def answer(request: Request) -> Response:
        content, content_type = render(request.headers.get("accept", ""))
        return Response(content, media_type=content_type)

    return Route(path, answer)


def _endpoint(health: Health, reasons: Callable[[], list[str]]) -> Callable[[Request], Awaitable[JSONResponse]]:
    async def answer(request: Request) -> JSONResponse:
        wrong = reasons()
        body = {"status": "failing" if wrong else "ok", "reasons": wrong, **health.figures()}
        return JSONResponse(body, status_code=503 if wrong else 200)

    return answer
