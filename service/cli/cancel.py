"""`carousel cancel`: ends requests by their ids."""

from typing import Annotated

import typer

from schemas.connection import KafkaConnection
from schemas.topics import CANCEL_TTL_MS, DEFAULT_LANE_PREFIX, DEFAULT_REPLY_PREFIX
from service.cli.connection import with_connection
from service.cli.running import run
from service.cli.tables import printable
from service.control import cancel_requests, find_requests


@with_connection
def cancel(
    connection: KafkaConnection,
    ids: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Correlation ids, as `carousel status` shows them.")
    ],
    lane_prefix: Annotated[str, typer.Option(help="Lanes are PREFIX + tier.")] = DEFAULT_LANE_PREFIX,
    reply_prefix: Annotated[str, typer.Option(help="Reply topics are PREFIX + id.")] = DEFAULT_REPLY_PREFIX,
) -> None:
    """Cancel requests, wherever they are: waiting, running, swapped out, or not there yet.

    The worker that has a request ends it in its next step; its stream ends with `cancelled` and keeps the tokens so
    far. A cancel that comes before its request waits for it ten minutes. What has ended already stays as it is, and an
    id that nobody knows is no error: nobody can tell it from one that is still to come. What the request's reply log
    told before is printed with each id.

    Example: carousel cancel 3f2a9c51d0
    """
    for each in ids:
        if not each:
            raise typer.BadParameter("an id is empty")
        if each.startswith(reply_prefix):
            raise typer.BadParameter(f"{each} is a reply topic; its request's id is {each.removeprefix(reply_prefix)}")

    async def main() -> None:
        found = await find_requests(connection, ids, reply_prefix=reply_prefix)  # before: the cancel changes it
        await cancel_requests(connection, ids, lane_prefix=lane_prefix)
        for each, words in zip(ids, found, strict=True):
            typer.echo(f"cancel published: {each} (kept {CANCEL_TTL_MS // 60_000} min); {printable(words)}")

    run(main())
