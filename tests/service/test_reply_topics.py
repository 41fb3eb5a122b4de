"""The pool of reply topics, on a cluster of the test's own making."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from service.errors import BrokerUnavailable, ServiceError, StreamClosed, TopicsFailed
from service.kafka import TopicSpec
from service.reply_topics import MAX_READY, ReplyTopicPool


class Cluster:
    """Stands in for TopicAdmin: a call takes 10 ms and may fail. New topics have leaders once `electing` is set."""

    def __init__(self) -> None:
        self.topics: set[str] = set()
        self.creations: list[int] = []  # topics per call
        self.deletions: list[int] = []
        self.failure: ServiceError | None = None
        self.electing = asyncio.Event()
        self.electing.set()

    async def create(self, specs: Sequence[TopicSpec]) -> frozenset[str]:
        await asyncio.sleep(0.01)
        if self.failure is not None:
            raise self.failure
        self.creations.append(len(specs))
        self.topics.update(spec.name for spec in specs)
        return frozenset()

    async def wait_for_leaders(self, names: Sequence[str]) -> None:
        assert set(names) <= self.topics
        await self.electing.wait()

    async def delete(self, names: Sequence[str]) -> None:
        await asyncio.sleep(0.01)
        self.deletions.append(len(names))
        self.topics.difference_update(names)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def watched() -> set[str]:
    return set()


@pytest.fixture
async def pool(cluster: Cluster, watched: set[str]) -> AsyncIterator[ReplyTopicPool]:
    made = ReplyTopicPool(
        cluster,  # type: ignore[arg-type]
        prefix="replies.",
        ready=4,
        watch=watched.update,
        unwatch=watched.difference_update,
        grace=0.05,
        unended_grace=0.5,
    )
    await made.start()
    yield made
    await made.close()


async def test_ready_ahead_of_need(pool: ReplyTopicPool, cluster: Cluster, watched: set[str]) -> None:
    """Topics exist and are watched before anybody asks, in one call; a lease does not wait."""
    assert cluster.creations == [4]
    topic = await asyncio.wait_for(pool.lease(), 0.001)
    assert topic in cluster.topics & watched
    assert topic.removeprefix("replies.").isalnum()


async def test_demand_is_coalesced(pool: ReplyTopicPool, cluster: Cluster) -> None:
    """Two hundred leases at once take two or three calls, and every topic is handed out once."""
    topics = await asyncio.gather(*(pool.lease() for _ in range(200)))
    assert len(set(topics)) == 200
    assert len(cluster.creations) <= 4


async def test_t30_no_topic_is_handed_out_before_it_has_a_leader(
    pool: ReplyTopicPool, cluster: Cluster, watched: set[str]
) -> None:
    """The creation returns early: until its topics have leaders nobody gets one, and the reader hears of none."""
    first = {await pool.lease() for _ in range(pool.num_ready)}
    cluster.electing.clear()
    leasing = asyncio.create_task(pool.lease())
    async with asyncio.timeout(20):
        while cluster.topics == first:
            await asyncio.sleep(0.001)
    created = cluster.topics - first
    done, _ = await asyncio.wait([leasing], timeout=0.05)
    assert not done
    assert not created & watched
    assert pool.num_ready == 0
    cluster.electing.set()
    assert await asyncio.wait_for(leasing, 20) in created
    assert created <= watched


async def test_refills_and_grows(pool: ReplyTopicPool, cluster: Cluster) -> None:
    """Half empty, it refills; empty, it keeps more from then on, up to a bound."""
    for _ in range(2):
        await pool.lease()
    await asyncio.sleep(0.05)
    assert pool.num_ready == 4
    for _ in range(12):
        await asyncio.gather(*(pool.lease() for _ in range(pool.num_ready + 1)))
        await asyncio.sleep(0.03)
    assert pool.num_ready == MAX_READY


async def test_retired_topics_are_deleted_together(pool: ReplyTopicPool, cluster: Cluster, watched: set[str]) -> None:
    """After the grace period, in one call, and unwatched before; one whose request has not ended stays longer."""
    topics = [await pool.lease() for _ in range(3)]
    pool.retire(topics[2], ended=False)
    for topic in topics[:2]:
        pool.retire(topic, ended=True)
    assert set(topics) <= cluster.topics
    await asyncio.sleep(0.3)
    assert set(topics) & cluster.topics == {topics[2]}
    assert set(topics) & watched == {topics[2]}
    assert cluster.deletions == [2]


async def test_close_leaves_nothing(pool: ReplyTopicPool, cluster: Cluster) -> None:
    """Leased, ready and retired topics are deleted at once; a lease that waits fails."""
    pool.retire(await pool.lease(), ended=False)
    leases = [asyncio.create_task(pool.lease()) for _ in range(9)]
    await asyncio.sleep(0)
    await pool.close()
    assert cluster.topics == set()
    assert any(isinstance(each, StreamClosed) for each in await asyncio.gather(*leases, return_exceptions=True))
    with pytest.raises(StreamClosed):
        await pool.lease()


async def test_failure_reaches_who_waits(pool: ReplyTopicPool, cluster: Cluster) -> None:
    """A creation that is refused fails the leases that need it; the next lease tries again."""
    cluster.failure = TopicsFailed("not authorised")
    results = await asyncio.gather(*(pool.lease() for _ in range(6)), return_exceptions=True)
    assert sum(isinstance(each, TopicsFailed) for each in results) == 2
    cluster.failure = None
    assert await pool.lease() in cluster.topics


async def test_cancelled_lease_loses_no_topic(pool: ReplyTopicPool, cluster: Cluster) -> None:
    """A lease cancelled while it waits, or in the moment it is served, leaves its topic to others."""
    for _ in range(4):
        await pool.lease()
    leases = [asyncio.create_task(pool.lease()) for _ in range(3)]
    await asyncio.sleep(0)
    leases[0].cancel()
    waiter = pool._waiters[1]
    while not waiter.done():
        await asyncio.sleep(0.001)
    leases[1].cancel()
    await asyncio.gather(*leases, return_exceptions=True)
    assert leases[2].result() in cluster.topics
    num_ready = pool.num_ready
    topics = [await pool.lease() for _ in range(num_ready)]
    assert len({*topics, leases[2].result()}) == num_ready + 1


async def test_first_creation_must_succeed(cluster: Cluster) -> None:
    """A user who may not create topics hears of it when the client starts."""
    cluster.failure = BrokerUnavailable("gone")
    pool = ReplyTopicPool(
        cluster,  # type: ignore[arg-type]
        prefix="replies.",
        ready=1,
        watch=lambda _: None,
        unwatch=lambda _: None,
    )
    with pytest.raises(BrokerUnavailable):
        await pool.start()
    cluster.failure = None
    await pool.close()
