"""What a caller holds of a request: its stream of events, and the completion they add up to."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Self

from schemas.reasons import FinishReason
from schemas.records import ChoiceResult, End, Preemptions, ReplyRecord, Timing, Usage
from schemas.reply_log import ReplyLog
from service.errors import RequestFailed, RequestTimeout, StreamClosed
from service.exchange import Call, Exchange

_DEADLINE_GRACE_S = 5.0  # the service ends a request at its deadline; silence long after it is no service


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `choices` has one entry for each of `n`; the properties are the first one's."""

    choices: tuple[ChoiceResult, ...]
    usage: Usage | None
    timing: Timing | None
    preemptions: Preemptions | None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


class ReplyStream:
    """The events of one request: `async for event in stream`, bare or inside `async with stream`.

    Begin, Tokens and End records come in the order in which the reader rule accepts them; token records that waited
    come as one. `Begin(restart=True)` says that everything before it is void. The request is published when the first
    event is asked for, or on entering the block. Leaving early, in whatever way, cancels it; so does a time-out, and so
    does cancelling the task that waits for an event. With `async with` that happens at once, else when Python drops the
    object.

    Raises RequestTimeout after `timeout` s without an event or 5 s after an unanswered deadline, StreamBroken when the
    log cannot be read on (ReplyTopicDeleted: somebody else has deleted it), and what `Exchange.open` raises. An error
    of the service is an End with `error`.
    """

    def __init__(self, exchange: Exchange, call: Call, *, num_choices: int, timeout: float | None) -> None:
        self._exchange = exchange
        self._call = call
        self._num_choices = num_choices
        self._timeout = timeout

    @property
    def log(self) -> ReplyLog:
        """Everything accepted so far, by choice; it may be ahead of the events that have been taken."""
        return self._call.feed.log

    @property
    def correlation_id(self) -> str | None:
        """The request's identity, once published."""
        return self._call.correlation_id

    @property
    def text(self) -> str:
        """Of the first choice, so far."""
        return self.log.end.choices[0].text if self.log.end and self.log.end.choices else self.log.text.get(0, "")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first choice, so far."""
        if self.log.end and self.log.end.choices:
            return self.log.end.choices[0].token_ids
        return tuple(self.log.token_ids.get(0, ()))

    @property
    def end(self) -> End | None:
        """The final record, once it was accepted."""
        return self.log.end

    @property
    def ttft(self) -> float | None:
        """Seconds from the start of publishing to the first tokens."""
        return self._call.ttft

    @property
    def tpot(self) -> float | None:
        """Seconds per token of the first choice after its first, so far."""
        feed, num_tokens = self._call.feed, len(self.token_ids)
        if feed.first_token_at is None or feed.last_token_at is None or num_tokens < 2:
            return None
        return (feed.last_token_at - feed.first_token_at) / (num_tokens - 1)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReplyRecord:
        if self._call.left:
            raise StopAsyncIteration
        event = await self._limited(take=True)
        if isinstance(event, End):
            self._exchange.leave(self._call)
        assert event is not None
        return event

    async def completion(self) -> Completion:
        """Reads to the end. Raises RequestFailed when the service answers with an error, else as the stream does."""
        async for _ in self:
            pass
        if self.log.end is None:
            raise StreamClosed("the stream has been left before its end")
        return completion_of(self.log, self._num_choices)

    async def aclose(self) -> None:
        """Leaves the stream."""
        self._exchange.leave(self._call)

    async def __aenter__(self) -> Self:
        if self._call.started_at is None:
            await self._limited(take=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._exchange.leave(self._call)

    def __del__(self) -> None:
        if self._call.started_at is not None and not self._call.left:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the client with it
                self._exchange.loop.call_soon_threadsafe(self._exchange.leave, self._call)

    async def _limited(self, *, take: bool) -> ReplyRecord | None:
        """Opens the call if need be and takes an event if asked to, in time. Leaves the stream on any failure."""
        call = self._call
        limit = asyncio.timeout(self._patience())
        try:
            async with limit:
                if call.started_at is None:
                    await self._exchange.open(call)
                return await call.feed.take() if take else None
        except BaseException as error:
            call.trace.fail(error)
            self._exchange.leave(call)
            if isinstance(error, TimeoutError) and limit.expired():
                raise RequestTimeout(self._lateness()) from None
            raise

    def _patience(self) -> float | None:
        """Seconds that the next event may take."""
        call = self._call
        if call.deadline is None:
            return self._timeout
        elapsed = 0.0 if call.started_at is None else time.monotonic() - call.started_at
        until_deadline = max(0.0, call.deadline + _DEADLINE_GRACE_S - elapsed)
        return until_deadline if self._timeout is None else min(self._timeout, until_deadline)

    def _lateness(self) -> str:
        if self._timeout is not None and self._patience() == self._timeout:
            return f"no event for {self._timeout:g} s: the request has been left, and is cancelled"
        return f"no end {_DEADLINE_GRACE_S:g} s after the deadline: the request has been left, and is cancelled"


def completion_of(log: ReplyLog, num_choices: int) -> Completion:
    """The completion of a log that has ended. Raises RequestFailed when it ended with an error."""
    end = log.end
    assert end is not None
    if end.error is not None:
        raise RequestFailed(end.error.code, end.error.message, end.error.retry_after_ms)
    choices = end.choices
    if choices is None:
        reasons = end.finish_reason if isinstance(end.finish_reason, tuple) else (end.finish_reason,) * num_choices
        choices = tuple(
            ChoiceResult(
                text=log.text.get(choice, ""),
                token_ids=tuple(log.token_ids.get(choice, ())),
                finish_reason=reason,
                logprobs=tuple(log.logprobs[choice]) if choice in log.logprobs else None,
            )
            for choice, reason in enumerate(reasons)
        )
    return Completion(choices=choices, usage=end.usage, timing=end.timing, preemptions=end.preemptions)
