"""Workers that come and go while requests wait for their seats."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from schemas.headers import ReplyAddress
from schemas.records import Left, LogRecord
from schemas.reply_log import ReplyLog
from tests.worker.world import World, until
from worker.server import RequestServer


def no_seats(server: RequestServer) -> None:
    """Nobody gets a seat: all wait for one."""
    scheduler = server.engine.scheduler
    scheduler.schedule = lambda now: (None, scheduler._expire(now))


async def until_begun(server: RequestServer) -> None:
    """Until all that was delivered waits for a seat, with an attempt that counts."""
    await until(lambda: server.calls and all(call.events is not None and call.attempt.number is not None
                                             for call in server.calls))  # fmt: skip


@contextlib.asynccontextmanager
async def waiting(world: World, name: str = "w1") -> AsyncIterator[RequestServer]:
    """A worker that has taken in what is open, and of which all waits for its seat."""
    async with world.worker(name) as server:
        no_seats(server)
        world.deliver(server)
        await until_begun(server)
        yield server


async def hand_over(world: World, how: str, name: str = "w") -> None:
    """A worker takes in what is open, all of it waits for a seat, and then goes elsewhere: the worker `drains`, and its
    time is over at once, the partition `moves`, or the worker is `killed`."""
    async with waiting(world, name) as server:
        if how == "drains":
            await server.drain(0)
        if how == "moves":
            world.source.lose()
            server.drop_lost("standard")
            await until(lambda: not server.num_calls)
    if how != "moves":
        world.source.lose()


async def serve(world: World) -> None:
    async with world.worker("last") as server:
        await world.serve(server)


class Sends:
    """What goes through the world's sink from now on: events in order, reads counted. `left` records wait for `go_on`,
    once they are to be `held`."""

    def __init__(self, world: World) -> None:
        self.events: list[str] = []
        self.num_reads = 0
        self.held = False
        self.go_on = asyncio.Event()
        self._send, self._read = world.sink.send, world.sink.read
        world.sink.send, world.sink.read = self.send, self.read

    async def send(self, address: ReplyAddress, record: LogRecord, trace: str | None = None) -> int | None:
        if self.held and isinstance(record, Left):
            await self.go_on.wait()
        offset = await self._send(address, record, trace)
        self.events.append(type(record).__name__)
        return offset

    async def read(self, address: ReplyAddress, start: int, until: int | None) -> ReplyLog:
        self.num_reads += 1
        return await self._read(address, start, until)
