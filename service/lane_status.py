"""What the service is doing, read from Kafka alone: lanes, workers, the oldest requests that are not done."""

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.errors import TopicAuthorizationFailedError

from schemas.connection import KafkaConnection
from schemas.done_map import decode_done_map
from schemas.errors import ProtocolError, RequestError, Unanswerable
from schemas.headers import ReplyAddress, read_reply_address, read_request_headers
from schemas.records import InputRef, decode_usage_input
from schemas.reply_log import ReplyLog
from schemas.topics import USAGE_TOPIC, control_topic, dlq_topic
from service.errors import LaneMissing
from service.reply_logs import TopicLog, read_reply_logs
from service.topic_reader import TopicReader

_MAX_USAGE = 10_000  # records of a partition of it that are read, the last ones
_CLIENT_PREFIX = "carousel-worker-"  # of a worker's consumers: PREFIX worker - tier


class RequestState(StrEnum):
    """How far a request is, as its reply log tells."""

    WAITING = "waiting"  # no worker has begun it
    RUNNING = "running"
    ENDED = "ended"  # its `end` is there, its input is not committed yet
    SHARED = "shared log"  # many requests' answers are in its reply log: not looked at
    GONE = "caller gone"  # its reply topic does not exist
    UNANSWERABLE = "unanswerable"  # it names no usable reply log
    BROKEN = "broken log"  # somebody has written into its reply log what does not belong there


_VANISHED = (RequestState.WAITING, RequestState.GONE)  # what a request looks like whose reply topic has been deleted


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request record that is not done."""

    correlation_id: str
    lane: str
    partition: int
    offset: int
    age_s: float
    tenant: str
    state: RequestState
    worker: str | None  # that began it last
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """One lane. `lag`: records that are not done, waiting in Kafka or in a worker."""

    lane: str
    topic: str
    num_partitions: int
    lag: int
    oldest_age_s: float | None  # of the oldest record that is not done
    num_workers: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker. Of a lane's partitions; None: this broker does not tell them."""

    worker: str
    host: str
    partitions: dict[str, list[int] | None]


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """Everything; `requests` are the oldest ones."""

    lanes: tuple[LaneStatus, ...]
    workers: tuple[WorkerStatus, ...]
    requests: tuple[OpenRequest, ...]

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)


async def read_status(
    connection: KafkaConnection, *, lane_prefix: str, group_prefix: str, reply_prefix: str, max_requests: int
) -> ServiceStatus:
    """Looks once. Raises LaneMissing, BrokerUnavailable and NotAuthorized.

    max_requests: how many of the oldest requests are looked up in their reply logs.
    """
    async with TopicReader(connection) as reader:
        topics = await reader.topics()
        lanes = _lanes(topics, lane_prefix)
        if not lanes:
            raise LaneMissing(f"no lanes {lane_prefix}* at {connection.bootstrap}; `carousel topics create` makes them")
        groups = {group_prefix + lane_prefix + lane: partitions for lane, partitions in lanes.items()}
        accounts = topics.get(USAGE_TOPIC, [])
        open_offsets = await _open_offsets(reader, groups, accounts)
        statuses, workers, undone = [], _Workers(), list[ConsumerRecord]()
        for lane, partitions in lanes.items():
            topic = lane_prefix + lane
            members = await reader.members(group_prefix + topic)
            workers.add(lane, members)
            of_lane = {partition: open_offsets[partition] for partition in partitions}
            oldest = await _oldest(reader, of_lane, max(1, max_requests))
            undone += oldest
            statuses.append(
                LaneStatus(
                    lane=lane,
                    topic=topic,
                    num_partitions=len(partitions),
                    lag=sum(each.count for each in of_lane.values()),
                    oldest_age_s=_age_s(oldest[0].timestamp) if oldest else None,
                    num_workers=len(members),
                )
            )
        undone = sorted(undone, key=lambda record: record.timestamp)[:max_requests]
        requests = await _look_up(reader, undone, lane_prefix, reply_prefix)
        if any(request.state in _VANISHED for request in requests):
            # It may have been answered since the first look, and its caller have deleted the reply topic.
            open_offsets = await _open_offsets(reader, groups, accounts)
            requests = [r for r in requests if r.state not in _VANISHED or _is_open(r, lane_prefix, open_offsets)]
    return ServiceStatus(tuple(statuses), workers.found(), tuple(requests))


