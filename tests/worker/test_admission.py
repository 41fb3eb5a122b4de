"""Admission in the worker: who is let in, when, and what is held meanwhile. On an in-memory broker, a clock by hand."""

import asyncio
import random

import msgpack
import pytest

from schemas.codec import ContentType
from schemas.headers import ReplyAddress
from schemas.reasons import ErrorCode, FinishReason
from schemas.records import Begin, Cancel, InputRef
from schemas.topics import Tier
from tests.engine.builders import make_request
from tests.worker.world import LANE, World, holds_nothing, turns, until
from worker.config import Tenant
from worker.engine.step_model import StepCost, StepModel
from worker.transport.memory import Fate, MemorySink

ONE_A_SECOND = {"tenants": {"slow": Tenant(requests_per_s=1.0)}, "quota_burst_seconds": 1.0}
HARDLY_ANY = {"default_tenant": Tenant(requests_per_s=1e-6)}
SLOW = [("tenant", b"slow")]
# 1,000 prompt tokens a second in full steps of 64 tokens; a decode step takes 10 ms.
COST = StepCost(base=0.01, per_prefill_token=0.00084375, per_context_token=0.0, per_decode=0.0)


def tiers(**fields: object) -> dict[str, Tier]:
    return {"standard": Tier("standard", default_priority=4, priority_cap=6, **fields)}


async def test_a_delayed_request_waits_with_nothing_and_then_runs():
    """The second request of a second has no record, seat or block until its quota covers it; others pass it."""
    world = World(**ONE_A_SECOND)
    for name, headers in (("a", SLOW), ("b", SLOW), ("other", [])):
        world.publish(name, headers=headers)
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: server.num_calls == 1)
        assert server.gate.num_delayed == 1
        assert world.answer("a").ended
        assert world.answer("other").ended
        assert not list(world.records("replies.b"))
        assert server.engine.scheduler.stats().num_blocks_used == 0
        world.clock.move_to(0.9)
        await turns(50)
        assert server.gate.num_delayed == 1
        world.clock.move_to(1.0)
        await world.serve(server)
        assert holds_nothing(server)
    answer = world.answer("b")
    assert len(answer.token_ids[0]) == 12
    assert answer.begin.queued_ms == 1000.0
    assert world.source.tracker.position == 3


async def test_requests_of_a_tenant_start_in_the_order_in_which_they_came():
    """Ten delayed requests begin one a second."""
    world = World(**ONE_A_SECOND)
    for i in range(10):
        world.publish(f"r{i}", headers=SLOW)
    async with world.worker() as server:
        world.deliver(server)
        for i in range(10):
            world.clock.move_to(float(i))
            await until(lambda: server.num_calls == 9 - i)  # noqa: B023
            assert [world.answer(f"r{k}").ended for k in range(10)] == [k <= i for k in range(10)]


async def test_a_quota_that_is_used_up_for_long_refuses():
    """Beyond the tier's bound on the delay: quota_exceeded, with the time after which it helps to try again."""
    world = World(tiers=tiers(max_quota_delay_ms=2000.0), **ONE_A_SECOND)
    for i in range(4):
        world.publish(f"r{i}", headers=SLOW)
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: world.answer("r3").ended)
        end = world.answer("r3").end
        assert (end.attempt, end.finish_reason) == (-1, FinishReason.ERROR)
        assert (end.error.code, end.error.retry_after_ms) == (ErrorCode.QUOTA_EXCEEDED, 3000)
        assert "slow" in end.error.message
        assert len(list(world.records("replies.r3"))) == 1
        world.clock.move_to(2.0)
        await world.serve(server)
        assert holds_nothing(server)
    assert [world.answer(f"r{i}").end.finish_reason for i in range(3)] == [FinishReason.LENGTH] * 3
    assert world.source.tracker.position == 4
    usage = [msgpack.unpackb(record.value) for record in world.broker.topics["usage"][0]]
    assert {u["tenant"] for u in usage} == {"slow"}
    assert sorted(u["completion_tokens"] for u in usage) == [0, 12, 12, 12]


