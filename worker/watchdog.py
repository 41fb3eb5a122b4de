"""Keeps lanes consuming: a consumer that has died is replaced, and the other lanes do not notice.

aiokafka's consumer can end without a word, or hang in a re-balance that never ends (research/queue.md 3.4: T1 to T4).
What ran for the dead one is dropped and comes again with the new one, which resumes it from its reply log.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from worker.transport.kafka_lane import KafkaLane

CHECK_S = 1.0
STOP_S = 5.0  # for a consumer that is given up
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 30.0
STABLE_S = 60.0  # a consumer that lived so long starts the pauses anew

log = structlog.get_logger(__name__)


class LaneWatchdog:
    """Runs lanes, and replaces a lane in `lanes` when its consumer has died.

    Args:
        lanes: tier -> lane; changed in place.
        new_lane: makes a fresh lane of a tier.
        replaced: called with the tier when its lane is another one: nothing of the old one is owned any more.
        reachable: asks whether Kafka answers. While it does not, silence is no fault of the consumer.
        silence_limit: seconds without a poll after which a consumer counts as dead. Longer than a re-balance may take.
    """

    def __init__(
        self,
        lanes: dict[str, KafkaLane],
        new_lane: Callable[[str], KafkaLane],
        replaced: Callable[[str], None],
        reachable: Callable[[], Awaitable[bool]],
        *,
        silence_limit: float,
    ) -> None:
        self._lanes = lanes
        self._new_lane = new_lane
        self._replaced = replaced
        self._reachable = reachable
        self.silence_limit = silence_limit
        self._alive_at: dict[str, float] = {}  # event loop time until which silence has a reason
        self._served: set[str] = set()  # tiers that were assigned at least once

    def silence(self, tier: str, now: float) -> float:
        """Seconds without a poll of a lane, those without Kafka left out. `now`: event loop time."""
        return now - max(self._lanes[tier].polled_at, self._alive_at.get(tier, now))

    async def keep(self, tier: str) -> None:
        """Consumes a lane until it is drained or stopped. Raises KafkaUnavailable when that never worked."""
        loop, pause = asyncio.get_running_loop(), FIRST_PAUSE_S
        self._alive_at[tier] = loop.time()
        while True:
            lane, began = self._lanes[tier], loop.time()
            if lane.draining:
                return
            fault = await self._run(tier, lane)
            if fault is None or lane.draining:
                return
            pause = FIRST_PAUSE_S if loop.time() - began > STABLE_S else pause
            log.error("lane.replaced", lane=tier, fault=fault, again_in=pause)
            self._alive_at[tier] = max(self._alive_at[tier], lane.polled_at)  # a new consumer alone is no sign of life
            self._lanes[tier] = self._new_lane(tier)
            self._replaced(tier)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_S)

    async def _run(self, tier: str, lane: KafkaLane) -> str | None:
        """Returns None when the lane has ended in order, else what is wrong."""
        consuming = asyncio.create_task(lane.run(), name=f"consume {tier}")
        began = asyncio.get_running_loop().time()
        try:
            fault: str | None = None
            while fault is None and not (await asyncio.wait([consuming], timeout=CHECK_S))[0]:
                self._note_service(tier, lane)
                fault = await self._fault(tier, lane, began)
        finally:
            self._note_service(tier, lane)
            if not consuming.done():
                consuming.cancel()
                await asyncio.wait([consuming], timeout=STOP_S)
        error = consuming.exception() if consuming.done() and not consuming.cancelled() else None
        if error is not None and tier not in self._served and not lane.draining:
            raise error
        if fault is None and lane.draining and error is None:
            return None
        await lane.discard()
        return fault or (repr(error) if error is not None else "the poll loop has ended")

    def _note_service(self, tier: str, lane: KafkaLane) -> None:
        if lane.assigned.is_set():
            self._served.add(tier)

    async def _fault(self, tier: str, lane: KafkaLane, began: float) -> str | None:
        if lane.broken:
            return "a task of the consumer has ended"
        now = asyncio.get_running_loop().time()
        if min(self.silence(tier, now), now - began) <= self.silence_limit:
            return None
        if not await self._reachable():
            self._alive_at[tier] = now
            return None
        return f"no poll for {self.silence_limit:g} s"
