"""A lane through re-balances, failing commits and broken fetches; `t00` in a name: a row of research/queue.md 3.4."""

import asyncio
from types import SimpleNamespace

import pytest
from aiokafka.errors import CommitFailedError, KafkaConnectionError, KafkaError, RequestTimedOutError
from aiokafka.structs import OffsetAndMetadata

from tests.transport.lanes import P0, P1, Bench, FakeConsumer, running
from worker.transport.kafka_connections import KafkaUnavailable
from worker.transport.kafka_lane import _num_bytes


async def test_t26_only_the_contiguous_prefix_is_committed():
    """The second of three is done: nothing is committed past the first; the metadata says what is done above."""
    async with running(b"a", b"b", b"c") as bench:
        await bench.until(lambda: bench.offsets == [0, 1, 2])
        bench.done(1)
        await bench.until(lambda: bool(bench.consumer.commits))
        assert bench.at() == 0
        assert bench.consumer.committed[P0].metadata != ""
        bench.done(0, 2)
        await bench.committed(3)


async def test_t07_what_failed_is_not_committed_past():
    """A record that is never done stays the commit position, however many follow, and a new owner gets it again."""
    async with running(*[b"x"] * 8) as bench:
        await bench.until(lambda: len(bench.offsets) == 8)
        bench.done(0, 1, 3, 4, 5, 6, 7)
        await bench.committed(2)
    heir = Bench(FakeConsumer(bench.consumer.logs))
    heir.consumer.committed = bench.consumer.committed
    task = asyncio.create_task(heir.lane.run())
    await heir.until(lambda: heir.offsets == [2])
    await heir.polls()
    assert heir.offsets == [2]
    heir.lane.stop()
    await task


async def test_t14_closing_commits_what_is_done_and_no_more():
    """A stop with one of three unfinished: the commit is of the done prefix, never of the fetch position."""
    async with running(b"a", b"b", b"c", commit_interval=60) as bench:
        await bench.until(lambda: len(bench.offsets) == 3)
        bench.done(0)
    assert bench.at() == 1
    assert bench.consumer.stopped


async def test_t16_what_is_done_during_the_last_commit_is_committed_too():
    """The lane is stopped while a commit is on its way: one more follows it (found by reading; lost a done record)."""
    async with running(b"a", b"b") as bench:
        await bench.until(lambda: len(bench.offsets) == 2)
        in_flight, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            in_flight.set()
            await go_on.wait()

        bench.consumer.on_commit = slow
        bench.done(0)
        await asyncio.wait_for(in_flight.wait(), 20)
        bench.done(1)
        bench.lane.stop()
        go_on.set()
    assert bench.at() == 2


async def test_t05_no_commit_between_revocation_and_assignment():
    """A revocation waits for the commit in flight, and no other starts before the new assignment."""
    async with running(b"a", b"b") as bench:
        await bench.until(lambda: len(bench.offsets) == 2)
        in_flight, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            in_flight.set()
            await go_on.wait()

        bench.consumer.on_commit = slow
        bench.done(0)
        await asyncio.wait_for(in_flight.wait(), 20)
        revoked: list[int] = []

        async def between() -> None:
            revoked.append(len(bench.consumer.commits))
            bench.done(1)
            for _ in range(5):
                await asyncio.sleep(0.002)  # several commit intervals
            revoked.append(len(bench.consumer.commits))

        rebalance = asyncio.create_task(bench.consumer.rebalance([P0], between))
        await asyncio.sleep(0.005)
        assert not revoked, "revoked with a commit in flight"
        bench.consumer.on_commit = lambda: None
        go_on.set()
        await asyncio.wait_for(rebalance, 20)
        assert revoked == [1, 1]
        await bench.committed(2)


@pytest.mark.parametrize("error", [CommitFailedError(), KafkaError("fatal"), RequestTimedOutError()])
async def test_t02_a_failed_commit_is_tried_again(error: KafkaError):
    """Whatever a commit fails with, the lane goes on, and the next one holds the same."""
    async with running(b"a") as bench:
        failures = [error]

        def fail() -> None:
            if failures:
                raise failures.pop()

        bench.consumer.on_commit = fail
        await bench.until(lambda: len(bench.offsets) == 1)
        bench.done(0)
        await bench.committed(1)
        bench.consumer.logs[P0].append(b"b")
        await bench.until(lambda: bench.offsets == [0, 1])