async def test_a_full_queue_refuses_as_overloaded():
    """One seat, twelve prompt tokens may wait: the third of three prompts of five is told when to come back."""
    world = World(max_num_seqs=1, step_model=StepModel(prior=COST), tiers=tiers(max_queued_tokens=12))
    for name in "abc":
        world.publish(name)
    async with world.worker() as server:
        await world.serve(server)
        assert holds_nothing(server)
        world.publish("later")
        await world.serve(server)
    end = world.answer("c").end
    assert (end.attempt, end.error.code, end.error.retry_after_ms) == (-1, ErrorCode.OVERLOADED, 3)
    assert [world.answer(name).end.finish_reason for name in ("a", "b", "later")] == [FinishReason.LENGTH] * 3


async def test_a_prompt_that_has_a_seat_is_not_in_the_queue():
    """While one runs, twelve more tokens may wait: two prompts of five, and not a third."""
    world = World(max_num_seqs=1, tiers=tiers(max_queued_tokens=12))
    world.publish("runs", max_tokens=200)
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: len(world.broker.topics["replies.runs"][0]) > 2)
        for name in "abc":
            world.publish(name)
        await world.serve(server)
        assert holds_nothing(server)
    ends = [world.answer(name).end for name in ("runs", *"abc")]
    assert [end.error and end.error.code for end in ends] == [None, None, None, ErrorCode.OVERLOADED]


async def test_who_ends_in_its_first_step_had_a_seat():
    """A request of one token takes its seat and ends in one step: its stream knows of both."""
    world = World()
    seats = []
    async with world.worker() as server:
        stream = server.engine.add(make_request(max_tokens=1), lambda: seats.append("seat"))
        await until(lambda: stream.finished)
        assert stream.admitted_at == 0.0
    assert seats == ["seat"]


async def test_a_ttft_target_bounds_the_queue_by_the_measured_throughput():
    """12 ms at 1,000 tokens a second: twelve tokens may wait. While nothing is measured, as many as come."""
    for model, codes in ((StepModel(prior=COST), {None, ErrorCode.OVERLOADED}), (StepModel(), {None})):
        world = World(max_num_seqs=1, step_model=model, tiers=tiers(ttft_ms=12.0))
        for name in "abc":
            world.publish(name)
        async with world.worker() as server:
            await world.serve(server)
        assert {end.error and end.error.code for end in (world.answer(n).end for n in "abc")} == codes


async def test_a_deadline_that_cannot_be_met_is_refused():
    """Where the tier says so; elsewhere the request runs, and ends when its deadline comes."""
    # 200 prompt tokens take 0.2 s and more; predicted are 12 tokens, so eleven steps of 10 ms follow.
    for refuse, deadline_ms, expected in (
        (True, 290, ErrorCode.DEADLINE_UNREACHABLE),
        (True, 10_000, None),
        (False, 290, None),
    ):
        world = World(step_model=StepModel(prior=COST), tiers=tiers(refuse_unreachable=refuse))
        world.publish("a", prompt="x" * 200, headers=[("deadline_ms", str(deadline_ms).encode())])
        async with world.worker() as server:
            await world.serve(server)
            assert holds_nothing(server)
        end = world.answer("a").end
        assert (end.error.code if end.error else None) == expected
        assert (end.attempt == -1) == (expected is not None)


async def test_a_deadline_that_has_passed_is_no_matter_of_quota():
    """Where unreachable deadlines are not refused it ends as `deadline`, also when its tenant has nothing left."""
    world = World(**ONE_A_SECOND)
    world.clock.seconds = 5.0
    world.publish("a", headers=[*SLOW, ("deadline_ms", b"4000")])
    async with world.worker() as server:
        await world.serve(server)
        assert holds_nothing(server)
    assert world.answer("a").end.finish_reason is FinishReason.DEADLINE


async def test_cancel_ends_a_delayed_request_at_once():
    """It ends as cancelled, never had a seat, and its tenant has its quota back."""
    world = World(**ONE_A_SECOND)
    for name in "ab":
        world.publish(name, headers=SLOW)
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: server.num_calls == 1)
        server.cancel(Cancel(b"b"))
        await world.serve(server)
        assert holds_nothing(server)
        assert server.admission.quotas.ready_at("slow", 1, 1.0) == 1.0
    answer = world.answer("b")
    assert (answer.end.finish_reason, answer.token_ids) == (FinishReason.CANCELLED, {})
    assert sum(len(step.admitted) for step in world.steps) == 1


