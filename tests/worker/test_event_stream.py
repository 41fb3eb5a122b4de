"""Events of a request on their way from the engine to its reply log."""

import asyncio

from schemas.reasons import FinishReason
from worker.engine.outputs import FinishEvent, SampledToken, TokenEvent
from worker.loop import EventStream

FINISH = FinishEvent("r", 0, FinishReason.LENGTH)


def token(number: int) -> TokenEvent:
    return TokenEvent("r", 0, SampledToken(number), "x")


async def test_events_are_there_at_once():
    stream = EventStream(1)
    taken = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0.01)
    assert not taken.done()
    stream.push(token(1), 0.0)
    assert await taken == [token(1)]


async def test_tokens_are_collected_until_then():
    """Also those that were there before; whoever waits is woken once."""
    stream, loop = EventStream(1), asyncio.get_running_loop()
    stream.push(token(1), 0.0)
    until = loop.time() + 0.1
    taken = asyncio.ensure_future(stream.take(until))
    for number in (2, 3):
        await asyncio.sleep(0.01)
        stream.push(token(number), 0.0)
    assert await taken == [token(1), token(2), token(3)]
    assert loop.time() > until - 0.01  # a timer may ring a tick early


async def test_after_that_the_next_token_is_taken_at_once():
    stream, loop = EventStream(1), asyncio.get_running_loop()
    taken = asyncio.ensure_future(stream.take(loop.time() + 0.02))
    await asyncio.sleep(0.05)
    assert not taken.done()
    stream.push(token(1), 0.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert taken.done()
    assert await taken == [token(1)]


async def test_the_end_does_not_wait():
    """Of all choices; one that ends alone waits for the others' tokens."""
    stream, loop = EventStream(2), asyncio.get_running_loop()
    began = loop.time()
    taken = asyncio.ensure_future(stream.take(began + 60))
    stream.push(FINISH, 0.0)
    await asyncio.sleep(0.01)
    assert not taken.done()
    stream.push(FINISH, 0.0)
    assert await taken == [FINISH, FINISH]
    assert stream.finished
    stream = EventStream(1)
    stream.push(FINISH, 0.0)
    assert await stream.take(began + 60) == [FINISH]
    assert loop.time() < began + 30


async def test_nobody_waits_for_a_timer_after_a_cancel():
    """The next take is not held back by the one that was cancelled."""
    stream, loop = EventStream(1), asyncio.get_running_loop()
    taken = asyncio.ensure_future(stream.take(loop.time() + 60))
    await asyncio.sleep(0)
    taken.cancel()
    await asyncio.gather(taken, return_exceptions=True)
    stream.push(token(1), 0.0)
    assert await stream.take() == [token(1)]


async def test_what_came_while_a_cancelled_take_collected_is_there():
    """No event waits for the one after it."""
    stream, loop = EventStream(1), asyncio.get_running_loop()
    taken = asyncio.ensure_future(stream.take(loop.time() + 60))
    await asyncio.sleep(0)
    stream.push(token(1), 0.0)
    taken.cancel()
    await asyncio.gather(taken, return_exceptions=True)
    async with asyncio.timeout(5):
        assert await stream.take() == [token(1)]
