"""The command `carousel`. Every command's help is meant to be read: it says what to do next."""

import importlib
import importlib.metadata
import sys
from typing import Annotated

import typer

from schemas.command_help import Command
from service.cli import dlq, topics
from service.cli.broker import broker
from service.cli.cancel import cancel
from service.cli.console import console
from service.cli.demo import demo
from service.cli.reap import reap
from service.cli.simulate import simulate
from service.cli.status import status
from service.cli.submit import submit
from service.cli.top import top

app = typer.Typer(
    name="carousel",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog="The address of Kafka is --bootstrap of each command, or CAROUSEL_BOOTSTRAP.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"carousel {importlib.metadata.version('carousel')}")
        raise typer.Exit


@app.callback()
def carousel(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve language models from Kafka: prompts go in on lanes, tokens stream back on reply topics.

    See it work: `carousel demo`

    Or step by step, each in its own terminal:

    1. `carousel broker`, or any Kafka
    2. `carousel topics create && carousel worker --model tiny`
    3. `carousel submit "Once upon a time" --tier interactive`
    """


app.command(cls=Command)(demo)
app.command(cls=Command)(broker)
app.add_typer(topics.app, name="topics")


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="Serve a model: consume prompts from the lanes, stream the tokens back.",
)
def worker(context: typer.Context) -> None:
    """Hands everything, --help too, to the worker's own command: importing it needs torch."""
    try:
        module = importlib.import_module("worker.cli")
    except ModuleNotFoundError as error:
        typer.echo(f"carousel: the worker needs {error.name}: pip install '.[worker]' in Carousel's folder", err=True)
        raise typer.Exit(1) from None
    typer.main.get_command(module.command).main(args=context.args, prog_name="carousel worker")


app.command(cls=Command)(submit)
app.command(cls=Command)(cancel)
app.command(cls=Command)(status)
app.command(cls=Command)(top)
app.command(cls=Command)(console)
app.add_typer(dlq.app, name="dlq")
app.command(cls=Command)(reap)
app.command(cls=Command)(simulate)


def main() -> None:
    for word in sys.argv[1:]:
        if any("\ud800" <= character <= "\udfff" for character in word):  # how Python keeps bytes that it cannot read
            typer.echo(f"carousel: this argument is not UTF-8: {word!a}", err=True)
            raise SystemExit(2)
    app()