async def test_the_delayed_move_up_and_keep_their_order():
    """One that waits is cancelled: those behind it start a second earlier, one by one, and a newcomer behind them."""
    world = World(**ONE_A_SECOND)
    for name in "abcd":
        world.publish(name, headers=SLOW)
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: server.num_calls == 3)
        server.cancel(Cancel(b"b"))
        await until(lambda: server.num_calls == 2)
        world.publish("e", headers=SLOW)
        world.deliver(server)
        await until(lambda: server.gate.num_delayed == 3)
        for second, name in ((1.0, "c"), (2.0, "d"), (3.0, "e")):
            world.clock.move_to(second)
            await until(lambda: world.answer(name).ended)  # noqa: B023
            assert server.gate.num_delayed == 3 - second
        await world.serve(server)
        assert holds_nothing(server)


async def test_what_is_given_back_lets_the_delayed_in_at_once():
    """Of what covers 40 tokens a has reserved them all and used few: b and c, reserved behind it, need not wait on."""
    world = World(tenants={"slow": Tenant(tokens_per_s=1.0)}, quota_burst_seconds=40.0)
    world.publish("a", headers=SLOW, max_tokens=39)
    world.publish("b", headers=SLOW, max_tokens=5)
    world.publish("c", headers=SLOW, max_tokens=5)
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: server.gate.num_delayed == 2)
        server.cancel(Cancel(b"a"))
        await until(lambda: not server.num_calls)
        assert holds_nothing(server)
    assert [len(world.answer(name).token_ids[0]) for name in "bc"] == [5, 5]
    assert world.answer("c").begin.queued_ms == 0.0


async def test_a_share_that_shrinks_delays_longer_until_the_deadline():
    """A tenth of the rate: what was to start after 1 s would after 10 s, so its deadline ends it after 2 s."""
    world = World(**ONE_A_SECOND)
    world.publish("a", headers=SLOW)
    world.publish("b", headers=[*SLOW, ("deadline_ms", b"2000")])
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: server.num_calls == 1)
        server.gate.share(0.1)
        world.clock.move_to(1.5)
        await turns(50)
        assert server.gate.num_delayed == 1
        world.clock.move_to(2.0)
        await world.serve(server)
        assert holds_nothing(server)
    assert world.answer("b").end.finish_reason is FinishReason.DEADLINE


async def test_a_share_that_grows_lets_the_delayed_in_sooner():
    """Half of the rate: after 2 s; with all of it again, after 1 s."""
    world = World(**ONE_A_SECOND)
    for name in "ab":
        world.publish(name, headers=SLOW)
    async with world.worker() as server:
        server.gate.share(0.5)
        world.deliver(server)
        await until(lambda: server.num_calls == 1)
        server.gate.share(1.0)
        world.clock.move_to(1.0)
        await world.serve(server)
    assert world.answer("b").end.finish_reason is FinishReason.LENGTH


async def test_the_seats_of_a_tenant_are_limited_and_shared():
    """Four seats in the deployment, half of it here: a tenant runs two at a time, another one the rest."""
    world = World(max_num_seqs=8, tenants={"few": Tenant(max_running=4)})
    for i in range(6):
        world.publish(f"few{i}", headers=[("tenant", b"few")])
        world.publish(f"free{i}")
    async with world.worker() as server:
        server.gate.share(0.5)
        await world.serve(server)
    running: dict[str, int] = {"few": 0, "fre": 0}
    most = dict(running)
    for step in world.steps:
        for request_id in step.admitted:
            running[request_id[:3]] += 1
        most = {name: max(most[name], running[name]) for name in most}
        for request_id in step.finished:
            running[request_id[:3]] -= 1
    assert most == {"few": 2, "fre": 6}


async def test_drain_hands_the_delayed_over_at_once():
    """Nothing was written for it and it is not done: the next worker decides anew. The running one is finished."""
    world = World(**ONE_A_SECOND)
    for name in "ab":
        world.publish(name, headers=SLOW)
    async with world.worker("w1") as server:
        world.deliver(server)
        await until(lambda: server.gate.num_delayed == 1)
        assert await server.drain(60) == 1
        assert world.answer("a").ended
        assert holds_nothing(server)
    assert not list(world.records("replies.b"))
    assert world.source.tracker.position == 1
    world.source.lose()
    async with world.worker("w2") as server:
        await world.serve(server)
    assert world.answer("b").begin.worker == "w2"


