"""`carousel broker`: the embedded broker, for as long as the command runs."""

import asyncio
import contextlib
from typing import Annotated

import typer

from service.broker import LIMITS, EmbeddedBroker
from service.cli.running import run
from service.errors import AddressTaken, BrokerFailed

_USUAL = "127.0.0.1:9092"


def broker(
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Bind exactly this address; port 0 is any free one.",
            show_default=f"{_USUAL} if it is free, else any free port of 127.0.0.1",
        ),
    ] = None,
) -> None:
    """Run a Kafka broker on this machine, for first steps and tests.

    Prints 'ready HOST:PORT' when it serves, and stops on SIGTERM or Ctrl-C. It is Tansu, in memory: for anything that
    matters, point --bootstrap of the other commands at Apache Kafka.

    Then, in another terminal: carousel topics create && carousel worker --model tiny
    """
    run(_serve(listen))


async def _serve(listen: str | None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        try:
            running = await stack.enter_async_context(EmbeddedBroker(listen or _USUAL))
        except AddressTaken:
            if listen is not None:
                raise
            running = await stack.enter_async_context(EmbeddedBroker())
        typer.echo("carousel broker: " + "; ".join(LIMITS), err=True)
        print(f"ready {running.bootstrap}", flush=True)
        with contextlib.suppress(asyncio.CancelledError):  # a signal is how it is meant to end
            raise BrokerFailed(f"the broker has ended by itself, with status {await running.ended()}")
