"""What aiokafka does not do by itself: say why a broker is out of reach, fall back without idempotence, create topics.

Written against aiokafka 0.14; everything that leans on its internals says so.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import structlog
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    KafkaConnectionError,
    KafkaError,
    LeaderNotAvailableError,
    NotControllerError,
    UnknownError,
    for_code,
)

from schemas import connection as settings
from schemas.connection import KafkaConnection
from schemas.reachability import why_unreachable
from service.errors import BrokerUnavailable, NotAuthorized, TopicsFailed

log = structlog.get_logger(__name__)

TOPIC_EXISTS = 36  # Kafka's error codes
AUTHORIZATION_ERRORS = frozenset({29, 31})  # for the topic, for the cluster
INVALID_REPLICATION_FACTOR = 38
UNKNOWN_TOPIC = 3
_HOUR_MS = 3_600_000
_NOT_AUTHORIZED = "not authorised"
_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.02, 1.0


async def connect(
    client: AIOKafkaAdminClient | AIOKafkaConsumer | AIOKafkaProducer, connection: KafkaConnection
) -> None:
    """Starts a client. Raises BrokerUnavailable with the cause, also when nothing has answered after CONNECT_S."""
    async with explained(connection), asyncio.timeout(settings.CONNECT_S):
        await client.start()


@contextlib.asynccontextmanager
async def explained(connection: KafkaConnection) -> AsyncIterator[None]:
    """Turns a failed connection into BrokerUnavailable with its cause."""
    try:
        yield
    except (KafkaConnectionError, TimeoutError) as error:
        raise BrokerUnavailable(f"no Kafka at {connection.bootstrap}: {await why_unreachable(connection)}") from error


async def start_producer(connection: KafkaConnection, **options: Any) -> AIOKafkaProducer:
    """A started producer with acks=all: idempotent, or not, where the broker knows no such thing.

    Nothing is logged of it: the embedded broker and a worker warn at their start, and a library should not write into
    its caller's output. `options` go to AIOKafkaProducer. Raises BrokerUnavailable and NotAuthorized.
    """
    options = connection.client_options() | options
    for idempotent in (True, False):
        producer = AIOKafkaProducer(acks="all", enable_idempotence=idempotent, **options)
        try:
            with _without_aiokafkas_complaint():
                await connect(producer, connection)
        except ClusterAuthorizationFailedError as error:  # who may write to one topic may also be idempotent
            await producer.stop()
            raise NotAuthorized(f"this user may write to no topic at {connection.bootstrap}") from error
        except UnknownError:  # what the embedded broker answers to InitProducerId
            await producer.stop()
            if not idempotent:
                raise
        except BaseException:
            await producer.stop()
            raise
        else:
            return producer
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _without_aiokafkas_complaint() -> Iterator[None]:
    """0.14 logs as an unexpected error what `start_producer` tries and gets an UnknownError for; nothing else is kept
    from the log."""

    def unless_expected(record: logging.LogRecord) -> bool:
        return not (record.args == (UnknownError,) and "InitProducerIdRequest" in str(record.msg))

    sender_log = logging.getLogger("aiokafka.producer.sender")
    sender_log.addFilter(unless_expected)
    try:
        yield
    finally:
        sender_log.removeFilter(unless_expected)


async def stop_producer(producer: AIOKafkaProducer, *, patience: float = 3.0) -> None:
    """Stops a producer; what the broker does not take within `patience` s fails with a KafkaError.

    `stop` alone waits for ever when the broker has gone: an idempotent producer of 0.14 never gives a record up.
    """
    stopping = asyncio.create_task(producer.stop())
    done, _ = await asyncio.wait([stopping], timeout=patience)
    if not done:
        producer._message_accumulator.fail_all(KafkaError("the producer has been stopped"))
        owners = (producer._sender, producer._message_accumulator)
        for task in asyncio.all_tasks():
            frame = getattr(task.get_coro(), "cr_frame", None)
            if frame is not None and any(frame.f_locals.get("self") is owner for owner in owners):
                task.cancel()
    await stopping


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic to create. `replication_factor` None: the broker's default."""

    name: str
    partitions: int = 1
    replication_factor: int | None = None
    config: Mapping[str, str] = field(default_factory=dict)


