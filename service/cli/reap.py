"""`carousel reap`: deletes the reply topics that callers have left behind."""

import json
import re
from typing import Annotated

import typer

from schemas.connection import KafkaConnection
from schemas.topics import DEFAULT_LANE_PREFIX, DEFAULT_REPLY_PREFIX
from service.cli.connection import with_connection
from service.cli.running import run
from service.cli.tables import duration
from service.reaping import delete_topics, find_reapable

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHOWN = 20


@with_connection
def reap(
    connection: KafkaConnection,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="How long ago the request must have ended: 90s, 30m, 2h, 1d.")
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete. Without it the command only says what it would do.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    lane_prefix: Annotated[str, typer.Option(help="Lanes are PREFIX + tier; never deleted.")] = DEFAULT_LANE_PREFIX,
    reply_prefix: Annotated[str, typer.Option(help="Reply topics are PREFIX + id.")] = DEFAULT_REPLY_PREFIX,
) -> None:
    """Delete reply topics whose request has ended and whose caller has gone.

    A caller deletes its own reply topics. One that was killed leaves them behind, and topics without end make a
    cluster slow. This finds them: under the reply prefix, one partition, nothing in it but one request's records, which
    has ended, the last record older than --older-than. Everything else stays: requests that have not ended, topics that
    many requests share, topics that nobody has written to (clients keep some ready).

    Choose an age that no caller needs to come back after. Workers can do it by themselves: `carousel worker
    --reap-after 7200`.

    Examples: `carousel reap --older-than 2h` to look, `carousel reap --older-than 2h --yes` to delete
    """
    age = _seconds(older_than)

    async def main() -> None:
        found = await find_reapable(connection, reply_prefix=reply_prefix, lane_prefix=lane_prefix, older_than=age)
        if yes:
            await delete_topics(connection, list(found.ended))
        if as_json:
            kept = {why.name.lower(): number for why, number in found.kept.items()}
            typer.echo(json.dumps({"deleted": yes, "ended": found.ended, "kept": kept}))
            return
        for topic, since in list(found.ended.items())[:_SHOWN]:
            typer.echo(f"{'deleted' if yes else 'would delete'} {topic} (ended {duration(since)} ago)")
        if len(found.ended) > _SHOWN:
            typer.echo(f"... and {len(found.ended) - _SHOWN} more")
        for why, number in found.kept.items():
            typer.echo(f"kept {number}: {why}")
        if not found.ended:
            typer.echo(f"nothing under {reply_prefix} ended more than {duration(age)} ago")
        elif not yes:
            typer.echo(f"{len(found.ended)} topics; --yes deletes them")

    run(main())


def _seconds(age: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", age)
    if match is None:
        raise typer.BadParameter(
            f"{age!r} is no age: a number and s, m, h or d, for example 2h", param_hint="--older-than"
        )
    return float(match[1]) * _UNITS[match[2]]
