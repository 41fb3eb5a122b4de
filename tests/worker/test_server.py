"""From a record on a lane to its accepted end, on an in-memory broker."""

import asyncio
import json
import random
from collections.abc import Callable

import msgpack
import pytest

from schemas.headers import ReplyAddress
from schemas.reasons import ErrorCode, FinishReason
from schemas.records import Begin, Cancel, End, ReplyRecord, Tokens
from tests.worker.world import LANE, World
from worker.transport.memory import Fate, MemoryRecord, MemorySink
from worker.transport.protocols import RecordTooLarge, ReplyUnauthorised


async def answered(world: World, request_id: str = "a", **body: object):
    """Publishes one request, serves it and returns its answer."""
    world.publish(request_id, **body)
    async with world.worker() as server:
        await world.serve(server)
    return world.answer(request_id)


async def test_a_request_is_answered_token_by_token():
    """begin, tokens, end; the input is done, and usage is written."""
    world = World()
    answer = await answered(world)
    kinds = [type(record) for _, record in world.records("replies.a")]
    assert kinds[0] is Begin
    assert kinds[-1] is End
    assert set(kinds[1:-1]) == {Tokens}
    assert len(answer.token_ids[0]) == 12
    assert answer.end.finish_reason is FinishReason.LENGTH
    assert world.source.tracker.position == 1
    (usage,) = world.broker.topics["usage"][0]
    assert msgpack.unpackb(usage.value)["completion_tokens"] == 12
    assert usage.key == b"default"


async def test_not_streamed_is_one_end():
    """`stream` false: everything is in `end`, and equals the streamed answer."""
    streamed = await answered(World())
    whole = await answered(World(), stream=False)
    assert whole.token_ids == {}
    (choice,) = whole.end.choices
    assert list(choice.token_ids) == streamed.token_ids[0]
    assert choice.text == streamed.text[0]


async def test_choices_end_independently():
    """n = 3: three streams, one reason each, all tokens counted."""
    answer = await answered(World(), n=3, temperature=1.0, max_tokens=7)
    assert {c: len(t) for c, t in answer.token_ids.items()} == {0: 7, 1: 7, 2: 7}
    assert answer.end.finish_reason == (FinishReason.LENGTH,) * 3
    assert answer.end.usage.completion_tokens == 21


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        ({"max_token": 3}, "invalid_request", "max_token"),
        ({"model": "other"}, "model_not_found", "other"),
        ({"prompt": "x" * 256}, "prompt_too_long", "256"),
        ({"prompt": None, "token_ids": [256]}, "invalid_request", "token_ids"),
        ({"stop_token_ids": [999]}, "invalid_request", "stop_token_ids"),
        ({"min_tokens": -1}, "invalid_request", "min_tokens"),
        ({"logit_bias": {"999": 5.0}}, "invalid_request", "logit_bias"),
        ({"prompt": ""}, "invalid_request", "empty"),
    ],
)
async def test_a_bad_request_is_told_why(body: dict, code: str, word: str):
    """Each gets an error `end` that names the fault, is done, and holds nothing up."""
    world = World()
    world.publish("good")
    body = {k: v for k, v in ({"prompt": "Hello"} | body).items() if v is not None}
    world.broker.create("replies.bad")
    world.publish("bad", raw=json.dumps({"max_tokens": 3} | body).encode())
    async with world.worker() as server:
        await world.serve(server)
    end = world.answer("bad").end
    assert end.attempt == -1
    assert end.error.code == code
    assert word in end.error.message
    assert world.answer("good").end.finish_reason is FinishReason.LENGTH
    assert world.source.tracker.position == 2


async def test_exactly_filling_the_context_is_length():
    """A prompt one token short of the context gets one token; max_tokens is cut to what fits."""
    answer = await answered(World(), prompt="x" * 255, max_tokens=100)
    assert len(answer.token_ids[0]) == 1
    assert answer.end.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("raw", [b"\xc1", b"", b"[1]", b"{"])
