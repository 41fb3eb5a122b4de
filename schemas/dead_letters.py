"""Headers of a dead-lettered record (protocol.md 7). Names and encodings are Spring Kafka's, so that its tools work."""

from collections.abc import Sequence

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


def dead_letter_headers(
    headers: Sequence[tuple[str, bytes]], source: InputRef, reason: str, message: str
) -> list[tuple[str, bytes]]:
    """The record's own headers as they were, then why it is here and where it came from.

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
    return [*headers, *zip(DEAD_LETTER_HEADERS, values, strict=True)]