async def test_what_becomes_delayed_during_a_drain_is_handed_over_too():
    """A record that was taken in just before does not hold the end up until its quota covers it."""
    world = World(**ONE_A_SECOND)
    for name in "ab":
        world.publish(name, headers=SLOW)
    async with world.worker() as server:
        world.deliver(server)
        assert await server.drain(60) == 1
        assert holds_nothing(server)
    assert world.source.tracker.position == 1


async def test_a_lost_partition_takes_the_delayed_with_it():
    """Its reservation is free at once, so those that stay are not behind it when the share is renewed."""
    world = World(**ONE_A_SECOND)
    for i in range(5):
        world.publish(f"r{i}", headers=SLOW)
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: server.gate.num_delayed == 4)
        world.source.lose()
        server.drop_lost("standard")
        assert len(server.admission.quotas) == 0
        server.gate.share(0.5)
        await until(lambda: not server.num_calls)
        assert holds_nothing(server)


async def test_a_partition_that_is_lost_at_once_leaves_nothing():
    """Its records were delivered, and had not had a turn yet."""
    world = World()
    world.publish("a")
    async with world.worker() as server:
        world.deliver(server)
        world.source.lose()
        server.drop_lost("standard")
        await until(lambda: not server.num_calls)
        assert holds_nothing(server)


async def test_what_was_begun_is_neither_refused_nor_delayed():
    """One seat: of four that have begun, one has tokens. The next worker grants the tenant one request in eleven days,
    and still goes on with all four, for which the tenant has paid. Then it grants that one, and no more."""
    world = World(max_num_seqs=1)
    for i in range(4):
        world.publish(f"r{i}", max_tokens=40)
    async with world.worker("w1") as server:
        world.deliver(server)
        await until(
            lambda: len(world.broker.topics["replies.r0"][0]) > 6 and bool(world.broker.topics["replies.r3"][0])
        )
    assert [bool(world.answer(f"r{i}").token_ids) for i in range(4)] == [True, False, False, False]
    world.source.lose()
    world.settings = world.settings.model_copy(update=HARDLY_ANY | {"tiers": tiers(max_queued_tokens=1)})
    async with world.worker("w2") as server:
        await world.serve(server)
        assert holds_nothing(server)
        world.publish("fresh")
        await world.serve(server)
        world.publish("refused")
        await world.serve(server)
    for i in range(4):
        answer = world.answer(f"r{i}")
        assert (answer.end.finish_reason, len(answer.token_ids[0])) == (FinishReason.LENGTH, 40)
        assert answer.begin.worker == "w2"
    assert world.answer("fresh").end.finish_reason is FinishReason.LENGTH
    assert world.answer("refused").end.error.code == ErrorCode.QUOTA_EXCEEDED


async def test_a_refusal_behind_a_begin_does_not_count():
    """A former owner has begun a record that is new to this one: behind its `begin` the refusal is void; it resumes."""
    world = World(**HARDLY_ANY)
    world.publish("a")
    world.publish("b")
    begin = Begin(False, "zombie", "fake", 5, 7, 0.0, InputRef(LANE, 0, 1, 1))
    address = ReplyAddress(b"b", "replies.b", 0, ContentType.JSON, (), per_request=True)
    await MemorySink(world.broker).send(address, begin)
    async with world.worker() as server:
        await world.serve(server)
        assert holds_nothing(server)
    assert [type(record).__name__ for _, record in world.records("replies.b")][:3] == ["Begin", "End", "Begin"]
    assert len(world.answer("b").token_ids[0]) == 12


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.UNACKNOWLEDGED, Fate.DOUBLED])
async def test_a_refusal_that_may_not_have_landed_is_decided_again(fate: Fate):
    """It comes out as one accepted `end` without an attempt, whatever became of the first."""
    world = World(**HARDLY_ANY)
    world.publish("a")
    world.publish("b")
    fates = iter([fate])
    world.broker.fate = lambda topic, headers: next(fates, Fate.LANDS) if topic == "replies.b" else Fate.LANDS
    async with world.worker() as server:
        await world.serve(server)
        assert holds_nothing(server)
    answer = world.answer("b")
    assert (answer.end.attempt, answer.end.error.code) == (-1, ErrorCode.QUOTA_EXCEEDED)
    assert world.source.tracker.position == 2


