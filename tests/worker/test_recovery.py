"""Crashes, lost partitions, duplicates and retries, on an in-memory broker; `t00`: a row of research/queue.md 3.4."""

import asyncio
import threading

import msgpack
import pytest
import structlog
from pydantic import ValidationError

from schemas.reasons import ErrorCode, FinishReason
from schemas.records import Begin, Cancel, End, Tokens
from schemas.reply_log import ReplyLog
from tests.worker.world import World, holds_nothing, until
from worker import loop
from worker.config import Tenant, WorkerConfig
from worker.engine.outputs import StepOutcome, StepPlan


async def running_until(world: World, server, request_id: str, num_records: int) -> None:
    """Delivers what was published, and waits until so many records of an answer are written."""
    for delivery in world.source.deliveries():
        server.deliver(delivery)
    async with asyncio.timeout(20):
        while len(world.broker.topics[f"replies.{request_id}"][0]) < num_records:
            await asyncio.sleep(0)


async def test_t01_a_long_step_leaves_the_event_loop_alone():
    """While the model computes, heartbeats, polls and commits go on: the step has a thread of its own."""
    world = World()
    world.publish("a", max_tokens=3)
    computing, go_on = threading.Event(), threading.Event()
    async with world.worker() as server:
        execute = server.runner.execute

        def slow(plan: StepPlan) -> StepOutcome:
            computing.set()
            assert go_on.wait(20)
            return execute(plan)

        server.runner.execute = slow
        serving = asyncio.create_task(world.serve(server, timeout=30))
        num_turns = 0
        while num_turns < 100 or not computing.is_set():
            await asyncio.sleep(0)
            num_turns += 1
        assert not go_on.is_set()
        go_on.set()
        await serving
    assert world.answer("a").ended


async def test_t13_a_cancelled_task_never_counts_as_done():
    """The partition is lost while a request runs: its service is cancelled, and its record stays undone."""
    world = World()
    world.publish("a", max_tokens=200)
    async with world.worker() as server:
        await running_until(world, server, "a", 4)
        lost = world.source.tracker
        world.source.lose()
        server.drop_lost("standard")
        async with asyncio.timeout(20):
            while server.num_calls:
                await asyncio.sleep(0)
            while server.engine.scheduler.stats().num_blocks_used:  # until the step in flight has ended
                await asyncio.sleep(0)
        assert lost.position == 0
    assert not world.answer("a").ended
    assert world.broker.topics["usage"][0] == []


@pytest.mark.parametrize(("second", "num_warnings"), [("fake", 0), ("other", 1)])
async def test_a_worker_with_another_model_on_the_same_lanes_is_warned_of(second: str, num_warnings: int):
    """Who resumes what such a worker has begun says so, once, and what to do."""
    world = World()
    world.publish("a", max_tokens=60)
    world.publish("b", max_tokens=60)
    async with world.worker("w1") as server:
        await running_until(world, server, "a", 4)
        await running_until(world, server, "b", 4)
        world.source.lose()
        server.drop_lost("standard")
    with structlog.testing.capture_logs() as entries:
        async with world.worker("w2", second) as server:
            await world.serve(server)
    assert world.answer("a").num_begins == world.answer("b").num_begins == 2
    warned = [(e["ours"], e["other"]) for e in entries if e["event"] == "lanes.serve_another_model"]
    assert warned == [("other", "fake")] * num_warnings


async def test_t15_a_killed_worker_is_taken_over_in_the_middle():
    """It dies after some tokens: the next owner goes on at the next one, and computes none of them again."""
    calm = World()
    calm.publish("a", max_tokens=60)
    async with calm.worker() as server:
        await calm.serve(server)
    world = World()
    world.publish("a", max_tokens=60)
    async with world.worker("w1") as server:
        await running_until(world, server, "a", 12)
    num_records, seen = len(world.broker.topics["replies.a"][0]), len(world.answer("a").token_ids[0])
    assert seen >= 11  # besides the `begin`
    assert (world.source.tracker.position, world.broker.topics["usage"][0]) == (0, [])  # it is not done
    world.source.lose()
    async with world.worker("w2") as server:
        await world.serve(server)
    answer = world.answer("a")
    assert answer.token_ids == calm.answer("a").token_ids
    assert answer.text == calm.answer("a").text
    records = list(world.records("replies.a"))
    begins = [(offset, r.worker) for offset, r in records if isinstance(r, Begin)]
    assert begins == [(0, "w1"), (num_records, "w2")]
    second = [r for _, r in records if isinstance(r, Tokens) and r.attempt == num_records]
    assert second[0].position == seen
    assert sum(len(r.token_ids) for r in second) == 60 - seen
    assert answer.num_skipped == answer.num_repeated == 0
    assert (world.source.tracker.position, len(world.broker.topics["usage"][0])) == (1, 1)


