"""`carousel topics`: what a deployment needs of Kafka before the first request."""

from typing import Annotated

import typer

from schemas.command_help import Command
from schemas.connection import KafkaConnection
from schemas.topics import DEFAULT_LANE_PREFIX, LANES
from service.cli.connection import with_connection
from service.cli.running import run
from service.topics import create_topics

app = typer.Typer(help="Create the topics of a deployment.", no_args_is_help=True)


@app.command(cls=Command)
@with_connection
def create(
    connection: KafkaConnection,
    partitions: Annotated[
        int, typer.Option(min=1, help="Partitions of each lane: the most workers that can share it.")
    ] = 12,
    replication_factor: Annotated[
        int | None, typer.Option(min=1, help="Copies of each topic.", show_default="the broker's default")
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(help="A lane to create, in place of the usual three; repeatable.", show_default=", ".join(LANES)),
    ] = None,
    lane_prefix: Annotated[
        str, typer.Option(help="Lanes are PREFIX + tier; a second model has lanes of its own.")
    ] = DEFAULT_LANE_PREFIX,
) -> None:
    """Create the lanes, the control topic, the dead-letter topic and the usage topic.

    What exists already is left as it is, so it can run as often as you like.

    Example: carousel topics create --bootstrap kafka-1:9092 --replication-factor 3
    """

    async def main() -> None:
        topics = await create_topics(
            connection,
            lanes=tier or LANES,
            partitions=partitions,
            replication_factor=replication_factor,
            lane_prefix=lane_prefix,
        )
        for name in topics.created:
            typer.echo(f"created {name}")
        for name in topics.existed:
            typer.echo(f"exists  {name}")

    run(main())
