"""Cancels from outside, for requests that are not a stream of this process."""

import asyncio
from collections.abc import Sequence

from aiokafka.errors import KafkaError

from schemas.codec import ContentType
from schemas.connection import KafkaConnection
from schemas.records import Cancel, encode_cancel
from schemas.topics import control_topic, is_valid_topic, reply_topic
from service.errors import LaneMissing, PublishFailed, ServiceError
from service.kafka import TopicAdmin, start_producer, stop_producer
from service.reply_logs import TopicLog, read_reply_logs
from service.topic_reader import TopicReader

_LOOK_S = 3.0  # what is found is told beside the cancel, which does not wait for it for longer


async def cancel_requests(connection: KafkaConnection, correlation_ids: Sequence[str], *, lane_prefix: str) -> None:
    """Publishes a cancel for each. Raises LaneMissing, PublishFailed, BrokerUnavailable and NotAuthorized."""
    topic = control_topic(lane_prefix)
    async with TopicAdmin(connection) as admin:
        if topic not in await admin.list():  # a send would create it, or wait for its time-out
            message = f"no topic {topic} at {connection.bootstrap}; --lane-prefix, or `carousel topics create`"
            raise LaneMissing(message)
    producer = await start_producer(connection, linger_ms=0, request_timeout_ms=10_000)
    try:
        for correlation_id in correlation_ids:
            key = correlation_id.encode()
            headers = [("content-type", ContentType.MSGPACK.encode())]
            value = encode_cancel(Cancel(key), ContentType.MSGPACK)
            await producer.send_and_wait(topic, value, key=key, headers=headers)
    except KafkaError as error:
        raise PublishFailed(f"{topic} took no cancel: {error!r}") from error
    finally:
        await stop_producer(producer)


async def find_requests(connection: KafkaConnection, correlation_ids: Sequence[str], *, reply_prefix: str) -> list[str]:
    """What each request's own reply log tells, in words. Raises nothing: who may cancel may not be able to look."""
    topics = [reply_topic(each, reply_prefix) for each in correlation_ids]
    try:
        async with asyncio.timeout(_LOOK_S), TopicReader(connection) as reader:
            existing = await reader.topics()
            logs = await read_reply_logs(
                reader, {t for t in topics if is_valid_topic(t)} & existing.keys(), reply_prefix
            )
    except (ServiceError, TimeoutError) as error:
        return [f"what is known of it could not be read: {str(error) or 'no answer in time'}"] * len(topics)
    return [_found(topic, logs.get(topic)) for topic in topics]


def _found(topic: str, topic_log: TopicLog | None) -> str:
    if topic_log is None:
        return (
            f"no open request with this id is known: there is no topic {topic}. It has ended, is still to come, or its "
            "replies go elsewhere"
        )
    log = topic_log.log
    if not topic_log.sound:
        return f"its reply log {topic} holds what does not belong there"
    if log.end is not None:
        return f"it had ended before: {log.end.finish_reason}"
    if log.begin is None:
        return "no worker has begun it"
    return f"it was running on {log.begin.worker}, with {sum(map(len, log.token_ids.values()))} tokens"
