"""What OpenTelemetry says of a bad OTEL_* variable is one line, not a traceback. Import it before OpenTelemetry, whose
API reads variables, and logs of them, while it is imported."""

import logging

_READERS = (  # of variables
    "opentelemetry.context",
    "opentelemetry.propagate",
    "opentelemetry.sdk.resources",
    "opentelemetry.sdk.trace",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.util._providers",
)


def _in_one_line(record: logging.LogRecord) -> bool:
    if record.exc_info:
        record.msg, record.args = f"{record.getMessage()} ({record.exc_info[1]!r})", ()
        record.exc_info = record.exc_text = None
    return True


for _reader in _READERS:
    logging.getLogger(_reader).addFilter(_in_one_line)