async def test_t27_commit_of_a_lost_partition():
    """The broker took one of two partitions in the moment of the commit, which then fails as a whole: no crash, and the
    other is committed once the call-backs have run."""
    async with running(b"a") as bench:
        bench.consumer.logs[P1] = [b"b"]
        await bench.consumer.rebalance([P0, P1])
        await bench.until(lambda: len(bench.deliveries) == 2)
        await bench.committed(0, P1)  # that they are taken in
        num_tried, num_commits = 0, len(bench.consumer.commits)

        def count() -> None:
            nonlocal num_tried
            num_tried += 1

        bench.consumer.on_commit = count
        del bench.consumer.positions[P0]  # before any call-back has run
        bench.done(0)
        await bench.until(lambda: num_tried >= 2)
        assert len(bench.consumer.commits) == num_commits
        await bench.consumer.rebalance([P1])
        await bench.committed(1, P1)
        assert bench.at(P0) == 0


async def test_t12_a_slow_commit_holds_nothing_up():
    """While a commit takes for ever, records are taken in and done."""
    async with running(b"a", b"b") as bench:
        go_on = asyncio.Event()
        bench.consumer.on_commit = go_on.wait
        await bench.until(lambda: len(bench.offsets) == 2)
        bench.done(0)
        await bench.polls(20)
        bench.consumer.logs[P0] += [b"c"] * 5
        await bench.until(lambda: len(bench.offsets) == 7)
        bench.done(1)
        go_on.set()
        await bench.committed(2)


async def test_t25_pauses_are_applied_again_after_a_rebalance():
    """A full partition that comes back stays paused: the bound holds through any number of re-balances."""
    async with running(*[b"x"] * 50, max_outstanding=10) as bench:
        await bench.until(lambda: bench.consumer.paused() == {P0})
        for _ in range(3):
            await bench.consumer.rebalance([P0])
            assert bench.consumer.paused() == {P0}
            await bench.polls()
        assert len(bench.offsets) == 10
        bench.done(*range(10))
        await bench.until(lambda: len(bench.offsets) == 20)


async def test_t25_bytes_are_bounded_too():
    """Few large records fill a lane as many small ones do; nothing is lost, each comes once."""
    async with running(*[b"x" * 1000] * 12, max_outstanding=100, max_outstanding_bytes=3000) as bench:
        await bench.until(lambda: bench.consumer.paused() == {P0})
        assert len(bench.offsets) == 3
        for done in range(12):
            await bench.until(lambda done=done: len(bench.offsets) > done)
            assert bench.lane.num_outstanding <= 3
            bench.done(done)
        assert bench.offsets == list(range(12))


def test_t25_all_of_a_record_counts():
    """Key and headers are held in memory as its value is."""
    headers = [("name", b"12"), ("none", None)]
    assert _num_bytes(SimpleNamespace(key=b"k" * 100, value=b"v" * 10, headers=headers)) == 120  # type: ignore[arg-type]
    assert _num_bytes(SimpleNamespace(key=None, value=None, headers=[])) == 0  # type: ignore[arg-type]


async def test_t17_a_partition_that_comes_back_keeps_what_runs():
    """A re-balance in which it stays: nothing is delivered again, nothing is lost, and what runs is still ours."""
    async with running(b"a", b"b") as bench:
        await bench.until(lambda: len(bench.offsets) == 2)
        await bench.consumer.rebalance([P0])
        await bench.polls()
        assert bench.offsets == [0, 1]
        assert bench.num_losses == 0
        assert all(bench.lane.owns(d) for d in bench.deliveries)
        bench.done(0, 1)
        await bench.committed(2)


async def test_t22_a_stale_acknowledgement_changes_nothing():
    """The partition leaves and returns: what ran before is no longer ours, its `done` moves no commit, and it is
    delivered again."""
    async with running(b"a", b"b") as bench:
        await bench.until(lambda: len(bench.offsets) == 2)
        await bench.consumer.rebalance([])
        assert bench.num_losses == 1
        await bench.consumer.rebalance([P0])
        await bench.until(lambda: len(bench.offsets) == 4)
        stale, fresh = bench.deliveries[:2], bench.deliveries[2:]
        assert not any(bench.lane.owns(d) for d in stale)
        for delivery in stale:
            bench.lane.done(delivery)
        await bench.polls(20)
        assert {commit[P0].offset for commit in bench.consumer.commits} <= {0}
        for delivery in fresh:
            bench.lane.done(delivery)
        await bench.committed(2)


async def test_t06_an_evicted_member_starts_from_the_commit():
    """After an eviction the same partition may have had another owner: it is read from the group's commit, and ours
    never falls behind that (found by reading: it did)."""
    async with running(*[b"x"] * 6) as bench:
        await bench.until(lambda: len(bench.offsets) == 6)
        bench.consumer.committed[P0] = OffsetAndMetadata(5, "")  # another owner's
        bench.consumer._coordinator.member_id = "member-2"
        await bench.consumer.rebalance([P0])
        assert bench.num_losses == 1
        await bench.until(lambda: bench.offsets == [0, 1, 2, 3, 4, 5, 5])
        for delivery in bench.deliveries[:6]:
            bench.lane.done(delivery)
        await bench.polls(20)
        assert bench.at() == 5
        bench.lane.done(bench.deliveries[6])
        await bench.committed(6)