async def test_poison_goes_to_the_dlq_and_the_caller_is_told(raw: bytes):
    """Undecodable values are buried as they were, and their usable reply log gets an error."""
    world = World()
    answer = await answered(world, raw=raw)
    (buried,) = world.broker.topics["prompts.dlq"][0]
    assert (buried.key, buried.value) == (b"key", raw)
    assert answer.end.error.code == "invalid_request"
    assert world.source.tracker.position == 1


@pytest.mark.parametrize("reply_to", [LANE, "prompts.dlq", "__consumer_offsets", "elsewhere"])
async def test_forbidden_reply_topics_are_buried(reply_to: str):
    """A caller cannot make us write to a lane, the DLQ or a topic outside the allow-list."""
    world = World()
    before = len(world.broker.topics.get(reply_to, [[]])[0])
    world.publish("a", headers=[("reply_to", reply_to.encode())])
    async with world.worker() as server:
        await world.serve(server)
        while world.source.tracker.num_outstanding:
            await asyncio.sleep(0)
    (buried,) = world.broker.topics["prompts.dlq"][0]
    assert "dlq_reason" in dict(buried.headers)
    if reply_to == LANE:
        assert len(world.broker.topics[LANE][0]) == before + 1  # the request itself


async def test_a_caller_who_is_gone_costs_no_model_time():
    """A missing reply topic: done, nothing written, nothing run."""
    world = World()
    world.publish("a", topic=False)
    async with world.worker() as server:
        await world.serve(server)
    assert world.source.tracker.position == 1
    assert world.steps == []
    assert world.broker.topics["prompts.dlq"][0] == []


async def test_a_reply_topic_that_may_not_be_used_is_buried(monkeypatch: pytest.MonkeyPatch):
    """The caller cannot be told, and trying again would never end: the record is on the DLQ, and the next is served."""
    world = World()
    world.publish("a")
    world.publish("b", max_tokens=2)
    locate = MemorySink.locate

    async def refuse(self: MemorySink, address: ReplyAddress) -> ReplyAddress | None:
        if address.topic == "replies.a":
            raise ReplyUnauthorised(address.topic)
        return await locate(self, address)

    monkeypatch.setattr(MemorySink, "locate", refuse)
    async with world.worker() as server:
        await world.serve(server)
    (buried,) = world.broker.topics["prompts.dlq"][0]
    assert dict(buried.headers)["dlq_reason"] == b"reply_unauthorised"
    assert world.source.tracker.position == 2
    assert world.answer("b").ended


def limit(monkeypatch: pytest.MonkeyPatch, topic: str, fits: Callable[[ReplyRecord, int], bool]) -> list[ReplyRecord]:
    """A topic takes only what `fits`, given how many records it has been asked to take. Returns what was asked."""
    send, asked = MemorySink.send, []

    async def limited(self: MemorySink, address: ReplyAddress, record: ReplyRecord, trace: str | None = None):
        if address.topic == topic:
            asked.append(record)
            if not fits(record, len(asked)):
                raise RecordTooLarge("a record was refused")
        return await send(self, address, record, trace)

    monkeypatch.setattr(MemorySink, "send", limited)
    return asked


async def test_a_reply_topic_that_takes_nothing_sends_its_request_to_the_dlq(monkeypatch: pytest.MonkeyPatch):
    """Its caller has made it with a tiny max.message.bytes: two tries, one of them an error; nobody else notices."""
    world = World()
    asked = limit(monkeypatch, "replies.a", lambda _record, _number: False)
    world.publish("a")
    world.publish("b")
    async with world.worker() as server:
        await world.serve(server)
    (buried,) = world.broker.topics["prompts.dlq"][0]
    assert dict(buried.headers)["dlq_reason"] == b"reply_too_large"
    assert len(asked) == 2
    assert world.source.tracker.position == 2
    assert world.answer("b").ended


