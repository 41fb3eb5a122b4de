"""How a process's log lines look, its libraries' among them: one line each, whatever a caller's bytes say."""

import logging
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import structlog

Processor = Any  # structlog's own alias promises less than mypy wants to know


def before_rendering(json_lines: bool, more: Iterable[Processor] = ()) -> list[Processor]:
    """What every line goes through, ours as a library's. more: processors of the process."""
    ours = [
        structlog.contextvars.merge_contextvars,
        *more,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    return ours if json_lines else [*ours, _escaped]


def renderer(json_lines: bool) -> Processor:
    if json_lines:
        return structlog.processors.JSONRenderer(sort_keys=False)
    return structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)


def library_formatter(json_lines: bool, more: Iterable[Processor] = ()) -> logging.Formatter:
    """Renders the lines of the standard library's logging as ours are."""
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[_add_logger, *before_rendering(json_lines, more)],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer(json_lines)],
    )


def printable(text: str) -> str:
    """Without what would move a terminal's cursor, colour it or end the line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _add_logger(_logger: object, _name: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    event["logger"] = event["_record"].name
    return event


def _escaped(_logger: object, _name: str, event: Mapping[str, Any]) -> Mapping[str, Any]:
    """For a terminal. What is no string is shown by its `repr`, which escapes; a traceback keeps its lines, indented:
    none begins as a line of ours does."""
    return {printable(name): _escaped_value(name, value) for name, value in event.items()}


def _escaped_value(name: str, value: Any) -> Any:
    if name in ("exception", "stack") and isinstance(value, str):
        return "\n".join(f"  {printable(line)}" for line in value.split("\n"))
    return printable(value) if isinstance(value, str) else value
