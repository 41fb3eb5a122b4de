"""Finds and deletes reply topics that their callers have left behind: those whose request ended long ago.

Careful by construction: a topic goes only when its log says that the request has ended, by the reader rule, and nothing
in it belongs to anybody else. A log that nothing was ever written to stays, for a client may keep it ready.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from schemas.connection import KafkaConnection
from schemas.topics import CLIENT_ID_PATTERN, control_topic, dlq_topic, is_valid_topic
from service.kafka import TopicAdmin
from service.reply_logs import TopicLog, read_reply_logs
from service.topic_reader import TopicReader

_READ_AT_ONCE = 200
_DELETED_AT_ONCE = 100


class Kept(StrEnum):
    """Why a topic under the reply prefix stays."""

    YOUNG = "ended not long ago"
    OPEN = "not ended"
    UNUSED = "never written to: a client may keep it ready"
    SHARED = "no log of one request alone"


@dataclass(slots=True)
class Reapable:
    """What there is under the reply prefix. `ended`: topic -> seconds since its last record, at least."""

    ended: dict[str, float] = field(default_factory=dict)
    kept: dict[Kept, int] = field(default_factory=dict)

    def keep(self, why: Kept, number: int = 1) -> None:
        if number:
            self.kept[why] = self.kept.get(why, 0) + number


async def find_reapable(
    connection: KafkaConnection, *, reply_prefix: str, lane_prefix: str, older_than: float
) -> Reapable:
    """Looks at every topic under the reply prefix. Raises ValueError, BrokerUnavailable and NotAuthorized.

    older_than: seconds since the last record.
    """
    if not reply_prefix or not is_valid_topic(reply_prefix):
        raise ValueError(f"{reply_prefix!r} is no reply prefix: it must be the beginning of a topic's name")
    found = Reapable()
    async with TopicReader(connection) as reader:
        topics = await reader.topics()
        candidates = []
        for topic, partitions in sorted(topics.items()):
            if not _is_reply_topic(topic, reply_prefix, lane_prefix):
                continue
            if len(partitions) == 1:
                candidates.append(topic)
            else:
                found.keep(Kept.SHARED)
        for start in range(0, len(candidates), _READ_AT_ONCE):
            batch = candidates[start : start + _READ_AT_ONCE]
            await _sort_out(reader, batch, reply_prefix, older_than, found)
    return found


async def delete_topics(connection: KafkaConnection, topics: Sequence[str]) -> None:
    """Deletes topics, many in a call. Raises NotAuthorized, TopicsFailed and BrokerUnavailable."""
    async with TopicAdmin(connection) as admin:
        for start in range(0, len(topics), _DELETED_AT_ONCE):
            await admin.delete(topics[start : start + _DELETED_AT_ONCE])


def _is_reply_topic(topic: str, reply_prefix: str, lane_prefix: str) -> bool:
    """Under the prefix, and nothing that a badly chosen prefix would catch, too."""
    if not topic.startswith(reply_prefix) or topic == reply_prefix or topic.startswith("__"):
        return False
    return not topic.startswith(lane_prefix) and topic not in (control_topic(lane_prefix), dlq_topic(lane_prefix))


async def _sort_out(
    reader: TopicReader, topics: Collection[str], reply_prefix: str, older_than: float, found: Reapable
) -> None:
    logs = await read_reply_logs(reader, topics, reply_prefix)
    expired = [topic for topic, each in logs.items() if _has_expired(topic, each, reply_prefix)]
    retention_ms = await reader.retention_ms(expired)
    for topic, each in logs.items():
        if each.end == 0:
            found.keep(Kept.UNUSED)
        elif topic in expired:
            # Kafka has deleted every record, so the last one is at least as old as that takes.
            age = retention_ms.get(topic, 0) / 1000
            _judge(topic, age, older_than, found)
        elif not each.sound or each.last_ms is None:
            found.keep(Kept.SHARED)
        elif not each.log.ended:
            found.keep(Kept.OPEN)
        else:
            _judge(topic, time.time() - each.last_ms / 1000, older_than, found)


def _judge(topic: str, age: float, older_than: float, found: Reapable) -> None:
    if age >= older_than:
        found.ended[topic] = age
    else:
        found.keep(Kept.YOUNG)


def _has_expired(topic: str, found: TopicLog, reply_prefix: str) -> bool:
    """Whether it was written to and is empty by now. No record tells any more whose it was, so the name must: our
    clients' ids are never those of a shared log. Requests do not outlive their log's retention (protocol.md 4)."""
    name = topic.removeprefix(reply_prefix)
    return found.begin == found.end > 0 and CLIENT_ID_PATTERN.fullmatch(name) is not None