async def test_t21_a_gap_in_the_log_is_passed():
    """Compacted offsets and transaction markers: everything is delivered, and the commit passes the gap."""
    async with running(b"a", None, None, b"b", None, b"c") as bench:
        await bench.until(lambda: bench.offsets == [0, 3, 5])
        bench.done(0, 3, 5)
        await bench.committed(6)


async def test_t21_records_swallowed_by_a_rebalance_are_fetched_again():
    """Records arrive before the new assignment is announced: they are taken when it is, none is skipped."""
    async with running() as bench:
        bench.consumer.logs[P1] = [b"a", b"b", b"c"]

        def between() -> None:
            bench.consumer.positions = {P1: 0}  # aiokafka delivers before it announces

        await bench.consumer.rebalance([P1], between)
        await bench.until(lambda: bench.offsets == [0, 1, 2])
        await bench.polls()
        assert bench.offsets == [0, 1, 2]


@pytest.mark.parametrize(("committed", "expected"), [(None, [0, 1]), (-1, [0, 1]), (0, [0, 1]), (1, [1])])
async def test_t08_a_committed_0_is_an_offset(committed: int | None, expected: list[int]):
    """Nothing committed begins where the log begins; 0 is a commit like any other."""
    bench = Bench(FakeConsumer({P0: [b"a", b"b"]}))
    if committed is not None:
        bench.consumer.committed[P0] = OffsetAndMetadata(committed, "")
    task = asyncio.create_task(bench.lane.run())
    await bench.until(lambda: len(bench.offsets) == len(expected))
    await bench.polls()
    assert bench.offsets == expected
    bench.lane.stop()
    await task


async def test_unknown_committed_offsets_are_asked_for_again():
    """Without them a partition is not read: finished requests would run again."""
    failures = [KafkaConnectionError(), OSError()]

    async def committed(_group: str, _partitions: list) -> dict:
        if failures:
            raise failures.pop()
        return {P0: OffsetAndMetadata(1, "")}

    async with running(b"a", b"b", committed=committed) as bench:
        await bench.until(lambda: bench.offsets == [1])


async def test_an_assignment_that_fails_ends_the_lane():
    """aiokafka only logs what a listener raises; the lane would wait for ever."""

    async def committed(_group: str, _partitions: list) -> dict:
        raise ZeroDivisionError

    bench = Bench(FakeConsumer({P0: [b"a"]}), committed=committed)
    with pytest.raises(KafkaUnavailable, match="ZeroDivisionError"):
        await asyncio.wait_for(bench.lane.run(), 20)
    assert bench.consumer.stopped


async def test_t04_a_fetching_task_that_ends_is_noticed():
    """Its polls would find nothing for ever: the lane says so, and the watchdog replaces it. One that is told to stop
    is not broken."""
    bench = Bench(FakeConsumer({P0: [b"a"]}))
    task = asyncio.create_task(bench.lane.run())
    await bench.until(lambda: bench.offsets == [0])
    assert not bench.lane.broken
    bench.consumer.has_died = True
    assert bench.lane.broken
    bench.lane.stop()
    assert not bench.lane.broken
    await asyncio.wait_for(task, 20)


async def test_a_committing_task_that_dies_ends_the_lane():
    """A bug in it must not leave a lane that serves and never commits."""
    bench = Bench(FakeConsumer({P0: [b"a"]}))

    def broken() -> None:
        raise ZeroDivisionError

    bench.consumer.on_commit = broken
    task = asyncio.create_task(bench.lane.run())
    await bench.until(lambda: bench.offsets == [0])
    bench.done(0)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(task, 20)


async def test_t03_polls_are_recorded():
    """What a liveness check looks at: the time of the last poll that returned, also while everything is paused."""
    async with running(*[b"x"] * 10, max_outstanding=2) as bench:
        await bench.until(lambda: bench.consumer.paused() == {P0})
        before = bench.lane.polled_at
        await bench.until(lambda: bench.lane.polled_at > before > 0)


async def test_lag_and_gap_of_a_partition():
    """What is not taken in counts as lag, also while the partition is paused, once somebody has looked; what is done
    behind an open record is a gap."""
    async with running(*[b"x"] * 50, max_outstanding=10) as bench:
        await bench.until(lambda: bench.consumer.paused() == {P0})
        assert (bench.lane.lags(), bench.lane.gaps()) == ({0: 40}, {0: 10})
        bench.consumer.logs[P0] += [b"x"] * 5
        await bench.polls()
        assert bench.lane.lags() == {0: 40}
        await bench.lane.look_for_ends()
        assert bench.lane.lags() == {0: 45}
        bench.done(0, 1, 5)
        assert bench.lane.gaps() == {0: 8}
        await bench.consumer.rebalance([])
        assert bench.lane.lags() == bench.lane.gaps() == {}
