"""Says in a request's reply log that an attempt was given up by a worker that lives: `left`, an event that readers pass
over as they do all that they do not know (protocol.md 3).

A `begin` with nothing behind it looks as if its worker had died of the request (worker/suspects.py). A request that
waits for its seat while workers are restarted gets one at each hand-over, although nothing is wrong with it.
"""

import asyncio
from collections.abc import Callable

import structlog

from schemas.headers import ReplyAddress
from schemas.records import Left
from worker.call import Call
from worker.transport.protocols import ReplySink, ReplyTopicGone, ReplyUnauthorised

LEFT_S = 1.0  # that a drain waits for `left` records at most; it takes up to a tenth of its time off for that
HANGS_S = 5.0  # a step that has lasted as long when its worker goes is taken for one that hangs: nothing is left

log = structlog.get_logger(__name__)


class Leaving:
    """Writes `left` records. Nobody has to wait for them: one that is not written counts as a death, and is no loss.

    `written`: told the address of each, on its way no longer.
    """

    def __init__(self, sink: ReplySink, written: Callable[[ReplyAddress], None]) -> None:
        self._sink = sink
        self._written = written
        # In no group: who ends at once waits for none of them.
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def leave(self, call: Call) -> asyncio.Task[None] | None:
        """Gives the attempt at a request up, for good. Returns the task that writes it down; None: there is nothing to
        write. Whatever happens, this raises nothing."""
        attempt = call.attempt
        if self._is_closed or attempt is None or not (call.stream and attempt.may_leave):
            return None
        assert attempt.number is not None
        attempt.leaves()
        address = call.address
        task = asyncio.create_task(self._write(address, Left(attempt.number)), name=f"leave {call.delivery.source}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._written(address))
        return task

    async def close(self, timeout: float) -> None:
        """Waits for what is on its way, at most so many seconds; no more is written then. What was handed to the
        producer by then lands all the same."""
        try:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=timeout)
        finally:
            self._is_closed = True
            for task in self._tasks:
                task.cancel()

    async def _write(self, address: ReplyAddress, record: Left) -> None:
        try:
            # As before a `begin`: the caller may have gone long ago, and its topic must not come back.
            if await self._sink.locate(address) is not None:
                await self._sink.send(address, record)
        except (ReplyTopicGone, ReplyUnauthorised):
            pass  # then there is no log in which it would count
        except Exception:
            log.exception("request.not_left")
