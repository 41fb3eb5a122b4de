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

from worker.health import Health, PortUnavailable

log = structlog.get_logger(__name__)


@contextlib.contextmanager
def serving_health(health: Health, host: str, port: int, more: Sequence[BaseRoute] = ()) -> Iterator[int]:
    """Serves while the block runs; yields the port. Raises PortUnavailable.

    Args:
        port: 0 for any free one.
        more: further routes.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as e:
        reason = (e.strerror or str(e)).partition(" (while")[0].lower()
        words = f"--metrics-port {port} of {host} cannot be had: {reason}. Give another, or 0 for any"
        raise PortUnavailable(words) from e
    app = health_app(health, more)
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    app.state.stopping = lambda: server.should_exit  # uvicorn waits for open streams: they look at this
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
