"""`carousel console`: the live page of a worker, from anywhere that reaches its metrics port."""

import importlib
from typing import Annotated

import typer

from schemas.errors import reason_of
from service.cli.top import WorkersOption, urls_of

MAX_PORT = 65535


def console(
    worker: WorkersOption = None,
    host: Annotated[str, typer.Option(help="Listen on this address. There is no log-in: keep it local.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=MAX_PORT, help="Listen on this port; 0: any.")] = 8090,
) -> None:
    """Serve the live page of a worker: its seats turning, lanes, KV blocks, steps, preemptions, latencies.

    The worker serves the same page at `/` of its --metrics-port. This one stays when the worker goes, and however many
    look at it, the worker has one reader. Of several workers the page shows one, which is chosen at its top.

    Examples: `carousel worker --model tiny --metrics-port 9100`, then `carousel console`, and open what it prints;
    `carousel console --worker http://10.0.0.7:9100 --worker http://10.0.0.8:9100`
    """
    try:
        module = importlib.import_module("worker.console")
    except ModuleNotFoundError as error:
        typer.echo(f"carousel: the page needs {error.name}: pip install '.[worker]' in Carousel's folder", err=True)
        raise typer.Exit(1) from None
    name = f"[{host}]" if ":" in host else host
    try:
        number = module.run_console(urls_of(worker), host, port, lambda bound: typer.echo(f"http://{name}:{bound}/"))
    except OSError as error:
        words = f"port {port} of {host} cannot be had: {reason_of(error)}. Give another --port or --host"
        typer.echo(f"carousel console: {words}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(128 + number)
