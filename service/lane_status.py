"""What the service is doing, read from Kafka alone: lanes, workers, the oldest requests that are not done."""

import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from aiokafka import ConsumerRecord, TopicPartition

from schemas.connection import KafkaConnection
from schemas.done_map import decode_done_map
from schemas.errors import RequestError, Unanswerable
from schemas.headers import ReplyAddress, read_reply_address, read_request_headers
from schemas.records import InputRef
from schemas.reply_log import ReplyLog
from schemas.topics import control_topic, dlq_topic
from service.errors import LaneMissing
from service.reply_logs import TopicLog, read_reply_logs
from service.topic_reader import TopicReader

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
        statuses, workers, undone = [], _Workers(), list[ConsumerRecord]()
        for lane, partitions in lanes.items():
            topic = lane_prefix + lane
            members = await reader.members(group_prefix + topic)
            workers.add(lane, members)
            open_offsets = await _open_offsets(reader, group_prefix + topic, partitions)
            oldest = await _oldest(reader, open_offsets, max(1, max_requests))
            undone += oldest
            statuses.append(
                LaneStatus(
                    lane=lane,
                    topic=topic,
                    num_partitions=len(partitions),
                    lag=sum(each.count for each in open_offsets.values()),
                    oldest_age_s=_age_s(oldest[0].timestamp) if oldest else None,
                    num_workers=len(members),
                )
            )
        undone = sorted(undone, key=lambda record: record.timestamp)[:max_requests]
        requests = await _look_up(reader, undone, topics, lane_prefix, reply_prefix)
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


async def _open_offsets(
    reader: TopicReader, group: str, partitions: list[TopicPartition]
) -> dict[TopicPartition, _OpenOffsets]:
    commits, bounds = await reader.committed(group, partitions), await reader.bounds(partitions)
    found = {}
    for partition, (begin, end) in bounds.items():
        commit = commits.get(partition)
        position = begin if commit is None else max(begin, commit.offset)
        *known, rest = decode_done_map(position, commit.metadata if commit is not None else "") or [position]
        # Between two requests of ours a worker may have committed beyond the end that we know.
        found[partition] = _OpenOffsets(frozenset(o for o in known if o < end), min(rest, end), end)
    return found


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
    topics: Mapping[str, list[TopicPartition]],
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