async def test_on_a_shared_log_a_new_request_is_refused_inside_an_attempt():
    """There an `end` without an attempt might be skipped; a request-reply client gets it as its only record."""
    world = World(**HARDLY_ANY)
    world.broker.create("replies.shared")
    shared = [("reply_to", b"replies.shared")]
    world.publish("first")
    world.publish("streamed", topic=False, headers=shared)
    world.publish("whole", topic=False, headers=shared, stream=False)
    async with world.worker() as server:
        await world.serve(server)
        assert holds_nothing(server)
    written = {"streamed": [], "whole": []}
    records = dict(world.records("replies.shared"))
    for offset, raw in enumerate(world.broker.topics["replies.shared"][0]):
        written[dict(raw.headers)["correlation_id"].decode()].append(records[offset])
    begin, end = written["streamed"]
    assert begin.restart
    assert end.error.code == ErrorCode.QUOTA_EXCEEDED
    (only,) = written["whole"]
    assert (only.attempt, only.error.code) == (-1, ErrorCode.QUOTA_EXCEEDED)


async def test_on_a_shared_log_what_an_earlier_owner_may_have_begun_waits_and_is_not_refused():
    """Its caller may hold tokens of it: it waits for its quota, longer than a new one might."""
    world = World()
    world.broker.create("replies.shared")
    for name in "ab":
        world.publish(name, topic=False, headers=[*SLOW, ("reply_to", b"replies.shared")], max_tokens=40)
    async with world.worker("w1") as server:
        world.deliver(server)
        await until(lambda: len(world.broker.topics["replies.shared"][0]) > 12)
    world.source.lose()
    harsh = ONE_A_SECOND | {"tiers": tiers(max_quota_delay_ms=0.0)}
    world.settings = world.settings.model_copy(update=harsh)
    async with world.worker("w2") as server:
        world.deliver(server)
        await until(lambda: server.num_calls == 1 and server.gate.num_delayed == 1)
        world.publish("new", headers=SLOW)
        world.deliver(server)
        await until(lambda: world.answer("new").ended)
        world.clock.move_to(1.0)
        await world.serve(server)
        assert holds_nothing(server)
    assert world.answer("new").end.error.code == ErrorCode.QUOTA_EXCEEDED
    ends = [record for _, record in world.records("replies.shared") if type(record).__name__ == "End"]
    assert [end.finish_reason for end in ends] == [FinishReason.LENGTH] * 2


async def test_a_tenant_may_be_kept_to_some_tiers():
    """The caller is told what it may use; other tenants are not affected, and nobody's quota is."""
    two = tiers() | {"gold": Tier("gold", default_priority=7, priority_cap=9)}
    world = World(tiers=two, tenants={"acme": Tenant(tiers=("gold",)), "none": Tenant(tiers=())})
    for name in ("acme", "none", "other"):
        world.publish(name, headers=[("tenant", name.encode())])
    async with world.worker() as server:
        await world.serve(server)
        assert holds_nothing(server)
    end = world.answer("acme").end
    assert (end.attempt, end.error.code, end.error.retry_after_ms) == (-1, ErrorCode.INVALID_REQUEST, None)
    assert "'acme' may not use the tier 'standard'; it may use gold" in end.error.message
    assert "nor any other" in world.answer("none").end.error.message
    assert world.answer("other").end.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("header", [b"other", b"x" * 65, b"\xff"])
async def test_on_a_tenants_lane_the_header_is_ignored(header: bytes):
    """Whatever it says: quota, usage and fair share are those of the lane's tenant."""
    world = World(tiers=tiers(tenant="slow"), **ONE_A_SECOND)
    for name in "ab":
        world.publish(name, headers=[("tenant", header)])
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: server.num_calls == 1 and server.gate.num_delayed == 1)
        world.clock.move_to(1.0)
        await world.serve(server)
    assert [record.key for record in world.broker.topics["usage"][0]] == [b"slow", b"slow"]


