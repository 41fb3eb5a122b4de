"""The client's spans, as docs/metrics.md lists them, and the headers that its requests carry."""

import os
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode, Tracer, format_span_id, format_trace_id

from schemas.reasons import FinishReason
from service import tracing
from service.client import Client
from service.errors import RequestTimeout
from tests import documented
from tests.service.responder import Reply, Responder

TRACE = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "tracestate": "a=1", "baggage": "k=v"}
WORKER_SPAN = "3" * 16


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What an application's provider is given."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    return exporter


def by_name(spans: InMemorySpanExporter, lane: str) -> tuple[ReadableSpan, ReadableSpan, ReadableSpan]:
    """(call, send, process); asserts that there are no others."""
    found = {span.name: span for span in spans.get_finished_spans()}
    assert set(found) == {"text_completion", f"send {lane}", "process replies.{correlation_id}"}
    return found["text_completion"], found[f"send {lane}"], found["process replies.{correlation_id}"]


async def traced_echo(reply: Reply) -> None:
    """Answers as a worker that traces: `end` has the context of the span that wrote it."""
    attempt = await reply.begin()
    await reply.tokens(attempt, 0, [97, 98])
    reply.trace = f"00-{'1' * 32}-{WORKER_SPAN}-01"
    await reply.end(attempt, 2)


def assert_documented(found: tuple[ReadableSpan, ...], optional: set[str]) -> None:
    rows = documented.span_attributes()
    for span, row in zip(found, ("client chat", "client send", "client process"), strict=True):
        assert set(span.attributes) == rows[row] - optional, row


async def test_what_the_applications_sampler_drops_the_worker_does_not_begin(
    client: Client, responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in ten of an application's calls is one in ten of the worker's traces: the other nine say "not sampled"."""
    monkeypatch.setattr(tracing, "_tracer", TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("t"))
    await client.complete(prompt="x", max_tokens=5)
    await client.complete(prompt="x", max_tokens=5, trace=TRACE)  # who gives a context has decided
    dropped, given = (dict(reply.headers) for reply in responder.replies)
    _version, trace_id, span_id, flags = dropped["traceparent"].decode().split("-")
    assert int(trace_id, 16)
    assert int(span_id, 16)
    assert not int(flags, 16) & 1
    assert given["traceparent"].decode() == TRACE["traceparent"]


async def test_a_call(client: Client, responder: Responder, spans: InMemorySpanExporter) -> None:
    """chat under the caller's context, send and process under it; process links to who wrote the end."""
    responder.script = traced_echo
    completion = await client.complete(prompt="x", max_tokens=5, trace=TRACE)
    assert completion.finish_reason is FinishReason.STOP
    call, send, process = by_name(spans, f"{responder.lane_prefix}standard")
    assert {format_trace_id(span.context.trace_id) for span in (call, send, process)} == {"1" * 32}
    assert format_span_id(call.parent.span_id) == "2" * 16
    assert send.parent.span_id == process.parent.span_id == call.context.span_id
    assert (call.kind, send.kind, process.kind) == (SpanKind.CLIENT, SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert [format_span_id(link.context.span_id) for link in process.links] == [WORKER_SPAN]
    assert_documented((call, send, process), {"error.type", "gen_ai.request.model"})
    assert call.attributes["gen_ai.usage.output_tokens"] == 2
    assert call.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert 0 < call.attributes["gen_ai.response.time_to_first_chunk"] < 10
    assert process.attributes["llm.attempts"] == 1
    (reply,) = responder.replies
    assert send.attributes["messaging.kafka.offset"] == reply.input.offset
    assert send.attributes["messaging.message.conversation_id"] == reply.headers["correlation_id"].decode()


async def test_exactly_one_traceparent_of_the_send(
    client: Client, responder: Responder, spans: InMemorySpanExporter
) -> None:
    """The request names the send span; tracestate and baggage of the caller go with it."""
    await client.complete(prompt="x", trace=TRACE)
    _, send, _ = by_name(spans, f"{responder.lane_prefix}standard")
    (reply,) = responder.replies
    assert [name for name, _ in reply.raw_headers if name == "traceparent"] == ["traceparent"]
    assert reply.headers["traceparent"] == f"00-{'1' * 32}-{format_span_id(send.context.span_id)}-01".encode()
    assert (reply.headers["tracestate"], reply.headers["baggage"]) == (b"a=1", b"k=v")


async def test_the_current_span_is_the_parent(
    client: Client, responder: Responder, spans: InMemorySpanExporter
) -> None:
    """Without `trace` the current context counts, that of the call of `stream`."""
    tracer: Tracer = tracing._tracer
    with tracer.start_as_current_span("application") as application:
        stream = client.stream(prompt="x")
    async for _ in stream:
        pass
    call = next(span for span in spans.get_finished_spans() if span.name == "text_completion")
    assert call.parent.span_id == application.get_span_context().span_id


async def test_without_a_provider_the_callers_context_still_travels(client: Client, responder: Responder) -> None:
    """Nothing is recorded; what the caller gives is on the request as it is, and what is current is, too."""
    await client.complete(prompt="x", trace=TRACE)
    assert {name: responder.replies[0].headers[name].decode() for name in TRACE} == TRACE
    await client.complete(prompt="x")
    assert "traceparent" not in responder.replies[1].headers
    with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(1, 2, False, trace.TraceFlags(1)))):
        await client.complete(prompt="x")
    assert responder.replies[2].headers["traceparent"] == f"00-{1:032x}-{2:016x}-01".encode()


async def test_a_failed_call_says_so(client: Client, responder: Responder, spans: InMemorySpanExporter) -> None:
    """A time-out is an error of the call and of its process span; every span has ended."""

    async def silent(reply: Reply) -> None:
        await reply.begin()

    responder.script = silent
    with pytest.raises(RequestTimeout):
        await client.complete(prompt="x", timeout=0.3)
    call, send, process = by_name(spans, f"{responder.lane_prefix}standard")
    for span in (call, process):
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes["error.type"] == "TimeoutError"
    assert "error.type" not in send.attributes


def test_propagators_of_the_application_are_not_ours() -> None:
    """The contract says which headers travel: a name that nobody knows does no harm, and another format does not
    replace `traceparent`."""
    code = (
        "from opentelemetry import context, trace\n"
        "from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags\n"
        "from service.tracing import _headers_of\n"
        "span = NonRecordingSpan(SpanContext(1, 2, False, TraceFlags(1)))\n"
        "print(sorted(_headers_of(trace.set_span_in_context(span, context.Context()))))"
    )
    for name in ("nobody", "b3"):
        environment = os.environ | {"OTEL_PROPAGATORS": name}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "['traceparent']\n"), done.stderr