async def test_t15_an_end_that_was_written_but_not_marked_done():
    """The worker dies between its `end` and the commit: the next owner reads the end, and writes only the usage record
    that may be missing."""
    world = World()
    world.publish("a")
    async with world.worker("w1") as server:
        await world.serve(server)
    records = list(world.records("replies.a"))
    world.source.tracker = type(world.source.tracker)(0, log_end=1)
    world.clock.seconds = 5.0
    async with world.worker("w2") as server:
        await world.serve(server)
    new = list(world.records("replies.a"))[len(records) :]
    assert [type(r) for _, r in new] == [Begin]
    assert world.answer("a").end == records[-1][1]
    assert world.source.tracker.position == 1
    first, second = (msgpack.unpackb(record.value) for record in world.broker.topics["usage"][0])
    assert (first.pop("at_ms"), second.pop("at_ms")) == (0, 5000)
    assert first == second  # at least once: deduplicated by `input`


async def test_an_answer_on_a_shared_log_may_be_billed_twice_under_one_input():
    """There a new owner cannot tell that an `end` was accepted, and answers again. Who bills takes the first record of
    an `input`: that is what the caller has, whose reader takes the first `end`."""
    world = World()
    world.broker.create("replies.shared")
    world.publish("s", topic=False, headers=[("reply_to", b"replies.shared")], temperature=1.0)
    for name in ("w1", "w2"):
        async with world.worker(name) as server:
            await world.serve(server)
        world.source.tracker = type(world.source.tracker)(0)
    log = ReplyLog()
    for offset, record in world.records("replies.shared"):
        log.feed(offset, record)
    first, second = (msgpack.unpackb(record.value) for record in world.broker.topics["usage"][0])
    assert first["input"] == second["input"]
    assert log.end is not None
    assert log.end.usage is not None
    assert log.begin is not None
    assert log.begin.worker == "w1"
    assert first["total_ms"] == log.end.timing.total_ms
    assert first["completion_tokens"] == log.end.usage.completion_tokens == len(log.token_ids[0])


async def test_t32_a_deadline_is_never_moved():
    """After a crash the deadline is what it was: the time that the first attempt took is gone."""
    world = World()
    world.publish("a", max_tokens=200, headers=[("deadline_ms", b"10000")])
    async with world.worker("w1") as server:
        await running_until(world, server, "a", 4)
    world.source.lose()
    world.clock.seconds = 9.0
    async with world.worker("w2") as server:
        await running_until(world, server, "a", len(world.broker.topics["replies.a"][0]) + 3)
        world.clock.seconds = 10.5
        await world.serve(server)
        assert server.engine.scheduler.stats().num_blocks_used == 0
        assert server.engine.scheduler.stats().num_waiting == 0
    answer = world.answer("a")
    assert answer.end.finish_reason is FinishReason.DEADLINE
    assert 0 < len(answer.token_ids[0]) < 200


async def test_t32_nothing_stays_reserved_however_requests_end(monkeypatch):
    """Ended, cancelled, expired, refused, gone, failed and lost, with a seat, waiting for one or for their quota: no
    block, seat or queue entry is left, and nothing of a tenant's quota stays reserved."""
    monkeypatch.setattr(loop, "RETRY_PAUSES_S", ())
    tenants = {"slow": Tenant(requests_per_s=1.0), "spent": Tenant(requests_per_s=1e-6)}
    slow = [("tenant", b"slow")]
    world = World(max_num_seqs=2, tenants=tenants, quota_burst_seconds=1.0)
    world.clock.seconds = 1.0
    for i in range(4):
        world.publish(f"run{i}", max_tokens=40)
    world.publish("cancelled", max_tokens=200)
    world.publish("late", max_tokens=200, headers=[("deadline_ms", b"1500")])
    world.publish("refused", raw=b'{"prompt": "x", "max_token": 1}')
    world.publish("gone", topic=False)
    for name in ("first", "cancelled-delayed", "then"):
        world.publish(name, headers=slow)
    for name in ("all", "over"):
        world.publish(name, headers=[("tenant", b"spent")])
    async with world.worker() as server:
        await running_until(world, server, "run0", 4)
        await until(lambda: server.gate.num_delayed == 2)
        assert len(server.admission.quotas) > 2
        server.cancel(Cancel(b"cancelled"))
        server.cancel(Cancel(b"cancelled-delayed"))
        await until(lambda: server.gate.num_delayed == 1)
        world.clock.move_to(4.0)
        await world.serve(server)
        assert holds_nothing(server)
        assert world.answer("over").end.error.code == ErrorCode.QUOTA_EXCEEDED
        assert world.source.tracker.position == 13
        for name in ("lost", "lost-delayed"):
            world.publish(name, max_tokens=200, headers=slow)
        world.clock.move_to(5.0)
        await running_until(world, server, "lost", 4)
        assert (len(server.admission.quotas), server.gate.num_delayed) == (2, 1)
        world.source.lose()
        server.drop_lost("standard")
        assert len(server.admission.quotas) == 0  # at once
        await until(lambda: not server.num_calls and holds_nothing(server))
        server.runner.failing = range(10**6)  # they come again
        world.deliver(server)
        await until(lambda: server.gate.num_delayed == 1)
        world.clock.move_to(9.0)
        await world.serve(server)
        assert holds_nothing(server)
        assert {world.answer(name).end.error.code for name in ("lost", "lost-delayed")} == {ErrorCode.INTERNAL}
        server.engine.scheduler.check_integrity()


