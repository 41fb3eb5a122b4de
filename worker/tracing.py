"""The spans of the worker: which there are, with what they are named, linked and described (docs/metrics.md).

Built at the rim, from what the engine says of its steps and from time stamps: the engine knows no span. A request that
is not recorded (no endpoint, or its caller did not sample it) costs one context and no span.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import time_ns

import schemas.otel_lines  # noqa: F401  before OpenTelemetry

# isort: split
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode, TraceFlags, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from schemas.headers import TRACEPARENT
from schemas.records import End, InputRef
from schemas.request import PromptRequest
from schemas.trace_ids import roots_in, trace_id_of
from worker.engine.outputs import Preemption, StepRecord
from worker.engine.protocols import Clock

PROVIDER = "carousel"
MAX_LINKS = 128  # of a step's span; the SDK keeps no more either

# Jaeger shows a parent that is linked, too, as one reference, of the kind that this names: without it, as no parent.
_ALSO_PARENT = {"opentracing.ref_type": "child_of"}
_PROPAGATOR = TraceContextTextMapPropagator()
Headers = Sequence[tuple[str, bytes]]
Attributes = dict[str, AttributeValue]


class Tracing:
    """Makes the spans of one worker.

    Args:
        tracer: None where nothing is traced.
        clock: the engine's.
        model: its name.
        reply_template: name of reply topics, with `{correlation_id}` for what differs.
        group_of: consumer group of a lane's topic.
        step_share: of the steps that get a span.
    """

    def __init__(
        self,
        tracer: Tracer | None,
        clock: Clock,
        model: str,
        *,
        reply_template: str = "replies.{correlation_id}",
        group_of: Callable[[str], str] = lambda topic: topic,
        step_share: float = 0.01,
    ) -> None:
        self.tracer = tracer
        self.clock = clock
        self.model = model
        self.reply_template = reply_template
        self.group_of = group_of
        self.seated: dict[RequestTrace, None] = {}  # those with a seat, as far as they are recorded
        self._every = round(1 / step_share) if step_share > 0 else 0

    def step(self, record: StepRecord) -> None:
        """The span of a step that has just ended, for one in so many: a trace of its own, linked to its requests."""
        if self.tracer is None or not self._every or record.step % self._every:
            return
        links = [Link(request.context) for request in self.seated][:MAX_LINKS]
        attributes = {
            "llm.step": record.step,
            "llm.step.sequences": record.num_running,
            "llm.step.prefill_tokens": record.num_prefill_tokens,
            "llm.step.decode_tokens": record.num_decode_tokens,
            "llm.step.waiting": record.num_waiting,
            "llm.step.blocks_used": record.num_blocks_used,
            "llm.step.swap_out_blocks": record.num_swap_out_blocks,
            "llm.step.swap_in_blocks": record.num_swap_in_blocks,
            "llm.step.preempted": len(record.preempted),
        }
        took = self.clock.now() - record.at
        span = self.tracer.start_span(
            "llm.step", Context(), links=links, attributes=attributes, start_time=time_ns() - int(took * 1e9)
        )
        span.end()


class RequestTrace:
    """The spans of one request record in service here. A RequestObserver: it follows the engine.

    Changes `tracing.seated` while it is recorded.
    """

    def __init__(self, tracing: Tracing, source: InputRef, headers: Headers, num_bytes: int) -> None:
        self._tracing = tracing
        self._began = time_ns()
        # Span times are wall time, the engine's its clock's: one offset for all spans of a request keeps their order.
        self._epoch = self._began - int(tracing.clock.now() * 1e9)
        producer = _PROPAGATOR.extract(headers, Context(), getter=_HeaderGetter())
        caller = trace.get_current_span(producer).get_span_context()
        self._span = self._process(source, producer, caller, num_bytes)
        self.context = self._span.get_span_context()
        self.recorded = self._span.is_recording()
        self._queue: Span | None = None
        self._queued = False
        self._engine: Span | None = None
        self._engine_ended: int | None = None  # ns; None: it runs
        self._num_open = 0  # choices in the engine
        self._phases: dict[int, tuple[str, Span]] = {}  # by choice
        self._swapped: dict[int, Span] = {}
        self._begun: set[int] = set()  # choices with a token
        self._next: dict[int, tuple[str, bool]] = {}  # what follows a choice's next seat, and whether it is a recompute
        self._num_preemptions = 0

    def _process(self, source: InputRef, producer: Context, caller: SpanContext, num_bytes: int) -> Span:
        tracing = self._tracing
        trace_id = trace_id_of(source)
        if tracing.tracer is None:
            return NonRecordingSpan(caller if caller.is_valid else _new_context(trace_id))
        with roots_in(trace_id):  # without a caller's: attempts after crashes have this one, too
            return tracing.tracer.start_span(
                f"process {source.topic}",
                producer,
                kind=SpanKind.CONSUMER,
                links=[Link(caller, _ALSO_PARENT)] if caller.is_valid else [],
                start_time=self._began,
                attributes=_messaging("process")
                | {
                    "messaging.destination.name": source.topic,
                    "messaging.destination.partition.id": str(source.partition),
                    "messaging.kafka.offset": source.offset,
                    "messaging.consumer.group.name": tracing.group_of(source.topic),
                    "messaging.message.body.size": num_bytes,
                },
            )

    @property
    def trace_id(self) -> str:
        return trace.format_trace_id(self.context.trace_id)

    @property
    def span_id(self) -> str:
        return trace.format_span_id(self.context.span_id)

    # The record

    def describe(self, *, correlation_id: str, tier: str, tenant: str, priority: int | None) -> None:
        """What its headers say. priority: the effective one."""
        if self.recorded:
            attributes: Attributes = {
                "messaging.message.conversation_id": correlation_id,
                "llm.tier": tier,
                "llm.tenant": tenant,
            }
            self._span.set_attributes(attributes if priority is None else attributes | {"llm.priority": priority})

    def joins(self, traceparent: str | None) -> None:
        """An earlier attempt wrote its `begin` with this context: linked."""
        if self.recorded and traceparent is not None:
            found = trace.get_current_span(_PROPAGATOR.extract({TRACEPARENT: traceparent}, Context()))
            if found.get_span_context().is_valid:
                self._span.add_link(found.get_span_context())

    @contextmanager
    def sending(self, event: str, correlation_id: str) -> Iterator["Sending"]:
        """The span of a `begin` or an `end`."""
        attributes: Attributes = {
            "messaging.destination.template": self._tracing.reply_template,
            "messaging.destination.temporary": True,
            "messaging.message.conversation_id": correlation_id,
            "llm.event": event,
        }
        yield from self._sending(self._tracing.reply_template, attributes)

    @contextmanager
    def burying(self, topic: str, reason: str) -> Iterator["Sending"]:
        """The span of a dead letter."""
        yield from self._sending(topic, {"messaging.destination.name": topic, "llm.dlq.reason": reason})

    def _sending(self, destination: str, attributes: Attributes) -> Iterator["Sending"]:
        if not self.recorded:
            yield Sending(self._span)
            return
        span = self._child(f"send {destination}", SpanKind.PRODUCER, attributes=_messaging("send") | attributes)
        try:
            yield Sending(span)
        except BaseException as error:
            _fail(span, type(error).__name__)
            raise
        finally:
            span.end(self._now())

    def finish(self, outcome: str, end: End | None, num_attempts: int, fault: str = "") -> None:
        """Its service is over. Again: nothing. fault: what went wrong where no `end` says it."""
        if not self.recorded:
            return
        now = self._now()
        self._leave_engine(now)
        if self._queue is not None:
            self._queue.end(now)
            self._queue = None
        if self._engine is not None:
            self._engine.end(now if self._engine_ended is None else self._engine_ended)
            self._engine = None
        self._span.set_attributes({"llm.outcome": outcome, "llm.attempts": num_attempts})
        if end is not None and end.error is not None:
            _fail(self._span, end.error.code)
        elif fault:
            _fail(self._span, fault)
        self._span.end(now)
        self.recorded = False

    # The queue and the engine

    def waits(self, tier: str, priority: int) -> None:
        """It asks for admission, or again for a seat."""
        if self.recorded and self._queue is None:
            began = self._now() if self._queued else self._began
            self._queued = True
            attributes: Attributes = {"llm.tier": tier, "llm.priority": priority, "llm.queue.delayed": False}
            self._queue = self._child("llm.queue", at=began, attributes=attributes)

    def delayed(self) -> None:
        """It has to wait for its tenant's quota."""
        if self._queue is not None:
            self._queue.set_attribute("llm.queue.delayed", True)

    def enters(self, request: PromptRequest, correlation_id: str, n: int, max_tokens: int, num_resumed: int) -> None:
        """It is handed to the engine; again, in place of what ran for it before: what that did is over."""
        if not self.recorded:
            return
        now = self._now()
        self._leave_engine(now)
        self._num_open, self._engine_ended = n, None
        self._begun, self._next = set(), {}
        if self._engine is None:
            operation = operation_of(request)
            attributes = _request_attributes(request, operation, self._tracing.model, max_tokens)
            attributes["gen_ai.response.id"] = correlation_id
            self._engine = self._child(f"{operation} {self._tracing.model}", at=now, attributes=attributes)
        if num_resumed:
            self._engine.set_attribute("llm.resumed_tokens", num_resumed)

    def seated(self, choice: int, at: float) -> None:
        if self._engine is None:
            return
        now = self._ns(at)
        if self._queue is not None:
            self._queue.end(now)
            self._queue = None
        self._end_phase(choice, now)
        name, recomputes = self._next.pop(choice, ("llm.prefill", False))
        self._phase(choice, name, now, {"llm.recompute": True} if recomputes else {})
        self._tracing.seated[self] = None

    def token(self, choice: int, at: float) -> None:
        phase = self._phases.get(choice)
        if phase is None or phase[0] == "llm.decode":
            return
        now = self._ns(at)
        self._end_phase(choice, now)
        if not self._begun and self._engine is not None:
            self._engine.add_event("first_token", timestamp=now)
        self._begun.add(choice)
        self._phase(choice, "llm.decode", now, {})

    def preempted(self, preemption: Preemption, at: float, copied_at: float) -> None:
        if self._engine is None:
            return
        choice, now = preemption.choice, self._ns(at)
        self._end_phase(choice, now)
        self._num_preemptions += 1
        size: Attributes = {"llm.preemption.blocks": preemption.num_blocks}
        attributes = size | {
            "llm.preemption.mode": preemption.mode,
            "llm.preemption.reason": preemption.cause,
            "llm.preemption.tokens": preemption.num_tokens,
            "llm.preemption.beneficiary": preemption.beneficiary.rpartition("#")[0],
        }
        span = self._phase(choice, "llm.preempted", now, attributes)
        if preemption.mode == "swap":
            self._swapped[choice] = self._child(
                "llm.swapped", at=self._ns(copied_at), parent=span, attributes=size | {"llm.choice": choice}
            )
        recomputes = preemption.mode == "recompute"
        self._next[choice] = "llm.decode" if choice in self._begun and not recomputes else "llm.prefill", recomputes
        self._note_seats()

    def finished(self, choice: int, at: float) -> None:
        now = self._ns(at)
        self._end_phase(choice, now)
        self._num_open -= 1
        if self._num_open == 0:
            self._engine_ended = now
        self._note_seats()

    def answered(self, end: End) -> None:
        """What came of it in the engine."""
        if self._engine is None or end.usage is None or end.timing is None:
            return
        reasons = end.finish_reason if isinstance(end.finish_reason, tuple) else (end.finish_reason,)
        ttft = end.timing.ttft_ms
        self._engine.set_attributes(
            {
                "gen_ai.response.model": self._tracing.model,
                "gen_ai.response.finish_reasons": [reason.value for reason in reasons],
                "gen_ai.usage.input_tokens": end.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": end.usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": end.usage.cached_tokens,
                "gen_ai.latency.time_in_queue": end.timing.queued_ms / 1000,
                "gen_ai.latency.e2e": end.timing.total_ms / 1000,
                "llm.preemptions": self._num_preemptions,
            }
        )
        if ttft is not None:
            self._engine.set_attribute("gen_ai.latency.time_to_first_token", ttft / 1000)
        if end.error is not None:
            _fail(self._engine, end.error.code)

    def dropped(self) -> None:
        """The engine has it no more, finished or not."""
        if self._engine is not None and self._engine_ended is None:
            self._engine_ended = self._now()
            self._leave_engine(self._engine_ended)

    def _leave_engine(self, now: int) -> None:
        for choice in list(self._phases):
            self._end_phase(choice, now)
        self._note_seats()

    def _phase(self, choice: int, name: str, at: int, attributes: Attributes) -> Span:
        span = self._child(name, at=at, parent=self._engine, attributes=attributes | {"llm.choice": choice})
        self._phases[choice] = name, span
        return span

    def _end_phase(self, choice: int, at: int) -> None:
        swapped, phase = self._swapped.pop(choice, None), self._phases.pop(choice, None)
        if swapped is not None:
            swapped.end(at)
        if phase is not None:
            phase[1].end(at)

    def _note_seats(self) -> None:
        if not any(name != "llm.preempted" for name, _ in self._phases.values()):
            self._tracing.seated.pop(self, None)

    def _child(
        self,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        *,
        at: int | None = None,
        parent: Span | None = None,
        attributes: Attributes,
    ) -> Span:
        assert self._tracing.tracer is not None, "nothing is recorded without a tracer"
        context = trace.set_span_in_context(parent or self._span, Context())
        began = self._now() if at is None else at
        return self._tracing.tracer.start_span(name, context, kind, attributes, start_time=began)

    def _now(self) -> int:
        return self._ns(self._tracing.clock.now())

    def _ns(self, at: float) -> int:
        return self._epoch + int(at * 1e9)


