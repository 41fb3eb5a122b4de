"""What the worker tells of itself: logs, metrics and spans, and where in a request's life each is told."""

from collections.abc import Mapping, Sequence
from typing import Self

import structlog

from schemas.reply_log import ReplyLog
from schemas.topics import Tier
from worker.call import Call, Outcome
from worker.engine.outputs import EngineEvent, StepRecord
from worker.engine.protocols import Clock
from worker.logs import log_finished
from worker.loop import StepTimes
from worker.metrics import Metrics, Served
from worker.snapshots import Snapshots
from worker.tracing import RequestTrace, Tracing, operation_of
from worker.transport.protocols import Delivery

MAX_OTHER_MODELS = 16  # that are warned of: anybody may write to a reply log

log = structlog.get_logger(__name__)


class Telemetry:
    """Of one worker: a StepObserver, and what the server tells of its requests. Used on the event loop."""

    def __init__(self, metrics: Metrics, tracing: Tracing, snapshots: Snapshots | None = None) -> None:
        self.metrics = metrics
        self._tracing = tracing
        self._snapshots = snapshots
        self._other_models: set[str] = set()  # that were warned of

    @classmethod
    def unheard(cls, worker: str, tiers: Mapping[str, Tier], model: str, clock: Clock) -> Self:
        """Nobody asks for its metrics, and nothing is traced."""
        metrics = Metrics(worker, tiers)
        metrics.model_loaded(model)
        return cls(metrics, Tracing(None, clock, model))

    # Steps

    def step(self, record: StepRecord, times: StepTimes, events: Sequence[EngineEvent]) -> None:
        self.metrics.step(record, times, events)
        self._tracing.step(record)
        if self._snapshots is not None:
            self._snapshots.observe(record)

    def step_failed(self) -> None:
        self.metrics.step_failed()

    # Requests

    def trace(self, delivery: Delivery) -> RequestTrace:
        """The trace of a record that was taken in just now."""
        return RequestTrace(self._tracing, delivery.source, delivery.headers, len(delivery.value or b""))

    def bind(self, delivery: Delivery, trace: RequestTrace, correlation_id: str | None = None) -> None:
        """Log lines of the running task carry the ids of its record from now on."""
        source = delivery.source
        structlog.contextvars.bind_contextvars(
            correlation_id=correlation_id,
            trace_id=trace.trace_id,
            span_id=trace.span_id,
            lane=source.topic,
            partition=source.partition,
            offset=source.offset,
        )

    def describe(self, call: Call) -> None:
        """Its headers are read, or cannot be."""
        call.trace.describe(
            correlation_id=call.correlation_id,
            tier=call.delivery.lane,
            tenant=call.tenant,
            priority=call.tier.priority(call.headers.priority),
        )

    def delayed(self, call: Call) -> None:
        """It has to wait for its tenant's quota."""
        call.trace.delayed()
        self.metrics.throttled(call.tenant)

    def looked_back(self, seen: ReplyLog, ours: str) -> None:
        """Warns of a set of lanes that does not serve one model, `ours` (protocol.md 1). Not more than that: another
        name may be that of a copy."""
        first = seen.first_begin.model if seen.first_begin is not None else ours
        if first == ours or first in self._other_models or len(self._other_models) >= MAX_OTHER_MODELS:
            return
        self._other_models.add(first)
        log.warning(
            "lanes.serve_another_model",
            ours=ours,
            other=first,
            meaning="a worker with another model has begun a request of these lanes; what we resume of it mixes both. "
            "Give each model lanes of its own (--lane-prefix), or all workers of these lanes the same --model",
        )

    def begun(self, call: Call, attempt: int | None, resumed: ReplyLog | None) -> None:
        """Its `begin` counts, at offset `attempt`. resumed: the log that it goes on after."""
        structlog.contextvars.bind_contextvars(attempt=attempt)
        if resumed is not None:
            call.trace.joins(resumed.earlier_trace)
        kind = "resumed" if call.num_resumed else "first" if resumed is None and call.num_attempts == 1 else "restarted"
        self.metrics.begun(call.delivery.lane, kind)

    def finished(self, call: Call, outcome: Outcome) -> None:
        """Its service is over. Again: nothing."""
        if call.is_over:
            return
        call.is_over = True
        source, events, request = call.delivery.source, call.events, call.request
        served = Served(
            tier=call.delivery.lane,
            topic=source.topic,
            outcome=outcome.value,
            end=call.end,
            process_seconds=self._tracing.clock.now() - call.taken_in,
            operation=operation_of(request) if request is not None else "",
            seated=events is not None and events.admitted_at is not None,
            resumed=call.num_resumed > 0,
            tpot=None if events is None else events.seconds_per_token,
            trace_id=call.trace.trace_id if call.trace.recorded else "",
            fault="" if outcome in (Outcome.ANSWERED, Outcome.DUPLICATE) else outcome.value,
        )
        self.metrics.served(served)
        if self._snapshots is not None and call.end is not None:
            self._snapshots.finished(served.tier, call.end, served.tpot)
        call.trace.finish(served.outcome, call.end, call.num_attempts, served.fault)
        log_finished(
            served.outcome,
            call.end,
            correlation_id=call.correlation_id,
            tenant=call.tenant,
            tier=call.delivery.lane,
            input=source.to_fields(),
            attempts=call.num_attempts,
            trace_id=call.trace.trace_id,
            span_id=call.trace.span_id,
        )

    def unanswerable(self, delivery: Delivery, trace: RequestTrace, reason: str, buried: bool) -> None:
        """A record without a usable reply address: it is on the DLQ, or another worker's now."""
        outcome = Outcome.DEAD_LETTER if buried else Outcome.LOST
        topic, fault = delivery.source.topic, reason if buried else outcome.value
        self.metrics.served(Served(delivery.lane, topic, outcome.value, None, 0.0, fault=fault))
        trace.finish(outcome.value, None, 0, fault)
