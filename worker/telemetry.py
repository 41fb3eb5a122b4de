"""Logs and traces: every event key and span name of the worker in one place."""

import logging
import sys
import time
from collections.abc import Mapping, Sequence

import structlog
from opentelemetry import propagate, trace
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind

from schemas.records import End

log = structlog.get_logger(__name__)
REPEAT_S = 30.0  # a library's line is logged once in this time: a broker that is gone makes aiokafka log without end
_TRACER = "carousel.worker"


class RequestSpan:
    """The span of one request, child of its producer's (semantic conventions for messaging)."""

    def __init__(self, topic: str, headers: Sequence[tuple[str, bytes]]) -> None:
        parent = propagate.extract(headers, getter=_HeaderGetter())
        self._span = trace.get_tracer(_TRACER).start_span(
            f"process {topic}",
            context=parent,
            kind=SpanKind.CONSUMER,
            attributes={
                "messaging.system": "kafka",
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.destination.name": topic,
            },
        )

    @property
    def trace_id(self) -> str:
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    @property
    def traceparent(self) -> str | None:
        """W3C trace context of this span, for the reply's `begin` and `end`; None while nothing is traced."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier, context=trace.set_span_in_context(self._span))
        return carrier.get("traceparent")

    def record_end(self, outcome: str, end: End | None) -> None:
        self._span.set_attribute("llm.outcome", outcome)
        if end is None or end.usage is None:
            return
        reasons = end.finish_reason if isinstance(end.finish_reason, tuple) else (end.finish_reason,)
        self._span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [reason.value for reason in reasons],
                "gen_ai.usage.input_tokens": end.usage.prompt_tokens,
                "gen_ai.usage.output_tokens": end.usage.completion_tokens,
            }
        )

    def finish(self) -> None:
        self._span.end()


def log_finished(outcome: str, end: End | None, **request: object) -> None:
    """The canonical line of a finished request; `request`: what tells it from others."""
    log.info(
        "request.finished",
        outcome=outcome,
        **request,
        finish_reason=end.finish_reason if end else None,
        error=end.error.code if end and end.error else None,
        prompt_tokens=end.usage.prompt_tokens if end and end.usage else None,
        completion_tokens=end.usage.completion_tokens if end and end.usage else None,
        queued_ms=end.timing.queued_ms if end and end.timing else None,
        ttft_ms=end.timing.ttft_ms if end and end.timing else None,
        total_ms=end.timing.total_ms if end and end.timing else None,
    )


class _HeaderGetter(Getter[Sequence[tuple[str, bytes]]]):
    """Kafka headers may repeat: the last one counts (protocol.md 2)."""

    def get(self, carrier: Sequence[tuple[str, bytes]], key: str) -> list[str] | None:
        values = [value for name, value in carrier if name == key and value is not None]
        return [values[-1].decode("utf-8", "replace")] if values else None

    def keys(self, carrier: Sequence[tuple[str, bytes]]) -> list[str]:
        return [name for name, _ in carrier]


class _OnceInAWhile(logging.Filter):
    """Lets the same line of the same logger through once in REPEAT_S."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = (record.name, str(record.msg)), time.monotonic()
        if now - self._logged_at.get(key, -REPEAT_S) < REPEAT_S:
            return False
        self._logged_at[key] = now
        return True


def start_telemetry(worker: str, level: str, json_lines: bool) -> None:
    """Sets structlog, the libraries' loggers and the tracer up. Logs go to stderr: stdout is for `ready`."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info if json_lines else _as_it_is,
            structlog.processors.JSONRenderer(sort_keys=False) if json_lines else structlog.dev.ConsoleRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_OnceInAWhile())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(levelname)s %(name)s %(message)s")
    trace.set_tracer_provider(
        TracerProvider(resource=Resource.create({"service.name": "carousel-worker", "service.instance.id": worker}))
    )


def _as_it_is(_logger: object, _name: str, event: Mapping[str, object]) -> Mapping[str, object]:
    return event
