"""Where a process's spans go: to any OTLP endpoint over HTTP, by the standard OTEL_* variables, or nowhere."""

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

import schemas.otel_lines  # noqa: F401  before OpenTelemetry

# isort: split
from opentelemetry.trace import set_tracer_provider

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

STOP_S = 2.0  # for the last spans; an endpoint that is away does not hold the end up
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_ATTRIBUTES = "OTEL_RESOURCE_ATTRIBUTES"

log = structlog.get_logger(__name__)


class Exporting:
    """Where the spans of this process go; `tracer` is None where they go nowhere.

    Args:
        service: `service.name`, where the environment names none.
        instance: `service.instance.id`.
        environment: the process's: what the OpenTelemetry specification says of OTEL_* holds.
    """

    def __init__(self, service: str, instance: str, environment: Mapping[str, str] = os.environ) -> None:
        self._provider = _new_provider(service, instance, environment) if _wanted(environment) else None
        self.tracer = None if self._provider is None else self._provider.get_tracer(service)

    def install(self) -> None:
        """Makes it the process's own: whoever makes spans in it exports them here."""
        if self._provider is not None:
            set_tracer_provider(self._provider)

    def close(self) -> None:
        """Exports what is left, for at most STOP_S."""
        if self._provider is None:
            return
        stopping = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        stopping.start()
        stopping.join(STOP_S)


def _new_provider(service: str, instance: str, environment: Mapping[str, str]) -> "TracerProvider | None":
    try:  # who exports pays for it
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from schemas.trace_ids import TraceIds

        attributes = {"service.instance.id": instance}
        if "OTEL_SERVICE_NAME" not in environment and "service.name=" not in environment.get(_ATTRIBUTES, ""):
            attributes["service.name"] = service
        resource = Resource.create(attributes)
        provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=TraceIds())
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))  # of a bounded queue: more is dropped
    except ImportError:
        log.warning("telemetry.not_tracing", meaning="pip install opentelemetry-exporter-otlp-proto-http")
        return None
    except Exception as e:  # of any OTEL_* variable; which errors, each part of the SDK decides for itself, and where
        log.warning("telemetry.not_tracing", error=str(e) or repr(e), meaning="an OTEL_* variable has a bad value")
        return None
    log.info("telemetry.tracing", endpoint=_endpoint(environment))
    return provider


def _endpoint(environment: Mapping[str, str]) -> str:
    return next((environment[name] for name in _ENDPOINTS if environment.get(name)), "")


def _wanted(environment: Mapping[str, str]) -> bool:
    """Whether spans are to be exported, by the standard variables."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    endpoint = _endpoint(environment)
    if not endpoint:
        return False
    if not endpoint.startswith(("http://", "https://")):
        log.warning("telemetry.not_tracing", endpoint=endpoint, meaning="an endpoint is a URL: http://HOST:4318")
        return False
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        log.warning(
            "telemetry.not_tracing",
            protocol=protocol,
            meaning="spans are exported by http/protobuf only: give its endpoint (port 4318) and that protocol",
        )
    return protocol == "http/protobuf"
