"""Trace ids of requests whose producer gave none: the same for every attempt, by whichever worker.

A span without a parent draws its trace id, so that a request that is resumed after a crash would be two traces. Here
the id is a hash of where the request's record lies, which all who serve it know.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import schemas.otel_lines  # noqa: F401  before OpenTelemetry

# isort: split
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from schemas.records import InputRef

_next: ContextVar[int | None] = ContextVar("trace id of roots", default=None)


def trace_id_of(source: InputRef) -> int:
    """128 bits, uniform as samplers want them, never 0."""
    place = f"{source.topic}/{source.partition}/{source.offset}/{source.timestamp_ms}"
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=16).digest()) or 1


@contextmanager
def roots_in(trace_id: int) -> Iterator[None]:
    """Spans without a parent that are started here belong to that trace, where the provider has TraceIds."""
    token = _next.set(trace_id)
    try:
        yield
    finally:
        _next.reset(token)


class TraceIds(RandomIdGenerator):
    """For a TracerProvider: random ids, but for `roots_in`."""

    def generate_trace_id(self) -> int:
        return _next.get() or super().generate_trace_id()
