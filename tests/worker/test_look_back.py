"""Which reply logs a worker looks at before it computes a request, and what of those that no commit tells of."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from schemas.reasons import FinishReason
from schemas.records import Begin, Cancel, End, Left
from tests.worker.hand_overs import Sends, hand_over, no_seats, serve
from tests.worker.test_fruitless import POISON, Death, calm, kinds, most_fruitless
from tests.worker.world import LANE, World, until
from worker import loop, suspects
from worker.transport.offset_tracker import OffsetTracker


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turns are taken at once, and what dies is not tried again for long."""
    monkeypatch.setattr(loop, "RETRY_PAUSES_S", (0.05,))
    monkeypatch.setattr(suspects, "POLL_S", 0.001)
    monkeypatch.setattr(suspects, "SETTLE_S", 0.005)
    with structlog.testing.capture_logs():
        yield


def taken_over_unknown(world: World) -> None:
    """The partition is assigned, and no commit tells what an earlier owner took in: as at the first start of all, after
    a crash soon after an intake, and on a broker that keeps no commit metadata."""
    log_end = len(world.broker.topics[LANE][0])
    world.source.tracker = OffsetTracker(world.source.tracker.position, log_end=log_end)


async def test_of_a_fresh_backlog_no_log_is_read():
    """It was there before the worker, and nobody has taken it in: a `begin` each, which tells by its offset that it is
    the first, and what is computed waits for that alone."""
    world = World(max_num_seqs=32)
    for i in range(60):
        world.publish(f"r{i}")
    taken_over_unknown(world)
    sends = Sends(world)
    async with world.worker() as server:
        world.deliver(server)
        assert all(call.inherited and not call.taken_in_before for call in server.calls)
        await until(lambda: not server.num_calls)
    assert sends.num_reads == 0
    assert all(world.answer(f"r{i}").ended for i in range(60))
    assert [kinds(world, f"r{i}").count(Begin) for i in range(60)] == [1] * 60


async def test_a_fresh_backlog_is_not_computed_before_its_begin_counts():
    """Nobody knows yet that it is fresh: its worker may die of it, and that must count."""
    world = World()
    world.publish("a")
    taken_over_unknown(world)
    send, go_on = world.sink.send, asyncio.Event()

    async def slow(*arguments: Any) -> int | None:
        await go_on.wait()
        return await send(*arguments)

    world.sink.send = slow
    async with world.worker() as server:
        dying = Death(server)
        world.deliver(server)
        await asyncio.sleep(0.02)
        assert not dying.computed
        go_on.set()
        await until(lambda: not server.num_calls)
        assert dying.computed == {"Hello"}


@pytest.mark.parametrize("how", ["drains", "moves", "killed"])
@pytest.mark.parametrize("is_known", [True, False], ids=["committed", "not committed"])
async def test_a_hand_over_costs_one_read_for_each_request(how: str, is_known: bool):
    """Sixty wait for their seats: the next owner reads each of their logs once, and nobody reads anything else. (But
    for suspects that no commit tells of: once to find that they are, and once in their turn.)"""
    world = World(max_num_seqs=32)
    for i in range(60):
        world.publish(f"r{i}")
    sends = Sends(world)
    for expected in (0, 60, 120):
        await hand_over(world, how)
        assert sends.num_reads == expected
        if not is_known:
            taken_over_unknown(world)
    await serve(world)
    assert sends.num_reads == (240 if how == "killed" and not is_known else 180)
    assert all(world.answer(f"r{i}").end.finish_reason is FinishReason.LENGTH for i in range(60))


@pytest.mark.parametrize("place", [0, 3, 6])
async def test_suspects_that_no_commit_tells_of_take_turns(place: int):
    """Every worker dies before it could commit what it took in. Only its `begin` tells a suspect then: it leaves that
    attempt, waits for its turn, and is not taken for what kills the others' workers meanwhile."""
    world = World()
    names = [f"innocent{i}" for i in range(6)]
    names.insert(place, POISON)
    for name in names:
        world.publish(name, prompt=name)
    num_lives = 0
    while True:
        taken_over_unknown(world)
        async with world.worker(f"w{num_lives}") as server:
            dying = Death(server)
            world.deliver(server)
            await until(lambda server=server, dying=dying: dying.came or not server.num_calls)
        if not dying.came:
            break
        num_lives += 1
        assert num_lives < 20
    assert num_lives == 10
    for name in names:
        answer = world.answer(name)
        if name == POISON:
            assert answer.end.error.code == "internal"
        else:
            assert answer.token_ids == (await calm(prompt=name)).token_ids
            assert most_fruitless(world, name) <= suspects.TURNS_FROM
    assert len(world.broker.topics["prompts.dlq"][0]) == 1


async def test_a_suspect_that_no_commit_tells_of_can_be_cancelled():
    """It is over before it has its turn: it begins once more, and ends."""
    world = World()
    for name in ("a", "b"):
        world.publish(name)
    for _ in range(3):
        await hand_over(world, "killed")
    taken_over_unknown(world)
    async with world.worker() as server:
        no_seats(server)
        world.deliver(server)
        await until(lambda: Left in kinds(world, "b") and kinds(world)[-1] is Begin)
        server.cancel(Cancel(b"b"))
        await until(lambda: world.answer("b").ended)
    assert kinds(world, "b") == [Begin] * 4 + [Left, Begin, End]
    assert world.answer("b").end.finish_reason is FinishReason.CANCELLED
    assert kinds(world) == [Begin] * 4 + [Left, Begin]