class TopicAdmin:
    """Creates, deletes and looks at topics: many in one call, and again while the cluster says 'not now'."""

    def __init__(self, connection: KafkaConnection, *, patience: float = 30.0) -> None:
        self._connection = connection
        self._bootstrap = connection.bootstrap
        self._options = connection.client_options()
        self._patience = patience  # seconds after which a retriable error is final
        self._client: AIOKafkaAdminClient | None = None

    async def start(self) -> None:
        """Connects. Raises BrokerUnavailable."""
        # An admin client of 0.14 refreshes the metadata of all topics; what we ask for refreshes itself on errors.
        self._client = AIOKafkaAdminClient(**self._options, retry_backoff_ms=20, metadata_max_age_ms=_HOUR_MS)
        try:
            await connect(self._client, self._connection)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def create(self, specs: Sequence[TopicSpec]) -> frozenset[str]:
        """Creates `specs` in one call and returns the names that existed already.

        Raises NotAuthorized or TopicsFailed for what is refused, after creating the others, and BrokerUnavailable.
        """
        topics = {spec.name: _new_topic(spec) for spec in specs}

        async def call(client: AIOKafkaAdminClient, names: list[str]) -> list[tuple[str, int]]:
            answer = await client.create_topics([topics[name] for name in names])
            return [(name, _creation_error(topics[name], code, text)) for name, code, text in answer.topic_errors]

        return await self._each(list(topics), call, TOPIC_EXISTS, "create")

    async def delete(self, names: Sequence[str]) -> None:
        """Deletes topics in one call; one that is gone already is no error. Raises as `create` does."""

        async def call(client: AIOKafkaAdminClient, names: list[str]) -> list[tuple[str, int]]:
            return [(name, code) for name, code in (await client.delete_topics(names)).topic_error_codes]

        await self._each(names, call, UNKNOWN_TOPIC, "delete")

    async def _each(
        self,
        names: Sequence[str],
        call: Callable[[AIOKafkaAdminClient, list[str]], Awaitable[list[tuple[str, int]]]],
        done_before: int,
        verb: str,
    ) -> frozenset[str]:
        """Calls until every name has a final answer; returns those answered with the error code `done_before`."""
        pending = dict.fromkeys(names)
        before: set[str] = set()
        refused: dict[str, list[str]] = {}

        async def attempt(client: AIOKafkaAdminClient) -> KafkaError | None:
            if client._client.cluster.controller is None:  # 0.14 would fail with an AttributeError
                return NotControllerError("no controller known")
            again: KafkaError | None = None
            for name, code in await call(client, list(pending)):
                error = for_code(code)
                if code == done_before:
                    before.add(name)
                elif code in AUTHORIZATION_ERRORS:
                    refused.setdefault(_NOT_AUTHORIZED, []).append(name)
                elif code and error.retriable:
                    again = error()
                    continue
                elif code:
                    refused.setdefault(error.__name__, []).append(name)
                del pending[name]
            return again

        await self._until_settled(attempt, f"{verb} topics")
        if refused:
            reasons = "; ".join(f"{why}: {_listed(which)}" for why, which in refused.items())
            failure = NotAuthorized if refused.keys() == {_NOT_AUTHORIZED} else TopicsFailed
            raise failure(f"could not {verb} topics at {self._bootstrap}: {reasons}")
        return frozenset(before)

    async def wait_for_leaders(self, names: Sequence[str]) -> None:
        """Returns when partition 0 of every topic, all created already, has a leader: a real cluster takes a while."""
        pending = set(names)

        async def attempt(client: AIOKafkaAdminClient) -> KafkaError | None:
            for topic in await client.describe_topics(sorted(pending)):
                if any(p["partition"] == 0 and p["leader"] >= 0 for p in topic["partitions"]):
                    pending.discard(topic["topic"])
            return LeaderNotAvailableError(f"{len(pending)} topics") if pending else None

        await self._until_settled(attempt, "find the leaders of new topics")

    async def list(self) -> frozenset[str]:
        """All topics this user may see. Listing creates none, unlike describing one by name."""
        names: list[str] = []

        async def attempt(client: AIOKafkaAdminClient) -> None:
            names[:] = await client.list_topics()

        await self._until_settled(attempt, "list the topics")
        return frozenset(names)

    async def _until_settled(
        self, attempt: Callable[[AIOKafkaAdminClient], Awaitable[KafkaError | None]], what: str
    ) -> None:
        """Repeats `attempt` while it raises or returns an error that passes with time."""
        client = self._client
        assert client is not None, "the admin client has not been started"
        end = time.monotonic() + self._patience
        backoff = _FIRST_BACKOFF_S
        while True:
            try:
                error: Exception | None = await attempt(client)
            except (KafkaError, TimeoutError) as raised:
                if isinstance(raised, KafkaError) and not raised.retriable:
                    raise TopicsFailed(f"could not {what}: {raised!r}") from raised
                error = raised
            if error is None:
                return
            if time.monotonic() > end:
                raise BrokerUnavailable(f"could not {what} at {self._bootstrap}: {error!r}") from error
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LAST_BACKOFF_S)
            client._client.force_metadata_update()  # the controller may have moved; 0.14 does not look by itself


def _new_topic(spec: TopicSpec) -> NewTopic:
    topic = NewTopic(spec.name, spec.partitions, spec.replication_factor or 1, topic_configs=dict(spec.config))
    if spec.replication_factor is None:
        topic.replication_factor = -1  # the broker's default, which the constructor of 0.14 refuses
    return topic


def _creation_error(topic: NewTopic, code: int, message: str | None) -> int:
    """While brokers start or stop, a controller says that the replication factor is too large. That passes when it is
    the cluster's own, or when all brokers are fenced."""
    passes = topic.replication_factor == -1 or "fenced" in (message or "")
    return LeaderNotAvailableError.errno if code == INVALID_REPLICATION_FACTOR and passes else code


def _listed(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
