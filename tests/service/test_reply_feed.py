"""One stream's reply log: what its consumer sees."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.codec import ContentType
from schemas.errors import ProtocolError
from schemas.reasons import FinishReason
from schemas.records import Begin, End, InputRef, Left, LogRecord, TokenLogprob, Tokens, encode_reply, event_of
from service.errors import StreamBroken
from service.reply_reader import ReplyFeed


def _record(offset: int, reply: LogRecord) -> Any:
    headers = [("event", event_of(reply).encode()), ("content-type", b"application/msgpack")]
    return SimpleNamespace(offset=offset, headers=headers, value=encode_reply(reply, ContentType.MSGPACK))


def _begin(*, restart: bool = False) -> Begin:
    return Begin(restart, "w", "m", 1, 0, 0.0, InputRef("prompts.standard", 0, 0, 0))


def _tokens(attempt: int, position: int, *token_ids: int, choice: int = 0) -> Tokens:
    logprobs = tuple(TokenLogprob(token_id, -0.5, ()) for token_id in token_ids)
    return Tokens(attempt, choice, position, token_ids, "".join(map(chr, token_ids)), logprobs)


def _feed(*replies: LogRecord) -> ReplyFeed:
    feed = ReplyFeed()
    for offset, reply in enumerate(replies):
        feed.accept(_record(offset, reply))
    return feed


async def test_waiting_tokens_are_coalesced_per_choice() -> None:
    """A consumer that was slow gets one record per choice, with everything in it, between begin and end."""
    end = End(0, FinishReason.STOP)
    feed = _feed(
        _begin(), _tokens(0, 0, 65), _tokens(0, 0, 97, choice=1), _tokens(0, 1, 66), _tokens(0, 1, 98, choice=1), end
    )
    taken = [await feed.take() for _ in range(4)]
    assert taken == [_begin(), _tokens(0, 0, 65, 66), _tokens(0, 0, 97, 98, choice=1), end]


async def test_tokens_of_two_attempts_stay_apart() -> None:
    """A second attempt's begin stands between its tokens and those of the first."""
    feed = _feed(_begin(), _tokens(0, 0, 65), _begin(), _tokens(2, 1, 66), _tokens(0, 1, 67))
    assert [await feed.take() for _ in range(4)] == [_begin(), _tokens(0, 0, 65), _begin(), _tokens(2, 1, 66)]
    assert feed.log.token_ids == {0: [65, 66]}


async def test_take_waits_for_news() -> None:
    """Without records a consumer waits, and wakes with the next."""
    feed = ReplyFeed()
    taking = asyncio.create_task(feed.take())
    await asyncio.sleep(0.01)
    assert not taking.done()
    feed.accept(_record(0, _begin()))
    assert await taking == _begin()


async def test_what_workers_leave_for_each_other_wakes_nobody() -> None:
    """`left` is no event, does not come between tokens, and is not in the log that the consumer sees."""
    feed = _feed(_begin(), Left(0))
    assert await feed.take() == _begin()
    taking = asyncio.create_task(feed.take())
    await asyncio.sleep(0.01)
    feed.accept(_record(2, Left(0)))
    await asyncio.sleep(0.01)
    assert not taking.done()
    assert not feed._news.is_set()
    for offset, reply in enumerate(
        [_begin(), _tokens(3, 0, 65), Left(0), _tokens(3, 1, 66), Left(0), End(3, FinishReason.STOP)], 3
    ):
        feed.accept(_record(offset, reply))
    assert await taking == _begin()
    assert [await feed.take(), await feed.take()] == [_tokens(3, 0, 65, 66), End(3, FinishReason.STOP)]
    assert (feed.log.num_begins, feed.log.num_skipped) == (2, 0)


async def test_failure_comes_after_what_was_received() -> None:
    """Records that were accepted before a failure are delivered before it is raised; the first failure counts."""
    feed = _feed(_begin())
    feed.fail(StreamBroken("first"))
    feed.fail(StreamBroken("second"))
    assert await feed.take() == _begin()
    with pytest.raises(StreamBroken, match="first"):
        await feed.take()


async def test_hole_is_an_error() -> None:
    """Tokens beyond the next position are never guessed at."""
    with pytest.raises(ProtocolError):
        _feed(_begin(), _tokens(0, 5, 65))