async def test_an_answer_that_its_topic_refuses_ends_with_an_error(monkeypatch: pytest.MonkeyPatch):
    """It is generated once, not again and again; the error is small enough."""
    world = World()
    limit(monkeypatch, "replies.a", lambda record, _: not (isinstance(record, End) and record.choices))
    world.publish("a", stream=False)
    async with world.worker() as server:
        await world.serve(server)
    answer = world.answer("a")
    assert answer.end.error.code == ErrorCode.INVALID_REQUEST
    assert answer.num_begins == 2
    assert "prompts.dlq" not in world.broker.topics or world.broker.topics["prompts.dlq"][0] == []
    assert world.source.tracker.position == 1


@pytest.mark.parametrize(("refused", "code"), [(2, None), (3, ErrorCode.INVALID_REQUEST)])
async def test_on_a_shared_topic_a_record_may_have_travelled_with_others(
    monkeypatch: pytest.MonkeyPatch, refused: int, code: ErrorCode | None
):
    """They were too large together: it is tried again, so often, and then answered with an error."""
    world = World()
    world.broker.create("replies.shared")
    limit(monkeypatch, "replies.shared", lambda _record, number: number > refused)
    world.publish("a", topic=False, headers=[("reply_to", b"replies.shared")])
    async with world.worker() as server:
        await world.serve(server)
    *_, (_, end) = world.records("replies.shared")
    assert (end.error and end.error.code) == code


async def test_no_reply_topic_and_no_default_is_buried():
    """Without reply_to the result has nowhere to go: the record is on the DLQ."""
    world = World()
    headers = [("content-type", b"application/json")]
    world.broker.topics[LANE][0].append(MemoryRecord(None, b'{"prompt": "x"}', headers))
    async with world.worker() as server:
        await world.serve(server)
    (buried,) = world.broker.topics["prompts.dlq"][0]
    assert dict(buried.headers)["dlq_reason"] == b"no_reply_topic"
    assert world.source.tracker.position == 1


async def test_cancel_ends_what_runs():
    """A cancel takes effect in the next step; the tokens delivered so far stay."""
    world = World()
    world.publish("a", max_tokens=200)
    async with world.worker() as server:
        for delivery in world.source.deliveries():
            server.deliver(delivery)
        while len(world.broker.topics["replies.a"][0]) < 4:
            await asyncio.sleep(0)
        server.cancel(Cancel(b"a"))
        await world.serve(server)
    answer = world.answer("a")
    assert answer.end.finish_reason is FinishReason.CANCELLED
    assert 0 < len(answer.token_ids[0]) < 200


async def test_cancel_may_come_before_its_request():
    """A cancel that arrives first is kept: the request ends at once."""
    world = World()
    world.publish("a")
    async with world.worker() as server:
        server.cancel(Cancel(b"a"))
        await world.serve(server)
    assert world.answer("a").end.finish_reason is FinishReason.CANCELLED
    assert world.answer("a").token_ids == {}


async def test_a_deadline_that_has_passed_ends_the_stream():
    """Expired while it waited on the lane: `deadline`, no tokens."""
    world = World()
    world.clock.seconds = 100.0
    answer = await answered(world, headers=[("deadline_ms", b"99000")])
    assert answer.end.finish_reason is FinishReason.DEADLINE
    assert answer.token_ids == {}


async def test_a_failing_step_hurts_only_its_own_requests():
    """The requests of a broken step end with `internal`; the worker goes on."""
    world = World()
    world.publish("a")
    async with world.worker() as server:
        server.runner.failing = (2,)
        await world.serve(server)
        server.runner.failing = ()
        world.publish("b")
        await world.serve(server)
    assert world.answer("a").end.error.code == "internal"
    assert world.answer("b").end.finish_reason is FinishReason.LENGTH


async def test_seats_are_refilled_in_the_step_after_one_leaves():
    """64 requests on 16 seats: no step between the first and the last has a free seat while somebody waits."""
    world = World(max_num_seqs=16)
    for i in range(64):
        world.publish(f"r{i}", max_tokens=3 + i % 13)
    async with world.worker() as server:
        await world.serve(server)
        assert server.engine.scheduler.stats().num_blocks_used == 0
    assert all(world.answer(f"r{i}").ended for i in range(64))
    for before, after in zip(world.steps, world.steps[1:], strict=False):
        if before.num_waiting:
            assert after.num_running == 16 or after.num_waiting == 0, (before, after)


