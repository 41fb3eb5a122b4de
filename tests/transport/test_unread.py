"""How old what is still in a partition is taken to be."""

from aiokafka import TopicPartition

from tests.transport.lanes import P0, P1, Bench, FakeConsumer, running
from worker.transport.unread import Unread


def test_it_is_counted_from_the_record_before_or_from_when_there_was_none():
    """Whichever is later; a clock that is ahead counts as now, and one that is behind takes nothing back."""
    unread = Unread()
    assert unread.age_ms(50.0) == 0.0
    unread.looked(100.0, lag=3)
    unread.looked(200.0, lag=4)
    assert unread.age_ms(1000.0) == 900.0  # since it was first seen
    unread.read(published_ms=40.0, now_ms=300.0)
    assert unread.age_ms(1000.0) == 960.0
    unread.looked(400.0, lag=0)
    unread.looked(500.0, lag=1)
    assert unread.age_ms(1000.0) == 600.0
    unread.read(published_ms=390.0, now_ms=600.0)
    assert unread.age_ms(1000.0) == 600.0
    unread.read(published_ms=9e9, now_ms=700.0)
    assert unread.age_ms(1000.0) == 300.0


async def test_a_full_partition_ages_from_the_last_record_taken_in():
    """Ten of fifty are taken in, the last was published at 9 ms; an empty partition beside it has no age."""
    now = [500.0]
    async with running(*[b"x"] * 50, max_outstanding=10, wall_ms=lambda: now[0]) as bench:
        await bench.until(lambda: bench.consumer.paused() == {P0})
        now[0] = 30_009.0
        assert bench.lane.unread_ages() == {0: 30.0}
        bench.consumer.logs[P1] = []
        await bench.consumer.rebalance([P0, P1])
        await bench.lane.look_for_ends()
        assert bench.lane.unread_ages().keys() == {0}


async def test_a_record_after_a_pause_is_not_as_old_as_the_pause():
    """An hour of nothing, then one record that is not fetched yet: it is not an hour old, but at most what has passed
    since somebody looked."""
    now = [0.0]
    async with running(b"x", wall_ms=lambda: now[0]) as bench:
        await bench.until(lambda: bench.offsets == [0])
        now[0] = 3_600_000.0
        await bench.lane.look_for_ends()
        bench.consumer.pause(P0)  # no fetch brings it
        bench.lane._draining = True  # nor is the pause taken back
        bench.consumer.logs[P0] += [b"y"]
        now[0] += 4_000.0
        await bench.lane.look_for_ends()
        now[0] += 1_000.0
        assert bench.lane.unread_ages() == {0: 5.0}


async def test_a_lag_from_which_nothing_was_ever_taken_in_ages_from_when_it_was_seen():
    """A worker that drains is given a partition with a backlog."""
    now = [7_000.0]
    bench = Bench(FakeConsumer({P0: []}), wall_ms=lambda: now[0])
    other = TopicPartition(P0.topic, 5)
    bench.consumer.logs[other] = [b"x"] * 3
    bench.lane._trackers |= await bench.lane._new_trackers([other])
    now[0] = 19_000.0
    bench.consumer.positions[other] = 0
    assert bench.lane.unread_ages() == {5: 12.0}
