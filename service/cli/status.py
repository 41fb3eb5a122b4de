"""`carousel status`: what the service is doing right now."""

import json
from typing import Annotated

import typer
from rich.text import Text

from schemas.connection import KafkaConnection
from schemas.topics import DEFAULT_GROUP_PREFIX, DEFAULT_LANE_PREFIX, DEFAULT_REPLY_PREFIX
from service.cli.connection import with_connection
from service.cli.running import run
from service.cli.tables import console, duration, printable, table
from service.lane_status import ServiceStatus, read_status


@with_connection
def status(
    connection: KafkaConnection,
    requests: Annotated[int, typer.Option(min=0, help="How many of the oldest open requests to show.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    lane_prefix: Annotated[str, typer.Option(help="Lanes are PREFIX + tier.")] = DEFAULT_LANE_PREFIX,
    group_prefix: Annotated[str, typer.Option(help="A lane's group is PREFIX + its topic.")] = DEFAULT_GROUP_PREFIX,
    reply_prefix: Annotated[str, typer.Option(help="Reply topics are PREFIX + id.")] = DEFAULT_REPLY_PREFIX,
) -> None:
    """Show lanes, workers and the oldest open requests.

    Everything is read from Kafka, so it works from anywhere and asks no worker. *Lag* is what is not done: records
    that wait in Kafka and those that a worker has. A request is `waiting` until a worker has begun it, then `running`.

    **What to look for**: a lag that grows and no worker: start one. A lag that grows with workers: `carousel simulate`
    says how many it takes. An oldest age above the tier's deadline: nobody waits for that answer any more.

    Examples: `carousel status`, `carousel status --json | jq '.lanes[] | {lane, lag, oldest_age_s}'`
    """

    async def main() -> None:
        found = await read_status(
            connection,
            lane_prefix=lane_prefix,
            group_prefix=group_prefix,
            reply_prefix=reply_prefix,
            max_requests=requests,
        )
        if as_json:
            typer.echo(json.dumps(found.to_fields(), indent=1))
        else:
            _print(found)

    run(main())


def _print(found: ServiceStatus) -> None:
    out = console()
    lanes = table("lane", "partitions", "lag", "oldest", "workers", right=("partitions", "lag", "oldest", "workers"))
    for lane in found.lanes:
        idle = lane.lag and not lane.num_workers
        lanes.add_row(
            lane.lane,
            str(lane.num_partitions),
            str(lane.lag),
            duration(lane.oldest_age_s),
            Text(str(lane.num_workers), "red" if idle else ""),
        )
    out.print(lanes)
    out.print()
    if found.workers:
        workers = table("worker", "host", "partitions")
        for worker in found.workers:
            owned = (f"{lane}: {_listed(numbers)}" for lane, numbers in worker.partitions.items())
            workers.add_row(printable(worker.worker), worker.host, Text("; ".join(owned)))
        out.print(workers)
    else:
        out.print("no workers; `carousel worker --model tiny` starts one")
    if found.requests:
        out.print()
        requests = table(
            "request", "lane", "record", "age", "tenant", "state", "tokens", "worker", right=("age", "tokens")
        )
        for each in found.requests:
            requests.add_row(
                printable(each.correlation_id),
                each.lane,
                f"{each.partition}:{each.offset}",
                duration(each.age_s),
                printable(each.tenant),
                each.state.value,
                str(each.num_tokens),
                printable(each.worker or "-"),
            )
        out.print(requests)


def _listed(numbers: list[int] | None) -> str:
    return "?" if numbers is None else ",".join(map(str, numbers)) or "none"
