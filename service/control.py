"""Cancels from outside, for requests that are not a stream of this process."""

from collections.abc import Sequence

from aiokafka.errors import KafkaError

from schemas.codec import ContentType
from schemas.connection import KafkaConnection
from schemas.records import Cancel, encode_cancel
from schemas.topics import control_topic
from service.errors import LaneMissing, PublishFailed
from service.kafka import TopicAdmin, start_producer, stop_producer


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
