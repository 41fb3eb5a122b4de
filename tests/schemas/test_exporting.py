"""Where spans go, by the standard variables; that they arrive: e2e/test_telemetry.py."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from structlog.testing import capture_logs

from schemas import exporting
from schemas.exporting import Exporting

BASE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
TRACES = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}


@pytest.mark.parametrize(
    ("environment", "exports"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        (BASE, True),
        (TRACES, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4318"}, False),
        (BASE | {"OTEL_SDK_DISABLED": "TRUE"}, False),
        (BASE | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (BASE | {"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (BASE | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
        (BASE | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, False),
        (BASE | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, True),
    ],
)
def test_whether_there_is_a_tracer(environment: dict[str, str], exports: bool) -> None:
    """An endpoint turns tracing on; the variables that turn it off do; without a tracer there is no provider."""
    found = Exporting("carousel-worker", "w1", environment)
    assert (found.tracer is not None) == exports
    found.close()


def test_another_protocol_is_told() -> None:
    """Whoever asks for gRPC hears what to do."""
    with capture_logs() as lines:
        Exporting("carousel-worker", "w1", BASE | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert lines[0]["event"] == "telemetry.not_tracing"
    assert "http/protobuf" in lines[0]["meaning"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_BSP_SCHEDULE_DELAY", "-1"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "abc"),
        ("OTEL_LINK_ATTRIBUTE_COUNT_LIMIT", "-1"),
        ("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "nobody"),
    ],
)
def test_a_bad_variable_turns_tracing_off_and_says_so(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker does not fail to start for its traces."""
    monkeypatch.setenv(variable, value)
    with capture_logs() as lines:
        assert Exporting("carousel-worker", "w", BASE).tracer is None
    assert (lines[0]["event"], lines[0]["log_level"]) == ("telemetry.not_tracing", "warning")


ONE_CALL = """
from carousel import Client
from schemas.request import PromptRequest
from service.cli.running import run
from service.tracing import CallTrace

async def call():
    CallTrace(PromptRequest(prompt="hi"), None).begin()
    print("called")

run(call())
"""


@pytest.mark.parametrize("endpoint", [{}, BASE], ids=["no endpoint", "endpoint"])
@pytest.mark.parametrize(
    ("variable", "value", "always"),
    [
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-1", False),  # the SDK fails while it is imported
        ("OTEL_PYTHON_TRACER_PROVIDER", "nosuch", True),  # so does the API, without an endpoint too
        ("OTEL_PYTHON_CONTEXT", "nosuch", True),
        ("OTEL_BSP_SCHEDULE_DELAY", "x", False),
    ],
)
def test_a_bad_variable_costs_no_more_than_a_line(
    variable: str, value: str, always: bool, endpoint: dict[str, str]
) -> None:
    """What is read on import, too, and in a process without tracing; no traceback beside the answer."""
    words = [sys.executable, "-c", ONE_CALL]
    environment = os.environ | endpoint | {variable: value}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "called\n"), done.stderr
    assert len(done.stderr.splitlines()) == int(always or endpoint != {}), done.stderr


def test_without_the_exporter_package_nothing_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base install has no exporter: the line says which package."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with capture_logs() as lines:
        assert Exporting("carousel-client", "c", BASE).tracer is None
    assert "pip install" in lines[0]["meaning"]


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "carousel-worker"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=other"}, "other"),
    ],
)
def test_the_environment_may_name_the_service(
    environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """service.name is ours only where OTEL_* names none; the instance is always the worker's name."""
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    found = Exporting("carousel-worker", "w1", BASE | environment)
    assert found._provider is not None
    assert found._provider.resource.attributes["service.name"] == name
    assert found._provider.resource.attributes["service.instance.id"] == "w1"
    found.close()


def test_closing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that takes the spans and never answers holds the end up for STOP_S and no longer."""
    monkeypatch.setattr(exporting, "STOP_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address["OTEL_EXPORTER_OTLP_ENDPOINT"])
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
        found = Exporting("carousel-worker", "w1", address)
        assert found.tracer is not None
        found.tracer.start_span("x").end()
        began = time.monotonic()
        found.close()
        assert 0.2 < time.monotonic() - began < 2
        for thread in threading.enumerate():
            if thread.name in ("last spans", "OtelBatchSpanRecordProcessor"):
                thread.join(10)  # what it logs is of this test
