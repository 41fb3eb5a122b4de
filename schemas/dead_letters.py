"""Headers of a dead-lettered record (protocol.md 7). Names and encodings are Spring Kafka's, so that its tools work."""

from collections.abc import Sequence

from schemas.headers import TRACEPARENT
from schemas.records import InputRef

# What a worker adds, in this order, after the record's own headers.
DEAD_LETTER_HEADERS = (
    "dlq_reason",
    "dlq_message",
    "kafka_dlt-original-topic",
    "kafka_dlt-original-partition",
    "kafka_dlt-original-offset",
    "kafka_dlt-original-timestamp",
    "kafka_dlt-exception-message",
)

# What a worker adds after them where the record did not fit as it was: how many bytes the cut part had.
CUT_VALUE, CUT_KEY, CUT_HEADERS = "truncated_from", "truncated_key_from", "truncated_headers_from"


def dead_letter_headers(
    headers: Sequence[tuple[str, bytes]], source: InputRef, reason: str, message: str, traceparent: str | None = None
) -> list[tuple[str, bytes]]:
    """The record's own headers as they were, then why it is here and where it came from.

    Of several `traceparent` only the last stays, which is the one that counts; where there is none, ours is added.
    Spring writes the partition as a 4-byte and offset and timestamp as 8-byte big-endian integers.
    """
    values = (
        reason.encode(),
        message.encode(),
        source.topic.encode(),
        source.partition.to_bytes(4, signed=True),
        source.offset.to_bytes(8, signed=True),
        source.timestamp_ms.to_bytes(8, signed=True),
        message.encode(),
    )
    last = max(
        (i for i, (name, value) in enumerate(headers) if name == TRACEPARENT and value is not None), default=None
    )
    own = [pair for i, pair in enumerate(headers) if pair[0] != TRACEPARENT or i == last]
    added = list(zip(DEAD_LETTER_HEADERS, values, strict=True))
    if last is None and traceparent is not None:
        added.append((TRACEPARENT, traceparent.encode()))
    return [*own, *added]
