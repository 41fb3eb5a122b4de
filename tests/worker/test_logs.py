"""The log's lines: whatever a caller sends, a line is a line, and a terminal is left alone."""

import json
import subprocess
import sys

import pytest

HOSTILE = 'x\n{"event": "request.finished", "worker": "forged"}\n\x1b[31mred\x9b\u2028'
PROGRAM = """
import logging, sys, warnings
import structlog
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
START
hostile = sys.argv[1]
parent = "00-5bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TraceContextTextMapPropagator().extract({"traceparent": parent, "tracestate": hostile})
logging.getLogger("some.library").error("it said %s", hostile)
warnings.warn(hostile)
structlog.get_logger("ours").warning(hostile, value=hostile, several=[hostile], bare="\\x1b[2J")
try:
    raise ValueError(hostile)
except ValueError:
    structlog.get_logger("ours").exception("ours.failed")
    logging.getLogger("some.library").exception("it failed")
"""
WORKER = "from worker.logs import start_logging; start_logging('w1', 'info', {json_lines})"
COMMAND = """
from service.cli.running import run
async def nothing(): pass
run(nothing())
"""


OWN_HANDLER = (
    """
import logging
own = logging.getLogger("own")
own.addHandler(logging.StreamHandler())
own.propagate = False
"""
    + WORKER.format(json_lines=True)
    + """
logging.getLogger("own.part").warning("it has a handler of its own")
raise SystemExit
"""
)


def said(start: str) -> bytes:
    words = [sys.executable, "-c", PROGRAM.replace("START", start), HOSTILE]
    done = subprocess.run(words, capture_output=True, check=True, timeout=60)
    assert done.stdout == b""
    return done.stderr


def test_each_line_of_json_is_one_object():
    """Lines of libraries too, with all that a line has."""
    lines = [json.loads(line) for line in said(WORKER.format(json_lines=True)).decode().split("\n")[:-1]]
    assert len(lines) == 6
    for line in lines:
        assert {"event", "level", "timestamp", "worker"} <= line.keys()
        assert line["worker"] == "w1"
    state, library = lines[:2]
    assert state["logger"] == "opentelemetry.trace.span"
    assert 'x\n{"event": "request.finished"' in state["event"]
    assert (library["logger"], library["level"], library["event"]) == ("some.library", "error", f"it said {HOSTILE}")
    assert lines[2]["logger"] == "py.warnings"
    assert [line["exception"].splitlines()[0] for line in lines[4:]] == ["Traceback (most recent call last):"] * 2


def test_a_library_that_writes_by_itself():
    """torch and transformers do."""
    (line,) = said(OWN_HANDLER).splitlines()
    assert json.loads(line)["logger"] == "own.part"


@pytest.mark.parametrize("start", [WORKER.format(json_lines=False), COMMAND], ids=["worker", "command"])
def test_a_terminal_is_not_moved(start: str):
    """Of what is no colour of ours every control character is escaped, and no line begins as a caller wants it to."""
    text = said(start).decode()
    assert text.count("forged") >= 6
    assert not [line for line in text.split("\n") if line.startswith(("{", "x"))]
    assert "\x1b[31mred" not in text
    assert "\x1b[2J" not in text
    assert not [c for c in text if not c.isprintable() and c not in "\n\x1b"]
