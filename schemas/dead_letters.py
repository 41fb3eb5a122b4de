"""Headers of a dead-lettered record (protocol.md 7). Names and encodings are Spring Kafka's, so that its tools work."""

from collections.abc import Sequence

from schemas.records import InputRef


def dead_letter_headers(
    headers: Sequence[tuple[str, bytes]], source: InputRef, reason: str, message: str
) -> list[tuple[str, bytes]]:
    """The record's own headers as they were, then why it is here and where it came from.

    Spring writes the partition as a 4-byte and offset and timestamp as 8-byte big-endian integers.
    """
    return [
        *headers,
        ("dlq_reason", reason.encode()),
        ("dlq_message", message.encode()),
        ("kafka_dlt-original-topic", source.topic.encode()),
        ("kafka_dlt-original-partition", source.partition.to_bytes(4, signed=True)),
        ("kafka_dlt-original-offset", source.offset.to_bytes(8, signed=True)),
        ("kafka_dlt-original-timestamp", source.timestamp_ms.to_bytes(8, signed=True)),
        ("kafka_dlt-exception-message", message.encode()),
    ]
