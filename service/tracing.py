"""The spans of a client's call (docs/metrics.md): made where the application has set a tracer provider up."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import schemas.otel_lines  # noqa: F401  before OpenTelemetry

# isort: split
from opentelemetry import context, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from schemas.reply_log import ReplyLog
from schemas.request import PromptRequest

try:
    _tracer: trace.Tracer = trace.get_tracer("carousel.client")
except Exception:  # OTEL_PYTHON_TRACER_PROVIDER names none that works, which OpenTelemetry has logged: no spans
    _tracer = trace.NoOpTracer()
# W3C, as the contract has it (protocol.md 2), whatever OTEL_PROPAGATORS says of the application's other traffic.
_W3C = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])


class CallTrace:
    """The spans of one call; nothing is recorded without a provider, and the caller's context travels all the same.

    Args:
        headers: W3C headers of the caller's context; None: the current one, now.
    """

    def __init__(self, request: PromptRequest, headers: Mapping[str, str] | None) -> None:
        self._request = request
        self._given = dict(headers or {})
        self._parent = context.get_current() if headers is None else _W3C.extract(headers, context.Context())
        self._call: Span | None = None  # while it is recorded
        self._receiving: Span | None = None

    def begin(self) -> None:
        """It is about to be published."""
        request = self._request
        operation = "chat" if request.messages is not None else "text_completion"
        attributes: dict[str, AttributeValue] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "carousel"}
        if request.model is not None:
            attributes["gen_ai.request.model"] = request.model
        if request.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = request.max_tokens
        name = operation if request.model is None else f"{operation} {request.model}"
        span = _tracer.start_span(name, self._parent, SpanKind.CLIENT, attributes)
        if span.is_recording():
            self._call = span
        elif span.get_span_context().is_valid:
            # The application's sampler has dropped it: that is told, or the worker would begin a trace of its own.
            self._parent = trace.set_span_in_context(span, self._parent)

    @contextmanager
    def sending(self, lane: str, correlation_id: str) -> Iterator["Sending"]:
        """While the request record is on its way."""
        if self._call is None:
            yield Sending(None, self._given or _headers_of(self._parent))
            return
        attributes = {"messaging.destination.name": lane}
        span = self._child(f"send {lane}", SpanKind.PRODUCER, "send", correlation_id, attributes)
        try:
            yield Sending(span, self._given | _headers_of(trace.set_span_in_context(span, self._parent)))
        except BaseException as error:
            _fail(span, type(error).__name__)
            raise
        finally:
            span.end()

    def receive(self, template: str, correlation_id: str) -> None:
        """The request is acknowledged; the answer is waited for. template: in place of the reply topic's name."""
        if self._call is not None:
            attributes = {"messaging.destination.template": template, "messaging.destination.temporary": True}
            self._receiving = self._child(
                f"process {template}", SpanKind.CONSUMER, "process", correlation_id, attributes
            )

    def fail(self, error: BaseException) -> None:
        """It ends with that error, not with an `end`."""
        for span in (self._receiving, self._call):
            if span is not None:
                _fail(span, type(error).__name__)

    def finish(self, log: ReplyLog, ttft: float | None) -> None:
        """It is left, ended or not. ttft: seconds."""
        if self._receiving is not None:
            self._receiving.set_attribute("llm.attempts", log.num_begins)
            if log.end_trace is not None:
                written = trace.get_current_span(_W3C.extract({"traceparent": log.end_trace}, context.Context()))
                self._receiving.add_link(written.get_span_context())
        if self._call is not None:
            self._call.set_attributes(_answer(log, ttft))
        for span in (self._receiving, self._call):
            if span is not None:
                if log.end is not None and log.end.error is not None:
                    _fail(span, log.end.error.code)
                span.end()
        self._receiving = self._call = None

    def _child(
        self, name: str, kind: SpanKind, operation: str, correlation_id: str, attributes: dict[str, Any]
    ) -> Span:
        assert self._call is not None, "nothing is recorded"
        common = {
            "messaging.system": "kafka",
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
            "messaging.message.conversation_id": correlation_id,
        }
        parent = trace.set_span_in_context(self._call, context.Context())
        return _tracer.start_span(name, parent, kind, common | attributes)


class Sending:
    """A request record on its way, and its trace headers."""

    def __init__(self, span: Span | None, headers: Mapping[str, str]) -> None:
        self._span = span
        self.headers = headers

    def acknowledged(self, metadata: Any) -> None:
        """metadata: aiokafka's, of the record."""
        if self._span is not None:
            self._span.set_attribute("messaging.destination.partition.id", str(metadata.partition))
            self._span.set_attribute("messaging.kafka.offset", metadata.offset)


def _headers_of(parent: context.Context) -> dict[str, str]:
    headers: dict[str, str] = {}
    _W3C.inject(headers, parent)
    return headers


def _answer(log: ReplyLog, ttft: float | None) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {}
    if log.begin is not None:
        attributes["gen_ai.response.model"] = log.begin.model
    if ttft is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = ttft
    end = log.end
    if end is not None:
        reasons = end.finish_reason if isinstance(end.finish_reason, tuple) else (end.finish_reason,)
        attributes["gen_ai.response.finish_reasons"] = [reason.value for reason in reasons]
        if end.usage is not None:
            attributes["gen_ai.usage.input_tokens"] = end.usage.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = end.usage.completion_tokens
    return attributes


def _fail(span: Span, error_type: str) -> None:
    span.set_attribute("error.type", str(error_type))
    span.set_status(StatusCode.ERROR)