async def test_t23_a_transient_failure_is_retried_in_place(monkeypatch):
    """A step that fails once is run again: no rewind, no new record, the same tokens; the caller sees nothing of it."""
    monkeypatch.setattr(loop, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))
    calm = World()
    calm.publish("a", max_tokens=30)
    async with calm.worker() as server:
        await calm.serve(server)
    world = World()
    world.publish("a", max_tokens=30)
    async with world.worker() as server:
        execute, num_failures = server.runner.execute, 0

        def flaky(plan: StepPlan) -> StepOutcome:
            nonlocal num_failures
            if plan.step in (3, 7) and num_failures < 3:
                num_failures += 1
                raise RuntimeError("out of memory")
            return execute(plan)

        server.runner.execute = flaky
        await world.serve(server)
    assert num_failures == 3
    assert world.answer("a").token_ids == calm.answer("a").token_ids
    assert [type(r) for _, r in world.records("replies.a")].count(Begin) == 1
    assert len(world.broker.topics["prompts.standard"][0]) == 1


async def test_t33_positions_are_numbers():
    """Of 120 records, resumed after more than ten and again after more than a hundred, none is out of order."""
    world = World()
    world.publish("a", max_tokens=120)
    for life, num_records in enumerate((14, 105)):
        async with world.worker(f"w{life}") as server:
            await running_until(world, server, "a", num_records)
        world.source.lose()
    async with world.worker("last") as server:
        await world.serve(server)
    positions = [r.position for _, r in world.records("replies.a") if isinstance(r, Tokens)]
    assert positions == sorted(positions)
    assert len(world.answer("a").token_ids[0]) == 120


@pytest.mark.parametrize(("drain_timeout", "fits"), [(5.0, True), (6.0, False), (30.0, False)])
def test_t34_a_drain_that_outlasts_a_rebalance_is_refused(drain_timeout: float, fits: bool):
    """What is drained for longer than a re-balance takes is served by two: the configuration says so at the start."""
    if fits:
        assert WorkerConfig(model="tiny", drain_timeout=drain_timeout, rebalance_timeout_ms=6_000).drain_timeout == 5.0
    else:
        with pytest.raises(ValidationError, match="drain_timeout must be shorter than rebalance_timeout_ms"):
            WorkerConfig(model="tiny", drain_timeout=drain_timeout, rebalance_timeout_ms=6_000)


async def test_t36_one_traceparent_on_every_record_that_is_passed_on():
    """A request with two: `begin` and `end` carry exactly one, `tokens` none."""
    world = World()
    trace = "0af7651916cd43dd8448eb211c80319c"
    stale = ("traceparent", f"00-{'1' * 32}-{'2' * 16}-01".encode())
    world.publish("a", headers=[stale, ("traceparent", f"00-{trace}-{'2' * 16}-01".encode())])
    async with world.worker() as server:
        await world.serve(server)
    for record in world.broker.topics["replies.a"][0]:
        headers = [value for name, value in record.headers if name == "traceparent"]
        event = dict(record.headers)["event"]
        assert len(headers) == (event != b"tokens")
        assert all(trace.encode() in value for value in headers), "the last one counts"


async def test_a_duplicate_does_not_take_the_topic_from_its_twin():
    """Two records of one request: the younger's service ends at its deadline while the older still writes. The topic is
    forgotten once, when both have ended (found by bench.faults: the older's `end` waited 30 s for a leader)."""
    world = World()
    for _ in range(2):
        world.publish("a", max_tokens=200)
    async with world.worker() as server:
        await running_until(world, server, "a", 4)
        older, younger = server._calls.values()
        younger.cancel()
        await asyncio.gather(younger, return_exceptions=True)
        assert world.sink.forgotten == []
        await world.serve(server)
        await older
    assert world.sink.forgotten == ["replies.a"]
    assert isinstance(world.answer("a").end, End)
