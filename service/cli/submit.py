"""`carousel submit`: one request from the command line, streamed as it comes."""

import asyncio
import json
import sys
import time
from typing import Annotated, Any

import typer

from schemas.connection import KafkaConnection
from schemas.reachability import whats_wrong
from schemas.reasons import FinishReason
from schemas.records import Begin, End, ReplyRecord, Tokens, event_of
from schemas.topics import DEFAULT_LANE_PREFIX, DEFAULT_REPLY_PREFIX
from service.cli.connection import with_connection
from service.cli.running import run
from service.client import Client
from service.errors import RequestFailed
from service.stream import ReplyStream

_SAMPLING = "Sampling"
_PATIENCE_S = 5.0  # a worker begins a request as soon as it takes it in, whatever its load
_SILENCE_S = 10.0  # without an event; then Kafka is asked whether it is there


@with_connection
def submit(
    connection: KafkaConnection,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    tier: Annotated[str, typer.Option(help="The lane: interactive, standard, batch, or one of your own.")] = "standard",
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message, put into the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system's message.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line per event.")] = False,
    tenant: Annotated[str | None, typer.Option(help="Who pays.")] = None,
    priority: Annotated[int | None, typer.Option(help="0 to 9 inside the lane; larger is more urgent.")] = None,
    deadline: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="SECONDS", help="After it the answer is worthless, and generation stops."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, metavar="SECONDS", help="Give up when nothing comes for so long.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="At most so many.", show_default="the tier's, 256", rich_help_panel=_SAMPLING)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.", show_default="1.0", rich_help_panel=_SAMPLING)
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.", rich_help_panel=_SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(help="Only the k likeliest.", rich_help_panel=_SAMPLING)] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Only what has this share of the likeliest.", rich_help_panel=_SAMPLING)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same answer.", show_default="drawn", rich_help_panel=_SAMPLING)
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; repeatable.", rich_help_panel=_SAMPLING)
    ] = None,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Send an empty prompt: the model begins from nothing.")
    ] = False,
    lane_prefix: Annotated[str, typer.Option(help="Lanes are PREFIX + tier.")] = DEFAULT_LANE_PREFIX,
    reply_prefix: Annotated[str, typer.Option(help="Reply topics are PREFIX + id.")] = DEFAULT_REPLY_PREFIX,
) -> None:
    """Send a prompt and stream the answer.

    Ctrl-C cancels the request. The exit status is 1 after an error, a cancel from elsewhere, or a missed deadline.

    Example: carousel submit "Why is the sky blue?" --chat --tier interactive --temperature 0 --max-tokens 64
    """
    text = _standard_input() if prompt == "-" else prompt
    if not text.strip() and not allow_empty:
        raise typer.BadParameter(
            "it is empty, and the answer would be about nothing; --allow-empty sends it all the same"
        )
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    roles = [("system", system), ("user", text)]
    messages = [{"role": role, "content": content} for role, content in roles if content is not None]
    source: dict[str, Any] = {"messages": messages} if chat else {"prompt": text}
    optional = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or None,
    }
    fields = source | {name: value for name, value in optional.items() if value is not None}
    routing = {"tier": tier, "tenant": tenant, "priority": priority, "deadline": deadline, "timeout": timeout}
    client = Client(connection=connection, lane_prefix=lane_prefix, reply_prefix=reply_prefix, reply_topics=1)
    run(_stream(client, connection, fields | routing, as_json=as_json))


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8: {error.reason} at byte {error.start}") from None


async def _stream(client: Client, connection: KafkaConnection, request: dict[str, Any], *, as_json: bool) -> None:
    async with client:
        stream = client.stream(**request)
        try:
            async with stream:
                await _print(stream, _Silence(connection, request["tier"]), as_json=as_json)
        except asyncio.CancelledError:
            if stream.end is None:
                typer.echo(f"\n[{_what_ends(stream)}]", err=True)
            raise
        if stream.end is not None and (error := stream.end.error) is not None:
            raise RequestFailed(error.code, error.message, error.retry_after_ms)
        if stream.end is not None and (reason := _cut_short(stream.end)) is not None:
            typer.echo(f"[the answer is not whole: {reason}]", err=True)
            raise typer.Exit(1)


def _cut_short(end: End) -> FinishReason | None:
    reasons = [end.finish_reason] if isinstance(end.finish_reason, FinishReason) else end.finish_reason
    return next((r for r in reasons if r in (FinishReason.CANCELLED, FinishReason.DEADLINE)), None)


async def _print(stream: ReplyStream, silence: "_Silence", *, as_json: bool) -> None:
    explaining = asyncio.create_task(silence.explain())
    try:
        async for event in stream:
            silence.ends()
            if as_json:
                typer.echo(json.dumps({"event": event_of(event), **event.to_fields()}, ensure_ascii=False))
            else:
                _show(event)
    finally:
        explaining.cancel()
    if not as_json and stream.end is not None and not stream.text:
        typer.echo(f"(no text: finish_reason {stream.end.finish_reason})", err=True)


class _Silence:
    """Says why nothing comes, as far as can be known: a stream waits for as long as it takes."""

    def __init__(self, connection: KafkaConnection, tier: str) -> None:
        self._connection = connection
        self._tier = tier
        self._begun = False
        self._since = time.monotonic()
        self._kafka_is_away = False  # and that has been said

    def ends(self) -> None:
        """An event has come."""
        self._begun, self._since, self._kafka_is_away = True, time.monotonic(), False

    async def explain(self) -> None:
        await asyncio.sleep(_PATIENCE_S)
        if not self._begun:
            typer.echo(
                f"[published {_PATIENCE_S:g} s ago, and no worker has begun it yet: is one running for the lane "
                f"{self._tier}? (`carousel status`) May replies go to this --reply-prefix (`carousel dlq list`)? "
                "Ctrl-C cancels the request]",
                err=True,
            )
        while True:
            await asyncio.sleep(_SILENCE_S)
            if time.monotonic() - self._since < _SILENCE_S:
                continue
            since, cause = self._since, await whats_wrong(self._connection)
            if since == self._since and (cause is not None) is not self._kafka_is_away:
                self._kafka_is_away = cause is not None
                at = f"Kafka at {self._connection.bootstrap}"
                away = f"[{at}: {cause}. The answer goes on when it is back; Ctrl-C gives up]"
                typer.echo(f"[{at} answers again]" if cause is None else away, err=True)


def _what_ends(stream: ReplyStream) -> str:
    """A failure to publish the cancel, while the client closes, is a warning of its own after this."""
    if stream.correlation_id is None:
        return "stopped before the request was published"
    return f"cancelling the request {stream.correlation_id}"


def _show(event: ReplyRecord) -> None:
    match event:
        case Begin(restart=True):
            typer.echo("\n[the answer starts over]", err=True)
        case Tokens(choice=0):
            typer.echo(event.text, nl=False)
        case End():
            typer.echo(event.tail.get(0, ""))