class Sending:
    """A record on its way. `traceparent`: its one header of that name."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self.traceparent = format_traceparent(span.get_span_context())

    def acknowledged(self, offset: int | None, num_records: int) -> None:
        """It landed at `offset`, or nobody knows; num_records: of its attempt, so far."""
        self._span.set_attribute("llm.reply.records", num_records)
        if offset is not None:
            self._span.set_attribute("messaging.kafka.offset", offset)
        else:
            _fail(self._span, "unacknowledged")

    def landed(self, landed: bool) -> None:
        """As `acknowledged`, where nobody says at which offset."""
        if not landed:
            _fail(self._span, "unacknowledged")


def format_traceparent(context: SpanContext) -> str:
    """W3C Trace Context, version 00."""
    ids = f"{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}"
    return f"00-{ids}-{context.trace_flags:02x}"


def operation_of(request: PromptRequest) -> str:
    """Its `gen_ai.operation.name`."""
    return "chat" if request.messages is not None else "text_completion"


def _request_attributes(request: PromptRequest, operation: str, model: str, max_tokens: int) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": request.model or model,
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k,
        "gen_ai.request.choice.count": request.n,
    }
    if request.seed is not None:
        # OTLP has signed 64 bits, a seed may have 64 without a sign.
        attributes["gen_ai.request.seed"] = request.seed if request.seed < 2**63 else str(request.seed)
    return attributes


def _messaging(operation: str) -> Attributes:
    return {
        "messaging.system": "kafka",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }


def _fail(span: Span, error_type: str) -> None:
    span.set_attribute("error.type", str(error_type))
    span.set_status(StatusCode.ERROR)


def _new_context(trace_id: int) -> SpanContext:
    """Of a request without a trace, where nothing is traced: its records and log lines can still be told by it."""
    return SpanContext(trace_id, secrets.randbits(64) or 1, is_remote=False, trace_flags=TraceFlags(0))


class _HeaderGetter(Getter[Headers]):
    """Kafka headers may repeat: the last one counts (protocol.md 2)."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        values = [value for name, value in carrier if name == key and value is not None]
        return [values[-1].decode("utf-8", "replace")] if values else None

    def keys(self, carrier: Headers) -> list[str]:
        return [name for name, _ in carrier]
