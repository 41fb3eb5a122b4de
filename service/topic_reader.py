"""Looks at topics and groups from outside: what the operators' commands know, they know from Kafka alone."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.coordinator.protocol import ConsumerProtocol
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    GroupCoordinatorNotAvailableError,
    GroupLoadInProgressError,
    KafkaError,
    NotCoordinatorForGroupError,
    TopicAuthorizationFailedError,
)
from aiokafka.structs import OffsetAndMetadata

from schemas.connection import KafkaConnection
from schemas.log_consumer import LogConsumer
from service.errors import BrokerUnavailable, NotAuthorized
from service.kafka import connect

_POLL_MS = 200
_SILENCE_S = 5.0  # a topic that is deleted while it is read says nothing more
# The first question about any group makes a cluster create the topic of all commits: "not available" until then.
_COORDINATOR_S = 15.0
_COORDINATOR_ERRORS = (GroupCoordinatorNotAvailableError, GroupLoadInProgressError, NotCoordinatorForGroupError)
_AUTHORIZATION_ERRORS = (ClusterAuthorizationFailedError, GroupAuthorizationFailedError, TopicAuthorizationFailedError)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One consumer of a group. `partitions` None: this broker does not tell them."""

    client_id: str
    host: str
    partitions: tuple[TopicPartition, ...] | None


class TopicReader:
    """An async context manager. Reads; creates, commits and joins nothing.

    Raises BrokerUnavailable and NotAuthorized, whatever is done with it.
    """

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._bootstrap = connection.bootstrap
        options = connection.client_options()
        self._admin = AIOKafkaAdminClient(**options)
        self._consumer = LogConsumer(
            **options, enable_auto_commit=False, auto_offset_reset="none", fetch_max_wait_ms=50
        )

    async def __aenter__(self) -> Self:
        try:
            await connect(self._admin, self._connection)
            await connect(self._consumer, self._connection)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()
        if isinstance(error, _AUTHORIZATION_ERRORS):
            raise NotAuthorized(f"this user may not look at that at {self._bootstrap}: {error!r}") from error
        if isinstance(error, KafkaError):
            raise BrokerUnavailable(f"Kafka at {self._bootstrap} does not answer as it should: {error!r}") from error

    async def _close(self) -> None:
        await self._consumer.stop()
        await self._admin.close()

    async def topics(self) -> dict[str, list[TopicPartition]]:
        """Every topic that this user may see, with its partitions. Asking for all creates none."""
        return {
            topic["topic"]: [TopicPartition(topic["topic"], p["partition"]) for p in topic["partitions"]]
            for topic in await self._admin.describe_topics(None)
        }

    async def bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """partition -> (its first offset, the offset that its next record will get)."""
        asked = list(partitions)
        if not asked:
            return {}
        begins, ends = await asyncio.gather(self._consumer.beginning_offsets(asked), self._consumer.end_offsets(asked))
        return {partition: (begins[partition], ends[partition]) for partition in asked}

    async def records(
        self, ranges: Mapping[TopicPartition, tuple[int, int]]
    ) -> AsyncIterator[ConsumerRecord[bytes | None, bytes | None]]:
        """The records of each partition from one offset up to, without, another.

        Ends early, without an error, when nothing comes any more: topics may be deleted meanwhile.
        """
        open_ranges = {partition: end for partition, (start, end) in ranges.items() if start < end}
        if not open_ranges:
            return
        self._consumer.assign(list(open_ranges))
        for partition in open_ranges:
            self._consumer.seek(partition, ranges[partition][0])
        heard_at = time.monotonic()
        while open_ranges and time.monotonic() - heard_at < _SILENCE_S:
            batch = await self._consumer.getmany(*open_ranges, timeout_ms=_POLL_MS)
            for partition, records in batch.items():
                heard_at = time.monotonic()
                for record in records:
                    if record.offset < open_ranges[partition]:
                        yield record
            for partition in [p for p, end in open_ranges.items() if await self._consumer.position(p) >= end]:
                del open_ranges[partition]
                self._consumer.pause(partition)

    async def committed(
        self, group: str, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """What a group has committed of these partitions; those without a commit are missing."""
        asked = list(partitions)
        found = await _coordinated(lambda: self._admin.list_consumer_group_offsets(group, partitions=asked))
        return {partition: commit for partition, commit in found.items() if commit.offset >= 0}

    async def members(self, group: str) -> list[GroupMember]:
        """The consumers of a group; none when there is no such group."""
        # One group a request: aiokafka 0.14 reads the second one of an answer wrongly.
        (response,) = await _coordinated(lambda: self._admin.describe_consumer_groups([group]))
        (described,) = response.groups
        return [_member(each) for each in described[5]]

    async def retention_ms(self, topics: Iterable[str]) -> dict[str, int]:
        """topic -> retention.ms; negative for ever. Topics that have gone meanwhile are missing."""
        resources = [ConfigResource(ConfigResourceType.TOPIC, topic) for topic in topics]
        found = {}
        for response in await self._admin.describe_configs(resources) if resources else ():
            for resource in response.to_object()["resources"]:
                for entry in resource["config_entries"]:
                    if entry["config_names"] == "retention.ms":
                        found[resource["resource_name"]] = int(entry["config_value"])
        return found


async def _coordinated(ask: Callable[[], Awaitable[_T]]) -> _T:
    """What a group's coordinator answers; asked again while there is none yet."""
    give_up_at = time.monotonic() + _COORDINATOR_S
    while True:
        try:
            return await ask()
        except _COORDINATOR_ERRORS:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(0.2)


def _member(described: tuple[Any, ...]) -> GroupMember:
    member_id, client_id, host, _, assignment = described
    partitions = None
    if assignment:
        assigned = ConsumerProtocol.ASSIGNMENT.decode(assignment).partitions()
        partitions = tuple(sorted(assigned))
    # The embedded broker names no client; a member id begins with it.
    return GroupMember(client_id or member_id[: -len("-00000000-0000-0000-0000-000000000000")], host, partitions)