def _lanes(topics: Mapping[str, list[TopicPartition]], prefix: str) -> dict[str, list[TopicPartition]]:
    others = {control_topic(prefix), dlq_topic(prefix)}
    return {t.removeprefix(prefix): topics[t] for t in sorted(topics) if t.startswith(prefix) and t not in others}


class _Workers:
    """Workers, gathered from the members of the lanes' groups."""

    def __init__(self) -> None:
        self._found: dict[str, WorkerStatus] = {}

    def add(self, lane: str, members: Iterable[Any]) -> None:
        for member in members:
            name = member.client_id.removeprefix(_CLIENT_PREFIX).removesuffix(f"-{lane}")
            host = member.host.removeprefix("/")
            worker = self._found.setdefault(name, WorkerStatus(name, host, {}))
            assigned = member.partitions
            worker.partitions[lane] = None if assigned is None else [p.partition for p in assigned]

    def found(self) -> tuple[WorkerStatus, ...]:
        return tuple(self._found[name] for name in sorted(self._found))


@dataclass(frozen=True, slots=True)
class _OpenOffsets:
    """The offsets of a partition that are not done: some known ones, then everything from `rest` to `end`."""

    known: frozenset[int]
    rest: int
    end: int

    @property
    def count(self) -> int:
        return len(self.known) + self.end - self.rest

    @property
    def first(self) -> int:
        return min(self.known, default=self.rest)

    def __contains__(self, offset: int) -> bool:
        return offset in self.known or self.rest <= offset < self.end

    def without(self, done: AbstractSet[int]) -> "_OpenOffsets":
        """What is still open when these are done as well."""
        rest = max((offset + 1 for offset in done if self.rest <= offset < self.end), default=self.rest)
        return _OpenOffsets(self.known.union(range(self.rest, rest)) - done, rest, self.end)


async def _open_offsets(
    reader: TopicReader, groups: Mapping[str, list[TopicPartition]], accounts: list[TopicPartition]
) -> dict[TopicPartition, _OpenOffsets]:
    """Of all lanes, by their groups. accounts: the partitions of the usage topic.

    Where a broker keeps no done map, the records above the commit that were answered are those that usage records
    speak of: they are written before their input is done (protocol.md 5.9).
    """
    found, mapless = {}, list[TopicPartition]()
    for group, partitions in groups.items():
        commits, bounds = await reader.committed(group, partitions), await reader.bounds(partitions)
        for partition, (begin, end) in bounds.items():
            commit = commits.get(partition)
            position = begin if commit is None else max(begin, commit.offset)
            *known, rest = decode_done_map(position, commit.metadata if commit is not None else "") or [position]
            # Between two requests of ours a worker may have committed beyond the end that we know.
            found[partition] = _OpenOffsets(frozenset(o for o in known if o < end), min(rest, end), end)
            if commit is not None and not commit.metadata and position < end:
                mapless.append(partition)
    if mapless:
        answered = await _answered(reader, {partition: found[partition] for partition in mapless}, accounts)
        found |= {partition: found[partition].without(answered[partition]) for partition in mapless}
    return found


async def _answered(
    reader: TopicReader, lanes: Mapping[TopicPartition, _OpenOffsets], accounts: list[TopicPartition]
) -> dict[TopicPartition, set[int]]:
    """The offsets of the request records that the last usage records speak of; none where they may not be read.

    A lane may have been deleted and created anew since: a record at the same offset with another timestamp is another.
    """
    named = await _inputs(reader, accounts)
    ranges = {}
    for partition, each in lanes.items():
        offsets = [offset for offset, _ in named[partition] if offset in each]
        if offsets:
            ranges[partition] = (min(offsets), max(offsets) + 1)
    found: dict[TopicPartition, set[int]] = defaultdict(set)
    async for record in reader.records(ranges):
        partition = TopicPartition(record.topic, record.partition)
        if (record.offset, record.timestamp) in named[partition]:
            found[partition].add(record.offset)
    return found


