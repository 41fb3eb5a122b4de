"""The topics a deployment needs (protocol.md 1): lanes, control, dead letters, usage."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.connection import KafkaConnection
from schemas.topics import (
    CANCEL_TTL_MS,
    DEFAULT_LANE_PREFIX,
    LANES,
    USAGE_TOPIC,
    check_tier_name,
    control_topic,
    dlq_topic,
    lane_topic,
)
from service.kafka import TopicAdmin, TopicSpec

_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class CreatedTopics:
    """What `create_topics` found and did, in the order of the plan."""

    created: tuple[str, ...]
    existed: tuple[str, ...]


def topic_plan(
    *,
    lanes: Sequence[str] = LANES,
    lane_prefix: str = DEFAULT_LANE_PREFIX,
    partitions: int = 12,
    replication_factor: int | None = None,
) -> tuple[TopicSpec, ...]:
    """The topics of one set of lanes. `partitions` is for the lanes: the most workers that can share one.

    Raises ValueError for a lane that no tier can have.
    """
    for lane in lanes:
        check_tier_name(lane)
    control = {"retention.ms": str(max(_DAY_MS, CANCEL_TTL_MS)), "cleanup.policy": "delete"}
    return (
        *(TopicSpec(lane_topic(lane, lane_prefix), partitions, replication_factor) for lane in lanes),
        TopicSpec(control_topic(lane_prefix), 1, replication_factor, control),
        TopicSpec(dlq_topic(lane_prefix), 1, replication_factor),
        TopicSpec(USAGE_TOPIC, 1, replication_factor),
    )


async def create_topics(
    connection: KafkaConnection,
    *,
    lanes: Sequence[str] = LANES,
    lane_prefix: str = DEFAULT_LANE_PREFIX,
    partitions: int = 12,
    replication_factor: int | None = None,
) -> CreatedTopics:
    """Creates what is missing, in one call; what exists is left as it is, its partitions too.

    `replication_factor` None is the broker's default. Raises ValueError as `topic_plan`, NotAuthorized, TopicsFailed
    and BrokerUnavailable.
    """
    plan = topic_plan(
        lanes=lanes, lane_prefix=lane_prefix, partitions=partitions, replication_factor=replication_factor
    )
    async with TopicAdmin(connection) as admin:
        existed = await admin.create(plan)
    names = [spec.name for spec in plan]
    return CreatedTopics(
        created=tuple(name for name in names if name not in existed),
        existed=tuple(name for name in names if name in existed),
    )
