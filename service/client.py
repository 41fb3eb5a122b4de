"""The client: prompts go out on a lane, tokens come back on a reply topic per request.

async with Client("localhost:9092") as client:
    async for event in client.stream(prompt="Once upon a time", tier="interactive"):
        ...
    completion = await client.complete(messages=[{"role": "user", "content": "Why is the sky blue?"}])
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from schemas.codec import ContentType, encode_map
from schemas.connection import KafkaConnection, KafkaSettings
from schemas.errors import RequestError
from schemas.headers import read_request_headers, write_request_headers
from schemas.reasons import ErrorCode
from schemas.request import parse_request, to_fields
from schemas.topics import DEFAULT_LANE_PREFIX, DEFAULT_REPLY_PREFIX, check_tier_name, lane_topic
from service.errors import StreamClosed
from service.exchange import Call, Exchange
from service.stream import Completion, ReplyStream
from service.tracing import CallTrace


class Client:
    """An async context manager; hundreds of streams at once share its few connections to Kafka.

    bootstrap: HOST:PORT, several with commas; None takes CAROUSEL_BOOTSTRAP, else localhost:9092. Everything else about
    the connection comes from CAROUSEL_* variables, unless `connection` is given. `reply_topics` are kept ready, more
    when there is demand. `tenant` is the default of every request. Entering raises BrokerUnavailable, and NotAuthorized
    when this user may not create reply topics.
    """

    def __init__(
        self,
        bootstrap: str | None = None,
        *,
        connection: KafkaConnection | None = None,
        lane_prefix: str = DEFAULT_LANE_PREFIX,
        reply_prefix: str = DEFAULT_REPLY_PREFIX,
        reply_topics: int = 8,
        tenant: str | None = None,
        content_type: ContentType = ContentType.MSGPACK,
    ) -> None:
        if connection is not None and bootstrap is not None:
            raise ValueError("give bootstrap or connection, not both")
        if reply_topics < 1:
            raise ValueError("reply_topics must be at least 1")
        self._connection = connection or (KafkaSettings() if bootstrap is None else KafkaSettings(bootstrap=bootstrap))
        self._lane_prefix = lane_prefix
        self._reply_prefix = reply_prefix
        self._reply_topics = reply_topics
        self._tenant = tenant
        self._content_type = content_type
        self._exchange: Exchange | None = None

    async def __aenter__(self) -> Self:
        exchange = Exchange(
            self._connection,
            lane_prefix=self._lane_prefix,
            reply_prefix=self._reply_prefix,
            reply_topics=self._reply_topics,
            content_type=self._content_type,
        )
        await exchange.start()
        self._exchange = exchange
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._exchange is not None:
            await self._exchange.close()
            self._exchange = None

    def stream(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        tier: str = "standard",
        tenant: str | None = None,
        priority: int | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
        key: bytes | None = None,
        trace: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> ReplyStream:
        """The events of one request, which is published when the first is asked for.

        Exactly one of prompt, messages and token_ids; `fields` are the others of a request (max_tokens, temperature,
        stop, seed, n, logprobs, ...). deadline: seconds from then on, after which the answer is worthless. timeout:
        seconds without an event that are too many. key: of the Kafka record; turns of a conversation should share it.
        trace: W3C headers (traceparent, tracestate, baggage), in place of the current OpenTelemetry context.
        Raises RequestError at once for what the service would refuse without looking at the model.
        """
        if self._exchange is None:
            raise StreamClosed("the client is not open: use `async with Client(...) as client`")
        _check(tier, {"deadline": deadline, "timeout": timeout})
        sources = {"prompt": prompt, "messages": messages, "token_ids": token_ids}
        request = parse_request({name: value for name, value in sources.items() if value is not None} | fields)
        call = Call(
            lane=lane_topic(tier, self._lane_prefix),
            value=encode_map(to_fields(request), self._content_type),
            content_type=self._content_type,
            key=key,
            tenant=tenant if tenant is not None else self._tenant,
            priority=priority,
            deadline=deadline,
            trace=CallTrace(request, trace),
        )
        read_request_headers(
            write_request_headers(
                correlation_id="-", reply_to="-", content_type=call.content_type, tenant=call.tenant, priority=priority
            )
        )
        return ReplyStream(self._exchange, call, num_choices=request.n, timeout=timeout)

    async def complete(self, **request: Any) -> Completion:
        """The whole answer to one request; takes what `stream` takes.

        Raises RequestFailed when the service answers with an error, and what the stream raises. A deadline that passes
        and a cancellation by others are finish reasons, with the tokens delivered so far.
        """
        async with self.stream(**request) as stream:
            return await stream.completion()


def _check(tier: str, seconds: Mapping[str, float | None]) -> None:
    """Raises RequestError for what no service could be asked."""
    try:
        check_tier_name(tier)
    except ValueError as error:
        raise RequestError(ErrorCode.INVALID_REQUEST, str(error)) from None
    for name, value in seconds.items():
        if value is not None and not math.isfinite(value):
            raise RequestError(ErrorCode.INVALID_REQUEST, f"{name} must be a number of seconds, not {value}")
