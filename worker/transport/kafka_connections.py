"""The worker's connections to one Kafka cluster, and what that cluster can do.

Everything that depends on the broker is decided here, once, at start: whether it takes an idempotent producer, and
whether it keeps commit metadata. Only the embedded development broker fails both.
"""

import asyncio
import logging
from typing import Any, Self

import structlog
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    CoordinatorNotAvailableError,
    KafkaConnectionError,
    KafkaError,
    TopicAuthorizationFailedError,
    UnknownError,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.structs import OffsetAndMetadata, PartitionMetadata

from schemas import connection as settings
from schemas.connection import KafkaConnection
from schemas.log_consumer import LogConsumer
from schemas.null_value import serialised
from schemas.reachability import why_unreachable

STOP_S = 5.0
REACH_S = 5.0
EMBEDDED_REBALANCE_MS = 15_000  # it once left a join without an answer, and a worker without partitions for a minute
# Kafka answers a fetch when there is something; a fetch that waits only holds up the first one after a re-balance or a
# pause. The embedded broker answers when the time is over, so that a request waits for it.
FETCH_MAX_WAIT_MS, EMBEDDED_FETCH_MAX_WAIT_MS = 250, 100
MAX_SEQUENCES = 20_000  # logs that one producer writes to, about 300 bytes each; then another takes its place
NEW_TOPIC_BACKOFF_MS = 20  # aiokafka's own 100 ms is what a topic costs whose leader is not known yet
log = structlog.get_logger(__name__)


class KafkaUnavailable(Exception):
    """The cluster cannot be reached or used; the message says what to do."""


