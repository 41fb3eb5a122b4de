"""A ReplySink that counts and times what goes through it."""

from collections.abc import Awaitable
from time import perf_counter
from typing import TypeVar

from schemas.headers import ReplyAddress
from schemas.records import LogRecord
from schemas.reply_log import ReplyLog
from worker.metrics import Metrics
from worker.transport.protocols import Headers, ReplySink

_UNACKNOWLEDGED = "unacknowledged"
T = TypeVar("T", int | None, bool)


class MeasuredSink:
    """Every send is told to `metrics`; else it is `sink`."""

    def __init__(self, sink: ReplySink, metrics: Metrics) -> None:
        self._sink = sink
        self._metrics = metrics

    async def locate(self, address: ReplyAddress) -> ReplyAddress | None:
        return await self._sink.locate(address)

    async def send(self, address: ReplyAddress, record: LogRecord, trace: str | None = None) -> int | None:
        return await self._measured(address.topic, True, self._sink.send(address, record, trace), None)

    async def read(self, address: ReplyAddress, start: int, until: int | None) -> ReplyLog:
        return await self._sink.read(address, start, until)

    async def publish(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> bool:
        return await self._measured(topic, False, self._sink.publish(topic, key, value, headers), False)

    def forget(self, address: ReplyAddress) -> None:
        self._sink.forget(address)

    async def _measured(self, topic: str, is_reply: bool, sending: Awaitable[T], failed: T) -> T:
        began = perf_counter()
        try:
            result = await sending
        except Exception as error:
            self._metrics.sent(topic, is_reply, perf_counter() - began, type(error).__name__)
            raise
        self._metrics.sent(topic, is_reply, perf_counter() - began, _UNACKNOWLEDGED if result is failed else "")
        return result
