"""What a worker writes beside reply logs: dead letters and usage records (protocol.md 7)."""

import asyncio
from collections.abc import Callable, Mapping

import structlog

from schemas.codec import ContentType
from schemas.dead_letters import dead_letter_headers
from schemas.reasons import DeadLetterReason
from schemas.records import End, Timing, Usage, UsageRecord, encode_usage
from worker.metrics import Metrics
from worker.tracing import RequestTrace
from worker.transport.protocols import Delivery, ReplySink, RequestSource

MAX_MESSAGE_CHARS = 1000
PUBLISH_RETRY_S = 1.0

log = structlog.get_logger(__name__)


class SideTopics:
    """Both are retried until they land, or until the partition of the record that they speak of went elsewhere."""

    def __init__(
        self,
        sink: ReplySink,
        sources: Mapping[str, RequestSource],
        dlq_topic: str,
        usage_topic: str,
        model: str,
        wall_ms: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        self._sink = sink
        self._sources = sources
        self._dlq_topic = dlq_topic
        self._usage_topic = usage_topic
        self._model = model
        self._wall_ms = wall_ms
        self._metrics = metrics

    async def bury(self, delivery: Delivery, trace: RequestTrace, reason: DeadLetterReason, message: str) -> bool:
        """Puts a record on the DLQ. False when its partition went elsewhere before that succeeded."""
        log.warning("request.dead_letter", input=delivery.source.to_fields(), reason=reason, message=message)
        message = message[:MAX_MESSAGE_CHARS]
        with trace.burying(self._dlq_topic, reason) as sending:
            headers = dead_letter_headers(delivery.headers, delivery.source, reason, message, sending.traceparent)
            landed = await self._publish(delivery, self._dlq_topic, delivery.key, delivery.value, headers)
            sending.landed(landed)
        if landed:
            self._metrics.buried(reason)
        return landed

    async def publish_usage(self, delivery: Delivery, end: End, *, tenant: str, correlation_id: bytes) -> None:
        """Writes what a request cost that has ended just now."""
        usage, timing = end.usage or Usage(0, 0), end.timing or Timing(0.0, None, 0.0)
        record = UsageRecord(
            tenant=tenant,
            lane=delivery.lane,
            model=self._model,
            correlation_id=correlation_id,
            input=delivery.source,
            finish_reason=end.finish_reason,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            queued_ms=timing.queued_ms,
            total_ms=timing.total_ms,
            at_ms=round(self._wall_ms()),
        )
        headers = [("content-type", ContentType.MSGPACK.encode())]
        if await self._publish(delivery, self._usage_topic, tenant.encode(), encode_usage(record), headers):
            self._metrics.billed(delivery.lane, tenant, end)

    async def _publish(
        self, delivery: Delivery, topic: str, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes]]
    ) -> bool:
        while not await self._sink.publish(topic, key, value, headers):
            if not self._sources[delivery.lane].owns(delivery):
                return False
            await asyncio.sleep(PUBLISH_RETRY_S)
        return True
