"""Logs: structlog's set-up, what the libraries may say, and the canonical line of a finished request."""

import logging
import sys
import time
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

from schemas.log_lines import before_rendering, library_formatter, renderer
from schemas.records import End

log = structlog.get_logger("worker")
REPEAT_S = 30.0  # a library's line is logged once in this time: a broker that is gone makes aiokafka log without end


def log_finished(outcome: str, end: End | None, **request: object) -> None:
    """The canonical line of a finished request; `request`: what tells it from others."""
    usage = end.usage if end else None
    timing = end.timing if end else None
    log.info(
        "request.finished",
        outcome=outcome,
        **request,
        finish_reason=end.finish_reason if end else None,
        error=end.error.code if end and end.error else None,
        prompt_tokens=usage.prompt_tokens if usage else None,
        completion_tokens=usage.completion_tokens if usage else None,
        cached_tokens=usage.cached_tokens if usage else None,
        queued_ms=timing.queued_ms if timing else None,
        ttft_ms=timing.ttft_ms if timing else None,
        total_ms=timing.total_ms if timing else None,
        preemptions=end.preemptions.to_fields() if end and end.preemptions else None,
    )


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


def start_logging(worker: str, level: str, json_lines: bool) -> None:
    """Sets structlog and the libraries' loggers up. Logs go to stderr: stdout is for `ready`."""

    def add_worker(_logger: object, _name: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        event.setdefault("worker", worker)
        return event

    structlog.configure(
        processors=[*before_rendering(json_lines, [add_worker]), renderer(json_lines)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_OnceInAWhile())
    handler.setFormatter(library_formatter(json_lines, [add_worker]))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(True)
    _take_over()
    # One line for each span that is dropped costs more than the span; that the endpoint fails, the exporter says.
    logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.ERROR)


def _take_over() -> None:
    """What torch and transformers would write on stderr themselves goes the way of all lines."""
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ())[:]:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                assert isinstance(logger, logging.Logger), "no placeholder has handlers"
                logger.removeHandler(handler)
                logger.propagate = True