async def test_a_duplicate_is_answered_once():
    """Three records of one request: one answer, one usage record, all three done (protocol.md 5.5)."""
    world = World()
    for _ in range(3):
        world.publish("a", max_tokens=20)
    async with world.worker() as server:
        await world.serve(server)
    answer = world.answer("a")
    assert len(answer.token_ids[0]) == 20
    assert answer.num_skipped == 0
    assert len(world.broker.topics["usage"][0]) == 1
    assert world.source.tracker.position == 3


@pytest.mark.parametrize("seed", range(40))
async def test_every_token_exactly_once_whatever_dies(seed: int):
    """Workers die at random instants, sends are lost, doubled or unacknowledged: the answers are those of an
    undisturbed run, token by token, and every input is done at the end."""
    rng = random.Random(seed)
    bodies = [
        {"prompt": f"Number {i}", "max_tokens": rng.randint(1, 30), "n": n, "temperature": float(n > 1), "seed": i}
        for i, n in enumerate([1, 1, 1, 3, 1, 2])
    ]
    bodies[4] |= {"stream": False}
    calm, wild = World(), World()
    for world in (calm, wild):
        for i, body in enumerate(bodies):
            world.publish(f"r{i}", **body)
    async with calm.worker() as server:
        await calm.serve(server)

    wild.broker.fate = lambda topic, headers: (
        rng.choices(list(Fate), weights=[30, 1, 1, 1])[0] if topic.startswith("replies.") else Fate.LANDS
    )
    for life in range(6):
        async with wild.worker(f"w{life}") as server:
            for delivery in wild.source.deliveries():
                server.deliver(delivery)
            for _ in range(rng.randint(1, 400)):
                await asyncio.sleep(0)
        wild.source.lose()
    async with wild.worker("last") as server:
        await wild.serve(server)
    for i in range(len(bodies)):
        mine, theirs = wild.answer(f"r{i}"), calm.answer(f"r{i}")
        assert mine.token_ids == theirs.token_ids
        assert mine.text == theirs.text
        assert mine.end.finish_reason == theirs.end.finish_reason
        assert mine.end.choices == theirs.end.choices
    assert wild.source.tracker.position == len(bodies)


async def test_min_tokens_survive_a_crash():
    """Stops that came before are text, and those after cut, wherever the worker dies: the answer is that of a calm run.

    Sixteen letters as stop strings come often in what the fake model says.
    """
    bodies = [
        {"prompt": f"N{i}", "max_tokens": 60, "min_tokens": 15 + i, "stop": [chr(c) for c in range(65, 81)]}
        for i in range(6)
    ]
    calm, wild = World(), World()
    for world in (calm, wild):
        for i, body in enumerate(bodies):
            world.publish(f"r{i}", **body)
    async with calm.worker() as server:
        await calm.serve(server)
    for life in range(5):
        async with wild.worker(f"w{life}") as server:
            for delivery in wild.source.deliveries():
                server.deliver(delivery)
            for _ in range(60 + 35 * life):
                await asyncio.sleep(0)
        wild.source.lose()
    async with wild.worker("last") as server:
        await wild.serve(server)
    attempts = 0
    for i, body in enumerate(bodies):
        mine, theirs = wild.answer(f"r{i}"), calm.answer(f"r{i}")
        assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text)
        assert mine.end.finish_reason == theirs.end.finish_reason
        assert len(theirs.token_ids[0]) >= body["min_tokens"]
        attempts += sum(isinstance(record, Begin) for _, record in wild.records(f"replies.r{i}"))
    assert attempts > len(bodies)
    assert FinishReason.STOP in [calm.answer(f"r{i}").end.finish_reason for i in range(len(bodies))]