async def test_what_cannot_be_read_on_a_tenants_lane_is_still_the_tenants():
    """The usage record of an invalid request names the lane's tenant."""
    world = World(tiers=tiers(tenant="slow"))
    world.publish("a", headers=[("priority", b"high")])
    async with world.worker() as server:
        await world.serve(server)
    assert world.answer("a").end.error.code == ErrorCode.INVALID_REQUEST
    assert [record.key for record in world.broker.topics["usage"][0]] == [b"slow"]


async def test_an_invalid_request_for_one_record_is_told_again_when_the_send_failed():
    """A request-reply client's error that did not land is sent again as it was."""
    world = World()
    world.broker.create("replies.shared")
    world.publish("a", topic=False, headers=[("reply_to", b"replies.shared")], stream=False, model="x")
    fates = iter([Fate.LOST])
    world.broker.fate = lambda topic, headers: next(fates, Fate.LANDS) if topic == "replies.shared" else Fate.LANDS
    async with world.worker() as server:
        await world.serve(server)
    ((_, end),) = world.records("replies.shared")
    assert end.error.code == ErrorCode.MODEL_NOT_FOUND


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_held_after_any_way_to_end(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Answered, refused, cancelled, expired, failed, fenced, lost, drained, in any mix: quotas and queues are empty,
    every record is done at the end, and every answer is whole or says why not."""
    monkeypatch.setattr("worker.loop.RETRY_PAUSES_S", ())
    monkeypatch.setattr("worker.server.AGAIN_S", 0.0)
    rng = random.Random(seed)
    world = World(
        max_num_seqs=3,
        step_model=StepModel(prior=COST),
        tiers=tiers(
            max_queued_tokens=rng.choice([60, 600]), refuse_unreachable=seed % 2 == 0, max_quota_delay_ms=20_000.0
        ),
        tenants={"slow": Tenant(requests_per_s=1.0, tokens_per_s=60.0, max_running=2), "few": Tenant(max_running=1)},
        quota_burst_seconds=2.0,
    )
    world.broker.create("replies.shared")
    names = [f"r{i}" for i in range(rng.randint(10, 30))]
    for name in names:
        headers = [("tenant", rng.choice([b"slow", b"slow", b"few", b"free"]))]
        if rng.random() < 0.3:
            headers.append(("deadline_ms", str(rng.randint(1, 15_000)).encode()))
        if shared := rng.random() < 0.25:
            headers.append(("reply_to", b"replies.shared"))
        body = {"prompt": "x" * rng.randint(1, 30), "max_tokens": rng.randint(1, 30), "stream": rng.random() < 0.7}
        world.publish(name, topic=not shared, headers=headers, **body)
    world.broker.fate = lambda topic, headers: (
        rng.choices(list(Fate), weights=[30, 1, 1, 1])[0] if topic.startswith("replies.") else Fate.LANDS
    )
    for life in range(4):
        async with world.worker(f"w{life}") as server:
            server.runner.failing = tuple(rng.sample(range(1, 40), 2))
            world.deliver(server)
            for _ in range(rng.randint(1, 60)):
                await turns(rng.randint(0, 12))
                match rng.choice(["time", "time", "cancel", "share"]):
                    case "time":
                        world.clock.move_to(world.clock.now() + rng.choice([0.01, 0.1, 0.5]))
                    case "cancel" if rng.random() < 0.3:
                        server.cancel(Cancel(rng.choice(names).encode()))
                    case "share":
                        server.gate.share(rng.choice([0.25, 0.5, 1.0]))
            if how := rng.choice(["lose", "drain", ""]):
                world.source.lose()
                if how == "lose":
                    server.drop_lost("standard")
                    await until(lambda: not server.num_calls)
                else:
                    await server.drain(0)
            if how:
                await until(lambda: holds_nothing(server))
        if not how:
            world.source.lose()
    world.broker.fate = lambda topic, headers: Fate.LANDS
    async with world.worker("last") as server:
        world.deliver(server)
        async with asyncio.timeout(60):
            while server.num_calls:
                await turns(20)
                world.clock.move_to(world.clock.now() + 0.2)
        await until(lambda: holds_nothing(server))
    assert world.source.tracker.position == len(names)
    for name in names:
        if f"replies.{name}" in world.broker.topics:
            assert world.answer(name).ended
