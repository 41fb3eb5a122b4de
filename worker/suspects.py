"""Requests of which attempt after attempt ends without a token: perhaps their workers die of them.

Nothing tells why a worker died, but a reply log tells how many attempts in a row left nothing but their `begin`. What a
dead worker leaves is resumed all at once, and if one of these requests kills the next worker in its first step, none of
the others has a token by then: by their logs they look like the one. So what has failed a few times takes turns. One of
them at a time is with the engine before its first token, and who waits for its turn has not begun, so that another
death counts against the one that had it.
"""

import asyncio
from collections.abc import Callable

import structlog

from schemas.reply_log import ReplyLog
from worker.call import Call

TURNS_FROM = 3  # fruitless attempts: a kill or two are an operator's doing, and nobody should wait because of them
TURN_S = 10.0  # who has no token by then may wait for a seat: the next has its turn, too
SETTLE_S = 0.5  # what is resumed together comes within that, and the least suspicious goes first; a worker that dies
# later than that has been `ready`, so that its supervisor sees no crash loop and starts it again
POLL_S = 0.05

log = structlog.get_logger(__name__)


class Suspects:
    """Decides on the event loop. `max_fruitless`: attempts in a row that may end without a token; 0: any number."""

    def __init__(self, max_fruitless: int) -> None:
        self._max_fruitless = max_fruitless
        self._turns_from = min(TURNS_FROM, max(1, max_fruitless // 2))
        self._waiting: dict[Call, int] = {}  # their fruitless attempts; in the order in which they came
        self._holder: Call | None = None
        self._held_until = 0.0  # event loop time

    @property
    def counts(self) -> bool:
        return self._max_fruitless > 0

    def may_include(self, call: Call) -> bool:
        """Whether it may be what an earlier owner died of: then it must not be computed before its `begin` counts."""
        told = self.counts and call.address.per_request and call.stream
        return told and call.refusal is None and call.events is None and call.inherited

    def fault(self, seen: ReplyLog) -> str | None:
        """Why there must be no further attempt; None: there may be. `seen`: with our own `begin` as the last."""
        number = len(seen.fruitless) - 1
        if not self.counts or number < self._max_fruitless:
            return None
        return (
            f"{number} attempts in a row ended without a token: each time the worker was gone without a word. It is "
            "not tried again, since it may be what the workers die of"
        )

    def takes_turns(self, number: int) -> bool:
        """Whether a request waits for its turn after so many fruitless attempts."""
        return self.counts and self._turns_from <= number < self._max_fruitless

    async def turn(self, call: Call, seen: ReplyLog, is_over: Callable[[], bool]) -> bool:
        """Returns when the request may be begun, and whether it had to wait for that. `leave` must follow.

        Args:
            seen: its log before our `begin`.
            is_over: it will not be computed, whatever comes; then it waits for nobody.
        """
        number = len(seen.fruitless)
        if not self.takes_turns(number) or self._holder is call:
            return False
        log.warning("request.suspect", fruitless_attempts=number, bound=self._max_fruitless)
        loop = asyncio.get_running_loop()
        self._waiting[call], settled = number, loop.time() + SETTLE_S
        try:
            while not is_over():
                now = loop.time()
                if now >= settled and self._is_next(call, now):
                    self._holder, self._held_until = call, now + TURN_S
                    break
                await asyncio.sleep(POLL_S)
        finally:
            del self._waiting[call]
        return True

    def leave(self, call: Call) -> None:
        """It has a token, or is over here. Again, or without a turn: nothing."""
        if self._holder is call:
            self._holder = None

    def _is_next(self, call: Call, now: float) -> bool:
        if self._holder is not None and now < self._held_until:
            return False
        return min(self._waiting, key=self._waiting.__getitem__) is call
