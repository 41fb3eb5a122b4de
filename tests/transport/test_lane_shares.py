"""What a lane knows of itself after a re-balance, with a consumer that does nothing."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaConnectionError
from aiokafka.structs import OffsetAndMetadata

from worker.transport.kafka_lane import KafkaLane

TOPIC = "prompts.standard"
LOG_END = 7


class IdleConsumer:
    """The calls of a re-balance."""

    _group_id = "group"
    _coordinator = SimpleNamespace(member_id="member-1")

    async def beginning_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 0)

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, LOG_END)

    def seek(self, partition: TopicPartition, offset: int) -> None: ...

    def pause(self, partition: TopicPartition) -> None: ...

    def paused(self) -> set[TopicPartition]:
        return set()


async def committed(group: str, partitions: list[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata]:
    return {partition: OffsetAndMetadata(2, "") for partition in partitions}


def make_lane(calls: list[str], partitions_of: Callable[[str], Awaitable[int]]) -> KafkaLane:
    return KafkaLane(
        "standard",
        TOPIC,
        IdleConsumer(),
        deliver=lambda delivery: None,
        lost=lambda tier: calls.append("lost"),
        shared=lambda: calls.append("shared"),
        committed=committed,
        partitions_of=partitions_of,
        num_partitions=4,
        max_outstanding=8,
        max_outstanding_bytes=2**20,
        commit_interval=1.0,
    )


async def rebalance(lane: KafkaLane, *partitions: int) -> None:
    await lane.on_partitions_revoked([])
    await lane.on_partitions_assigned([TopicPartition(TOPIC, p) for p in partitions])


async def test_the_share_is_renewed_after_every_rebalance_when_what_is_lost_is_gone():
    """Owned partitions and all of them, also when some were added: told last, and only once it is true."""
    calls: list[str] = []
    counts = iter([4, 4, 6])

    async def partitions_of(topic: str) -> int:
        assert topic == TOPIC
        return next(counts)

    lane = make_lane(calls, partitions_of)
    assert (len(lane.partitions), lane.num_partitions) == (0, 4)
    for partitions, owned in (((0, 1, 2, 3), (4, 4)), ((0, 1), (2, 4)), ((0, 1, 4), (3, 6))):
        await rebalance(lane, *partitions)
        assert (len(lane.partitions), lane.num_partitions) == owned
    assert calls == ["shared", "lost", "shared", "shared"]


async def test_an_unknown_number_of_partitions_is_what_it_was():
    """A broker that does not answer holds no assignment up."""

    async def partitions_of(topic: str) -> int:
        raise KafkaConnectionError("no broker is known")

    lane = make_lane([], partitions_of)
    await rebalance(lane, 0, 1)
    assert (len(lane.partitions), lane.num_partitions) == (2, 4)
    assert lane.assigned.is_set()


@pytest.mark.parametrize(("offset", "inherited"), [(2, True), (LOG_END - 1, True), (LOG_END, False)])
async def test_what_the_log_held_at_the_assignment_is_inherited(offset: int, inherited: bool):
    """An earlier owner may have begun it; what is published later, nobody has."""

    async def partitions_of(topic: str) -> int:
        return 4

    lane = make_lane([], partitions_of)
    await rebalance(lane, 0)
    (tracker,) = lane._trackers.values()
    assert tracker.is_inherited(offset) is inherited