async def _inputs(reader: TopicReader, accounts: list[TopicPartition]) -> dict[TopicPartition, set[tuple[int, int]]]:
    """Offsets and timestamps of the request records that the last usage records name."""
    found: dict[TopicPartition, set[tuple[int, int]]] = defaultdict(set)
    try:
        bounds = await reader.bounds(accounts)
        async for record in reader.records(
            {p: (max(begin, end - _MAX_USAGE), end) for p, (begin, end) in bounds.items()}
        ):
            with contextlib.suppress(ProtocolError):
                source = decode_usage_input(record.headers, record.value)
                found[TopicPartition(source.topic, source.partition)].add((source.offset, source.timestamp_ms))
    except TopicAuthorizationFailedError:
        return defaultdict(set)
    return found


def _is_open(request: OpenRequest, lane_prefix: str, open_offsets: Mapping[TopicPartition, _OpenOffsets]) -> bool:
    partition = TopicPartition(lane_prefix + request.lane, request.partition)
    return request.offset in open_offsets[partition]


async def _oldest(
    reader: TopicReader, open_offsets: Mapping[TopicPartition, _OpenOffsets], limit: int
) -> list[ConsumerRecord]:
    """The first records of each partition that are not done, oldest first."""
    ranges = {}
    for partition, each in open_offsets.items():
        if each.count:
            first = sorted(itertools.islice(itertools.chain(sorted(each.known), range(each.rest, each.end)), limit))
            ranges[partition] = (each.first, first[-1] + 1)
    records = [
        record
        async for record in reader.records(ranges)
        if record.offset in open_offsets[TopicPartition(record.topic, record.partition)]
    ]
    return sorted(records, key=lambda record: record.timestamp)


async def _look_up(
    reader: TopicReader,
    records: list[ConsumerRecord],
    lane_prefix: str,
    reply_prefix: str,
) -> list[OpenRequest]:
    addresses: list[ReplyAddress | None] = []
    for record in records:
        source = InputRef(record.topic, record.partition, record.offset, record.timestamp)
        try:
            addresses.append(read_reply_address(record.headers, source, reply_prefixes=(reply_prefix,)))
        except Unanswerable:
            addresses.append(None)
    # As late as can be: a reply topic that is gone when it is read is created anew by the embedded broker.
    topics = await reader.topics() if records else {}
    ours = {a.topic for a in addresses if a is not None and a.per_request and a.topic in topics}
    logs = await read_reply_logs(reader, ours, reply_prefix)
    found = []
    for record, address in zip(records, addresses, strict=True):
        topic_log = logs.get(address.topic) if address is not None else None
        log = topic_log.log if topic_log is not None else ReplyLog()
        found.append(
            OpenRequest(
                correlation_id="" if address is None else address.correlation_id.decode(errors="replace"),
                lane=record.topic.removeprefix(lane_prefix),
                partition=record.partition,
                offset=record.offset,
                age_s=_age_s(record.timestamp),
                tenant=_tenant(record),
                state=_state(address, topic_log, topics),
                worker=log.begin.worker if log.begin is not None else None,
                num_tokens=sum(map(len, log.token_ids.values())),
            )
        )
    return found


def _state(
    address: ReplyAddress | None, found: TopicLog | None, topics: Mapping[str, list[TopicPartition]]
) -> RequestState:
    if address is None:
        return RequestState.UNANSWERABLE
    if address.topic not in topics:
        return RequestState.GONE
    if found is None:
        return RequestState.SHARED
    if not found.sound:
        return RequestState.BROKEN
    if found.log.ended:
        return RequestState.ENDED
    return RequestState.WAITING if found.log.begin is None else RequestState.RUNNING


def _tenant(record: ConsumerRecord) -> str:
    try:
        return read_request_headers(record.headers).tenant
    except RequestError:
        return "?"


def _age_s(timestamp_ms: int) -> float:
    return max(0.0, round(time.time() - timestamp_ms / 1000, 3))