async def test_a_drawn_seed_survives_a_crash():
    """Without a seed the first attempt draws one; the next goes on with it."""
    world = World()
    world.publish("a", temperature=1.0, max_tokens=60)
    async with world.worker("w1") as server:
        for delivery in world.source.deliveries():
            server.deliver(delivery)
        while len(world.broker.topics["replies.a"][0]) < 6:
            await asyncio.sleep(0)
    world.source.lose()
    async with world.worker("w2") as server:
        await world.serve(server)
        seeds = server.runner.seeds
    begins = [r for _, r in world.records("replies.a") if isinstance(r, Begin)]
    assert [b.worker for b in begins] == ["w1", "w2"]
    assert seeds[-1] == begins[0].seed
    assert len(world.answer("a").token_ids[0]) == 60


async def test_shared_log_restarts_and_is_read_back():
    """On a shared topic offsets tell nothing: a new attempt restarts, and one end is accepted (protocol.md 5.6)."""
    world = World()
    world.broker.create("replies.shared")
    named = [("reply_to", b"replies.shared")]
    for i in range(3):
        world.publish(f"s{i}", topic=False, headers=named, max_tokens=20 + i)
    async with world.worker("w1") as server:
        for delivery in world.source.deliveries():
            server.deliver(delivery)
        while len(world.broker.topics["replies.shared"][0]) < 12:
            await asyncio.sleep(0)
    world.source.lose()
    async with world.worker("w2") as server:
        await world.serve(server)
    log = world.broker.topics["replies.shared"][0]
    for i in range(3):
        mine = [o for o, r in enumerate(log) if ("correlation_id", f"s{i}".encode()) in r.headers]
        records = dict(world.records("replies.shared"))
        begins = [records[o] for o in mine if isinstance(records[o], Begin)]
        assert all(b.restart for b in begins)
        assert begins[-1].worker == "w2"
        last = max(o for o in mine if isinstance(records[o], Begin))
        tokens = [t for o in mine if o > last and isinstance(records[o], Tokens) for t in records[o].token_ids]
        assert len(tokens) == 20 + i
    assert world.source.tracker.position == 3


async def test_request_reply_clients_get_one_record():
    """Not streamed on a shared topic: one `end` with attempt -1 and nothing else."""
    world = World()
    world.broker.create("replies.shared")
    world.publish("a", topic=False, headers=[("reply_to", b"replies.shared")], stream=False)
    async with world.worker() as server:
        await world.serve(server)
    ((_, end),) = world.records("replies.shared")
    assert end.attempt == -1
    assert len(end.choices[0].token_ids) == 12


async def test_a_higher_class_displaces_and_the_end_says_so():
    """One seat: an urgent request takes it in the next step; the displaced one comes back with the same tokens."""
    calm = await answered(World(), max_tokens=40)
    world = World(max_num_seqs=1)
    world.publish("a", max_tokens=40, headers=[("priority", b"1")])
    async with world.worker() as server:
        for delivery in world.source.deliveries():
            server.deliver(delivery)
        while len(world.broker.topics["replies.a"][0]) < 6:
            await asyncio.sleep(0)
        world.publish("b", max_tokens=3, headers=[("priority", b"6")])
        await world.serve(server)
    displaced, urgent = world.answer("a"), world.answer("b")
    assert displaced.token_ids == calm.token_ids
    assert displaced.end.preemptions.recompute + displaced.end.preemptions.swap == 1
    assert urgent.end.preemptions.recompute == 0
    (step,) = [step for step in world.steps if step.preempted]
    assert len(step.admitted) == 1


async def test_cached_prompt_tokens_are_reported():
    """A second request with the same prompt finds its blocks computed: usage says how many tokens."""
    world = World()
    world.publish("a", prompt="The same long prompt for both")
    async with world.worker() as server:
        await world.serve(server)
        world.publish("b", prompt="The same long prompt for both")
        await world.serve(server)
    assert world.answer("a").end.usage.cached_tokens == 0
    assert world.answer("b").end.usage.cached_tokens == 28
    assert world.answer("a").token_ids == world.answer("b").token_ids