class KafkaConnections:
    """Admin client, producer and consumers with the settings that the worker's rules rest on (design.md 5)."""

    def __init__(
        self,
        connection: KafkaConnection,
        *,
        client_id: str,
        request_timeout_ms: int,
        session_timeout_ms: int,
        rebalance_timeout_ms: int,
        warns: bool = True,
    ) -> None:
        """`warns`: say at start what is wrong with this broker."""
        self._warns = warns
        self.options = {**connection.client_options(), "client_id": client_id}
        self._connection = connection
        self._bootstrap = connection.bootstrap
        self._request_timeout_ms = request_timeout_ms
        self._session_timeout_ms = session_timeout_ms
        self._rebalance_timeout_ms = rebalance_timeout_ms
        self._topic_queries: dict[str, asyncio.Future[int]] = {}
        self._query_task: asyncio.Task[None] | None = None
        self._replacing = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None
        self._stopping: list[asyncio.Task[None]] = []
        self.idempotent = True
        self.admin: AIOKafkaAdminClient
        self.producer: AIOKafkaProducer

    async def __aenter__(self) -> Self:
        """Connects. Raises KafkaUnavailable."""
        self.admin = AIOKafkaAdminClient(**self.options, request_timeout_ms=self._request_timeout_ms)
        try:
            async with asyncio.timeout(settings.CONNECT_S):
                await self.admin.start()
            self.producer = await self._start_producer()
        except (KafkaConnectionError, TimeoutError) as e:
            await self.admin.close()
            why = await why_unreachable(self._connection)
            raise KafkaUnavailable(f"no Kafka at {self._bootstrap}: {why}") from e
        except ClusterAuthorizationFailedError as e:  # who may write to one topic may also be idempotent
            await self.admin.close()
            raise KafkaUnavailable(f"this user may write to no topic at {self._bootstrap}") from e
        if self._warns:
            await self._warn_of_broker()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in (self._query_task, self._renewing):
            if task is not None:
                task.cancel()
        # An idempotent producer of aiokafka 0.14 never gives a record up: without its broker `stop` waits for ever.
        stopping = [*self._stopping, asyncio.create_task(self.producer.stop(), name="producer stop")]
        if (await asyncio.wait(stopping, timeout=STOP_S))[1]:
            log.warning("kafka.producer_not_flushed", meaning="the broker is away; the next owner resumes what is open")
        await self.admin.close()

    async def replace_producer(self, broken: AIOKafkaProducer) -> None:
        """Takes a fresh producer in place of one that cannot go on; what that has in flight fails or lands."""
        async with self._replacing:
            if self.producer is not broken:
                return  # somebody has done it
            try:
                self.producer = await self._start_producer()
            except KafkaError as e:
                log.warning("kafka.producer_not_replaced", error=repr(e))  # the next failed send tries again
                return
            self._stopping.append(asyncio.create_task(broken.stop(), name="stop a broken producer"))

    async def _start_producer(self) -> AIOKafkaProducer:
        """Idempotent, acks=all. Falls back to acks=all alone where the broker takes no idempotent producer."""
        options = self.options | {
            "acks": "all",
            "linger_ms": 0,
            "retry_backoff_ms": NEW_TOPIC_BACKOFF_MS,
            "request_timeout_ms": self._request_timeout_ms,
            "max_request_size": 16 * 2**20,
            "value_serializer": serialised,
        }
        if self.idempotent:
            producer = AIOKafkaProducer(**options, enable_idempotence=True)
            sender_log = logging.getLogger("aiokafka.producer.sender")
            sender_log.disabled = True  # it calls what we try here an unexpected error
            try:
                await producer.start()
            except UnknownError:
                await producer.stop()
            except BaseException:
                await producer.stop()
                raise
            else:
                return producer
            finally:
                sender_log.disabled = False
            self.idempotent = False
        producer = AIOKafkaProducer(**options)
        await producer.start()
        return producer

    def consumer(self, **options: Any) -> LogConsumer:
        """A consumer without a group, for `assign`. The caller starts and stops it."""
        return LogConsumer(
            **self.options,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            request_timeout_ms=self._request_timeout_ms,
            **options,
        )

    def lane_consumer(self, group: str, client_id: str) -> LogConsumer:
        """A member of a lane's group. The caller subscribes, starts and stops it."""
        # The assignor keeps its last assignment in class attributes: lanes in one process must not share them.
        assignor = type("LaneStickyPartitionAssignor", (StickyPartitionAssignor,), {})
        rebalance_timeout_ms = self._rebalance_timeout_ms
        if not self.idempotent:
            rebalance_timeout_ms = min(rebalance_timeout_ms, EMBEDDED_REBALANCE_MS)
        return LogConsumer(
            **(self.options | {"client_id": client_id}),
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            partition_assignment_strategy=(assignor,),
            session_timeout_ms=self._session_timeout_ms,
            heartbeat_interval_ms=min(1000, self._session_timeout_ms // 3),
            rebalance_timeout_ms=rebalance_timeout_ms,
            max_poll_interval_ms=300_000,
            fetch_max_wait_ms=FETCH_MAX_WAIT_MS if self.idempotent else EMBEDDED_FETCH_MAX_WAIT_MS,
            fetch_max_bytes=16 * 2**20,
            request_timeout_ms=rebalance_timeout_ms + 5_000,  # a join is answered when everybody has joined
        )

    async def committed(self, group: str, partitions: list[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata]:
        """The group's committed offsets (-1: none), with metadata where the broker keeps it. Raises KafkaError."""
        if self.idempotent:
            return await self._fetch_committed(group, partitions)
        consumer = self.consumer(group_id=group)
        consumer.assign(partitions)
        await consumer.start()
        try:
            offsets = {p: await consumer.committed(p) for p in partitions}
        finally:
            await consumer.stop()
        return {p: OffsetAndMetadata(offset, "") for p, offset in offsets.items() if offset is not None}

    async def _fetch_committed(
        self, group: str, partitions: list[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        # aiokafka's own calls overlook the error of the whole answer ("the coordinator is loading", "it has moved") and
        # take its empty list for a group that has never committed: it would begin anew at the start of the log.
        topics: dict[str, list[int]] = {}
        for partition in partitions:
            topics.setdefault(partition.topic, []).append(partition.partition)
        coordinator = await self.admin.find_coordinator(group)
        response = await self.admin._client.send(coordinator, OffsetFetchRequest(group, list(topics.items())))
        errors = [response.error_code, *(error for _, found in response.topics for *_, error in found)]
        if failed := next(filter(None, errors), 0):
            raise for_code(failed)(f"the committed offsets of {group}")
        committed = {
            TopicPartition(topic, partition): OffsetAndMetadata(offset, metadata)
            for topic, found in response.topics
            for partition, offset, metadata, _ in found
        }
        if missing := [p for p in partitions if p not in committed]:
            raise CoordinatorNotAvailableError(f"no committed offset of {missing}")
        return committed

    async def partitions_of(self, topic: str) -> int:
        """How many partitions a topic has; 0 when it does not exist. Asking never creates it. Raises KafkaError,
        TopicAuthorizationFailedError where this user may not know.

        Questions that come while one is on its way share the next request.
        """
        future = self._topic_queries.get(topic)
        if future is None:
            future = self._topic_queries[topic] = asyncio.get_running_loop().create_future()
            if self._query_task is None or self._query_task.done():
                self._query_task = asyncio.create_task(self._answer_topic_queries(), name="topic queries")
        return await asyncio.shield(future)

    async def count_partitions(self, topics: list[str]) -> dict[str, int]:
        """The partitions of topics that the worker needs, as `partitions_of`. Raises KafkaUnavailable."""
        try:
            return dict(zip(topics, await asyncio.gather(*map(self.partitions_of, topics)), strict=True))
        except TopicAuthorizationFailedError as e:
            raise KafkaUnavailable(f"this user may not use the topic {e} (docs/security.md lists the rights)") from e

    async def _answer_topic_queries(self) -> None:
        await asyncio.sleep(0)  # let the requests of one batch of deliveries gather
        while self._topic_queries:
            asked, self._topic_queries = self._topic_queries, {}
            try:
                found = await self._describe(list(asked))
            except Exception as e:  # whatever it is, nobody may wait for an answer for ever
                for future in asked.values():
                    future.set_exception(e if isinstance(e, KafkaError) else KafkaConnectionError(repr(e)))
                    future.exception()  # somebody may have stopped waiting
                continue
            for topic, future in asked.items():
                count = found[topic]
                if count is None:
                    future.set_exception(TopicAuthorizationFailedError(topic))
                    future.exception()
                else:
                    future.set_result(count)

    async def _describe(self, topics: list[str]) -> dict[str, int | None]:
        """Partitions of each topic; None: this user may not know."""
        # Only UNKNOWN_TOPIC_OR_PARTITION means that a topic does not exist; whatever else goes wrong passes with time.
        client = self.admin._client
        node = client.get_random_node()
        if node is None:
            raise KafkaConnectionError("no broker is known")
        response = await client.send(node, MetadataRequest(topics, allow_auto_topic_creation=False))
        found: dict[str, int | None] = {}
        for topic in response.to_object()["topics"]:
            self._tell_producer(topic)
            match topic["error_code"]:
                case UnknownTopicOrPartitionError.errno:
                    count: int | None = 0
                case TopicAuthorizationFailedError.errno:
                    count = None
                case _:
                    count = max(1, len(topic["partitions"]))
            found[topic["topic"]] = count
        return found

    def _tell_producer(self, topic: dict[str, Any]) -> None:
        """What was asked about a topic spares the producer its own question, a round trip before the first record."""
        cluster, name, partitions = self.producer.client.cluster, topic["topic"], topic["partitions"]
        if cluster.partitions_for_topic(name) is not None or not partitions:
            return
        if topic["error_code"] or any(cluster.broker_metadata(p["leader"]) is None for p in partitions):
            return  # it has no leader yet, or one that the producer has not heard of
        known = {}
        for p in partitions:
            number, leader = p["partition"], p["leader"]
            known[number] = PartitionMetadata(name, number, leader, p["replicas"], p["isr"], p["error_code"])
            cluster._broker_partitions[leader].add(TopicPartition(name, number))
        cluster._partitions[name] = known

    async def reachable(self) -> bool:
        """Whether a broker answers within a few seconds."""
        try:
            async with asyncio.timeout(REACH_S):
                await self._describe([])
        except (KafkaError, OSError, TimeoutError):
            return False
        return True

    @property
    def num_producer_topics(self) -> int:
        """Topics of which the producer asks for the metadata, again and again."""
        return len(self.producer.client._topics)

    def remember_topic(self, topic: str) -> None:
        """The producer keeps the metadata of a topic that is about to be written to. Without it a record whose leader
        moves, or whose broker restarts, finds no leader any more, and blocks its log until it expires."""
        self.producer.client._topics.add(topic)

    def forget_topic(self, topic: str) -> None:
        """Nothing is on its way to a topic any more: the producer drops its metadata. By itself it asks for that of
        every topic that it ever wrote to, for ever."""
        client = self.producer.client
        client._topics.discard(topic)
        for metadata in client.cluster._partitions.pop(topic, {}).values():
            client.cluster._broker_partitions[metadata.leader].discard(TopicPartition(topic, metadata.partition))
        # The sequence numbers of a log stay: begun anew under the same producer id, a record would pass for the double
        # of an old one. Another producer, with another id, begins anew everywhere.
        if self.num_sequences >= MAX_SEQUENCES and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self.replace_producer(self.producer), name="renew the producer")

    @property
    def num_sequences(self) -> int:
        """Logs of which an idempotent producer keeps the sequence numbers."""
        manager = self.producer._txn_manager
        return 0 if manager is None else len(manager._sequence_numbers)

    def abandon_topic(self, topic: str) -> None:
        """Fails what waits to be written to a topic that is gone. The producer of aiokafka 0.14 asks for its leader
        without a pause until the records expire: thousands of requests a second."""
        accumulator = self.producer._message_accumulator
        for partition in [p for p in accumulator._batches if p.topic == topic]:
            while partition in accumulator._batches:
                accumulator._pop_batch(partition).failure(exception=UnknownTopicOrPartitionError(topic))

    async def _warn_of_broker(self) -> None:
        if not self.idempotent:
            log.warning(
                "kafka.no_idempotent_producer",
                bootstrap=self._bootstrap,
                meaning="this is the embedded broker: it keeps nothing, forgets commit metadata, and a retried send "
                "may land twice (readers drop it). Use Apache Kafka for anything that matters",
            )
            return  # it always creates topics, too, and has said so
        node = str(self.admin._client.get_random_node())
        try:
            (response,) = await self.admin.describe_configs([ConfigResource(ConfigResourceType.BROKER, node)])
            entries = response.to_object()["resources"][0]["config_entries"]
        except (KafkaError, IndexError, KeyError, ValueError) as e:  # not everybody may read a broker's configuration
            log.info("kafka.auto_creation_unknown", error=repr(e))
            return
        if any(e["config_names"] == "auto.create.topics.enable" and e["config_value"] == "true" for e in entries):
            log.warning(
                "kafka.auto_creates_topics",
                meaning="a deleted reply topic may come back; set auto.create.topics.enable=false on the brokers",
            )


def has_died(producer: AIOKafkaProducer) -> bool:
    """Whether its task has ended that sends: then nothing is sent any more."""
    return bool(producer._sender.sender_task.done())
