"""Cancel records on the control topic, sent in the background: who leaves a stream does not wait for Kafka."""

import asyncio

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from schemas.codec import ContentType
from schemas.records import Cancel, encode_cancel

log = structlog.get_logger(__name__)


class CancelPublisher:
    """Publishes what `cancel` is told, in batches. The queue is never longer than the number of streams left."""

    def __init__(self, producer: AIOKafkaProducer, topic: str, content_type: ContentType) -> None:
        self._producer = producer
        self._topic = topic
        self._content_type = content_type
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()  # None: the last
        self._task = asyncio.create_task(self._run(), name="cancels")

    def cancel(self, correlation_id: str) -> None:
        self._queue.put_nowait(correlation_id)

    async def close(self, *, patience: float = 3.0) -> None:
        """Sends what is left, for up to `patience` s."""
        self._queue.put_nowait(None)
        done, _ = await asyncio.wait([self._task], timeout=patience)
        if not done:
            log.warning("cancels_not_published", reason="the broker does not answer")
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        closing = False
        while not closing:
            batch = [await self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            closing = None in batch
            await asyncio.gather(*(self._publish(each) for each in batch if each is not None))

    async def _publish(self, correlation_id: str) -> None:
        key = correlation_id.encode()
        value = encode_cancel(Cancel(key), self._content_type)
        headers = [("content-type", self._content_type.encode())]
        try:
            await self._producer.send_and_wait(self._topic, value, key=key, headers=headers)
        except KafkaError as error:  # the request runs to its end for nobody
            log.warning("cancel_not_published", correlation_id=correlation_id, reason=repr(error))
