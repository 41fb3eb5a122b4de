"""A lane whose consumer has died gets another one; silence that is Kafka's fault is forgiven."""

import asyncio
from collections.abc import Callable

import pytest

from worker import watchdog
from worker.watchdog import LaneWatchdog

LIMIT_S = 30


class FakeLane:
    """A lane as the watchdog sees it. `life` is what its `run` does."""

    def __init__(self, life: Callable[["FakeLane"], object]) -> None:
        self._life = life
        self.assigned = asyncio.Event()
        self.polled_at = 0.0
        self.broken = False
        self.draining = False
        self.ended = asyncio.Event()
        self.discarded = False

    async def run(self) -> None:
        try:
            await self._life(self)
        finally:
            self.ended.set()

    async def discard(self) -> None:
        self.discarded = True


async def serve(lane: FakeLane) -> None:
    """Polls until it is drained."""
    lane.assigned.set()
    while not lane.draining:
        lane.polled_at = asyncio.get_running_loop().time()
        await asyncio.sleep(0.001)


async def hang(lane: FakeLane) -> None:
    """Is assigned, and never polls again."""
    lane.assigned.set()
    lane.polled_at = asyncio.get_running_loop().time()
    while not lane.draining:
        await asyncio.sleep(0.001)


async def break_down(lane: FakeLane) -> None:
    """Polls, but a task of its consumer has ended."""
    lane.assigned.set()
    lane.broken = True
    await asyncio.Event().wait()


async def die(lane: FakeLane) -> None:
    """Ends with an error after it was assigned."""
    lane.assigned.set()
    raise RuntimeError("the poll loop has ended")


async def return_early(lane: FakeLane) -> None:
    """Ends without an error, and without having been told to."""
    lane.assigned.set()


async def refuse(lane: FakeLane) -> None:
    raise RuntimeError("not authorised")


class World:
    """One lane that lives these lives, one after the other, the last one again and again."""

    def __init__(self, *lives: Callable[[FakeLane], object], silence_limit: float = 1000.0) -> None:
        self.made: list[FakeLane] = []
        self._lives = list(lives)
        self.lanes = {"batch": self._make("batch")}
        self.replaced: list[str] = []
        self.reachable = True
        self.asked = asyncio.Event()
        self.watchdog = LaneWatchdog(
            self.lanes, self._make, self.replaced.append, self._is_reachable, silence_limit=silence_limit
        )

    def _make(self, tier: str) -> FakeLane:
        self.made.append(FakeLane(self._lives.pop(0) if len(self._lives) > 1 else self._lives[0]))
        return self.made[-1]

    async def _is_reachable(self) -> bool:
        self.asked.set()
        return self.reachable

    async def keep_until(self, condition: Callable[[], bool]) -> None:
        """Keeps the lane until the condition holds; then drains it."""
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self.watchdog.keep("batch"))
            while not condition():
                assert not keeping.done()
                await asyncio.sleep(0.001)
            self.lanes["batch"].draining = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks a hundred times a second, and does not wait before a replacement."""
    monkeypatch.setattr(watchdog, "CHECK_S", 0.01)
    monkeypatch.setattr(watchdog, "FIRST_PAUSE_S", 0.0)


@pytest.mark.parametrize(
    ("life", "silence_limit"),
    [(die, 1000.0), (return_early, 1000.0), (break_down, 1000.0), (hang, 0.05)],
    ids=["died", "ended", "broken", "silent"],
)
async def test_a_dead_consumer_is_replaced(life: Callable, silence_limit: float):
    """The poll loop ended, a task of the consumer ended, or nothing has moved for too long."""
    world = World(life, serve, silence_limit=silence_limit)
    await world.keep_until(lambda: len(world.made) == 2 and world.made[1].polled_at > 0)
    first, second = world.made
    assert first.ended.is_set()
    assert first.discarded
    assert world.replaced == ["batch"]
    assert world.lanes["batch"] is second


async def test_a_lane_that_never_worked_ends_the_worker():
    """A wrong configuration is said, not tried for ever."""
    world = World(refuse)
    with pytest.raises(RuntimeError, match="not authorised"):
        await world.watchdog.keep("batch")


async def test_a_replacement_that_cannot_start_is_tried_again():
    """Kafka may be away just then; others lanes go on meanwhile."""
    world = World(die, refuse, refuse, serve)
    await world.keep_until(lambda: len(world.made) == 4 and world.made[3].polled_at > 0)
    assert world.replaced == ["batch"] * 3


async def test_silence_without_kafka_is_forgiven():
    """While no broker answers the consumer stays, and is not called silent."""
    world = World(hang, serve, silence_limit=0.05)
    world.reachable = False
    await world.keep_until(world.asked.is_set)
    assert world.replaced == []
    assert world.watchdog.silence("batch", asyncio.get_running_loop().time()) < LIMIT_S


async def test_a_new_consumer_alone_is_no_sign_of_life():
    """The silence of a lane that is replaced again and again adds up, so that /livez sees it."""
    world = World(die, refuse)

    def silent_for_long() -> bool:
        silence = world.watchdog.silence("batch", asyncio.get_running_loop().time())
        return silence > 0.1 and len(world.made) > 5

    await world.keep_until(silent_for_long)


async def test_a_drained_lane_is_not_replaced():
    """It may break on the way out: its partitions go elsewhere anyhow."""

    async def break_while_draining(lane: FakeLane) -> None:
        await serve(lane)
        raise RuntimeError("the commit failed")

    world = World(break_while_draining)
    await world.keep_until(lambda: world.made[0].polled_at > 0)
    assert world.replaced == []
