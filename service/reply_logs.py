"""Reads many per-request reply logs at once."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from aiokafka import TopicPartition

from schemas.errors import ProtocolError
from schemas.records import decode_reply
from schemas.reply_log import ReplyLog
from service.topic_reader import TopicReader


@dataclass(slots=True)
class TopicLog:
    """What is in a reply topic that should belong to one request."""

    begin: int  # first offset that Kafka still has
    end: int
    log: ReplyLog = field(default_factory=ReplyLog)
    last_ms: int | None = None  # timestamp of the last record; None: there is none
    sound: bool = True  # every record belongs to this request and keeps the contract


async def read_reply_logs(reader: TopicReader, topics: Iterable[str], prefix: str) -> dict[str, TopicLog]:
    """Partition 0 of each topic, by the reader rule. A topic is named `prefix` + correlation id."""
    bounds = await reader.bounds(TopicPartition(topic, 0) for topic in topics)
    found = {partition.topic: TopicLog(*ends) for partition, ends in bounds.items()}
    async for record in reader.records(bounds):
        topic_log = found[record.topic]
        topic_log.last_ms = record.timestamp
        if dict(record.headers).get("correlation_id") != record.topic.removeprefix(prefix).encode():
            topic_log.sound = False
        if not topic_log.sound:
            continue
        try:
            reply = decode_reply(record.headers, record.value)
            if reply is not None:
                topic_log.log.feed(record.offset, reply)
        except ProtocolError:
            topic_log.sound = False
    return found
