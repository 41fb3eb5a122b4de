"""`carousel dlq`: the records that no worker could serve."""

import json
import time
from typing import Annotated, Any

import typer

from schemas.command_help import Command
from schemas.connection import KafkaConnection
from schemas.dead_letters import DEAD_LETTER_HEADERS
from schemas.topics import DEFAULT_LANE_PREFIX
from service.cli.connection import with_connection
from service.cli.running import run
from service.cli.tables import console, printable, table
from service.dead_letters import MAX_LETTERS, Position, list_dead_letters, read_dead_letters, redrive

_LanePrefix = Annotated[str, typer.Option(help="The dead-letter topic is PREFIX + dlq.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
_Reason = Annotated[str | None, typer.Option(help="Only those with this reason.")]
_POSITION_HELP = "PARTITION:OFFSET as `carousel dlq list` shows it."

app = typer.Typer(
    help="Look at dead letters, and send them back to their lanes.\n\n"
    "A record lands here when no attempt can serve it: it cannot be decoded, names no usable reply topic, or attempt "
    "after attempt ends without a token.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command("list", cls=Command)
@with_connection
def list_(
    connection: KafkaConnection,
    limit: Annotated[int, typer.Option(min=1, max=MAX_LETTERS, help="The newest so many.")] = 50,
    reason: _Reason = None,
    as_json: _AsJson = False,
    lane_prefix: _LanePrefix = DEFAULT_LANE_PREFIX,
) -> None:
    """List the newest dead letters, newest last.

    Shows where each came from and why it is here; never what is in it. `carousel dlq show` does.

    Examples: `carousel dlq list`, `carousel dlq list --reason reply_to_missing --json`
    """

    async def main() -> None:
        letters = await list_dead_letters(connection, lane_prefix=lane_prefix, limit=limit, reason=reason)
        if as_json:
            typer.echo(json.dumps([letter.to_fields() for letter in letters], indent=1))
            return
        if not letters:
            typer.echo(_none(reason))
            return
        out = console()
        rows = table("position", "time (UTC)", "reason", "from", "request", "message")
        for letter in letters:
            fields = letter.to_fields()
            words = (fields["reason"], letter.source, letter.correlation_id, fields["message"])
            rows.add_row(str(letter.position), _time(letter.at_ms), *map(printable, words))
        out.print(rows)

    run(main())


@app.command(cls=Command)
@with_connection
def show(
    connection: KafkaConnection,
    position: Annotated[str, typer.Argument(help=_POSITION_HELP)],
    as_json: _AsJson = False,
    lane_prefix: _LanePrefix = DEFAULT_LANE_PREFIX,
) -> None:
    """Show one dead letter in full: headers, key and value. The value may hold somebody's prompt.

    Example: carousel dlq show 0:17
    """
    asked = _position(position)

    async def main() -> None:
        (letter,) = await read_dead_letters(connection, [asked], lane_prefix=lane_prefix)
        body, raw = letter.body(), None if letter.value is None else printable(letter.value).plain
        fields = letter.to_fields() | {
            "headers": [[name, _readable(name, value)] for name, value in letter.headers],
            "key": None if letter.key is None else printable(letter.key).plain,
            "value": raw if body is None else body,
        }
        if as_json:
            typer.echo(json.dumps(fields, indent=1, default=repr))
            return
        for name in ("reason", "message", "source"):
            typer.echo(f"{name}: {printable(fields[name])}")
        typer.echo("key: " + json.dumps(fields["key"], ensure_ascii=False))  # null is not ""
        typer.echo("headers:")
        for name, value in fields["headers"]:
            typer.echo(f"  {printable(name)}: {value}")
        # JSON escapes control characters below U+0020 only; line by line, as its own line ends stay.
        for line in ("value: " + json.dumps(fields["value"], indent=1, ensure_ascii=False, default=repr)).split("\n"):
            typer.echo(printable(line))

    run(main())


@app.command("redrive", cls=Command)
@with_connection
def redrive_(
    connection: KafkaConnection,
    positions: Annotated[list[str] | None, typer.Argument(metavar="[POSITION]...", help=_POSITION_HELP)] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them; with --reason, those with that reason.")] = False,
    reason: _Reason = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --all: do it. Without, only say what would be done.")
    ] = False,
    lane_prefix: _LanePrefix = DEFAULT_LANE_PREFIX,
) -> None:
    """Send dead letters back to the lanes that they came from, as they were.

    For records that can be served now: the fault was the worker's and is mended, or the reply topic exists by now. A
    caller who has been told of the error stays told: the answer has ended, and a second attempt finds that. The dead
    letter stays where it is, since Kafka's records do; redriving it twice publishes it twice. What did not fit on the
    dead-letter topic as it was, or could not even be read, is refused, and nothing is published; with --all it is
    skipped, the others are redriven, and the exit status is 1.

    Examples: `carousel dlq redrive 0:17 0:18`, `carousel dlq redrive --all --reason internal --yes`
    """
    if every == bool(positions):
        raise typer.BadParameter("give positions, or --all")
    if reason is not None and not every:
        raise typer.BadParameter("--reason needs --all")
    asked = list(dict.fromkeys(_position(each) for each in positions or ()))  # named twice, it is redriven once

    async def main() -> None:
        if every:
            letters = await list_dead_letters(connection, lane_prefix=lane_prefix, limit=MAX_LETTERS, reason=reason)
        else:
            letters = await read_dead_letters(connection, asked, lane_prefix=lane_prefix)
        if not letters:
            typer.echo(_none(reason))
            return
        skipped = await redrive(connection, letters, lane_prefix=lane_prefix, dry=every and not yes, skip=every)
        for letter in letters:
            if letter.position in skipped:
                typer.echo(f"skipped: {skipped[letter.position]}", err=True)
                continue
            verb = "redriven" if not every or yes else "would redrive"
            typer.echo(f"{verb} {letter.position} to {printable(letter.text('kafka_dlt-original-topic'))}")
        if every:
            typer.echo(_summary(len(letters) - len(skipped), len(skipped), yes))
        if skipped:
            raise typer.Exit(1)

    run(main())


def _none(reason: str | None) -> str:
    return "no dead letters" + (f" with reason {printable(reason)}" if reason is not None else "")


def _summary(num_redriven: int, num_skipped: int, done: bool) -> str:
    """The last line of `redrive --all`."""
    counts = f"{num_redriven} dead letters" + (" redriven" if done else "")
    if num_skipped:
        counts += f", {num_skipped} skipped"
    return counts if done or not num_redriven else f"{counts}; --yes redrives them"


def _position(text: str) -> Position:
    try:
        return Position.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _readable(name: str, value: bytes | None) -> Any:
    """A header's value as text; the integers that Spring writes as such."""
    if value is None:
        return None
    if name in DEAD_LETTER_HEADERS and name.rpartition("-")[2] in ("partition", "offset", "timestamp"):
        return int.from_bytes(value, signed=True)
    return printable(value).plain


def _time(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at_ms / 1000))
