"""A worker that lives says so when it gives an attempt up: hand-overs are not taken for deaths."""

import asyncio
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from schemas.headers import ReplyAddress
from schemas.reasons import FinishReason
from schemas.records import Begin, End, Left, LogRecord, Tokens
from tests.worker.hand_overs import Sends, hand_over, no_seats, serve, until_begun, waiting
from tests.worker.test_fruitless import calm, kinds
from tests.worker.world import LANE, World, until, vanish
from worker import loop, suspects
from worker.leaving import HANGS_S
from worker.transport.memory import Fate
from worker.transport.offset_tracker import OffsetTracker


@pytest.fixture(autouse=True)
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is logged. Turns are taken at once, and what dies is not tried again for long."""
    monkeypatch.setattr(loop, "RETRY_PAUSES_S", (0.05,))
    monkeypatch.setattr(suspects, "POLL_S", 0.001)
    monkeypatch.setattr(suspects, "SETTLE_S", 0.005)
    with structlog.testing.capture_logs() as entries:
        yield entries


@pytest.mark.parametrize("how", ["drains", "moves"])
async def test_twelve_hand_overs_are_no_reason_to_refuse_a_request(how: str, logged: list[Any]):
    """More than the bound, all while it waits for its seat: then it is served as if nothing had been."""
    world = World()
    world.publish("a")
    for i in range(12):
        await hand_over(world, how, f"w{i}")
        assert world.answer("a").fruitless == set()
    await serve(world)
    answer, expected = world.answer("a"), await calm()
    assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
    assert kinds(world)[:25] == [Begin, Left] * 12 + [Begin]
    assert kinds(world).count(Left) == 12
    assert answer.end.finish_reason is FinishReason.LENGTH
    assert world.broker.topics["prompts.dlq"][0] == []
    assert len(world.broker.topics["usage"][0]) == 1
    assert not [entry for entry in logged if entry["event"] in ("request.suspect", "request.not_left")]


@pytest.mark.parametrize(
    ("history", "bound", "refused"),
    [
        ("kdmkddmdk", 4, False),
        ("kdmkddmdk", 3, True),
        ("dddddmmmmmkd", 2, False),
        ("dkmk", 2, True),
        ("kkkkkkkkkdmdmdm", 10, False),
        ("kkkkkkkkkdmdmdmk", 10, True),
    ],
)
async def test_only_kills_count(history: str, bound: int, refused: bool):
    """Killed, drained and moved while it waits, in this order."""
    world = World(max_fruitless_attempts=bound)
    world.publish("a")
    for i, how in enumerate(history):
        await hand_over(world, {"k": "killed", "d": "drains", "m": "moves"}[how], f"w{i}")
        assert len(world.answer("a").fruitless) == history[: i + 1].count("k")
    await serve(world)
    answer = world.answer("a")
    if refused:
        assert answer.end.error.message.startswith(f"{bound} attempts in a row ended without a token")
        assert answer.token_ids == {}
    else:
        assert answer.token_ids == (await calm()).token_ids
    assert len(world.broker.topics["prompts.dlq"][0]) == refused
    assert world.source.tracker.position == 1


@pytest.mark.parametrize("kind", ["whole", "shared", "shared and whole"])
@pytest.mark.parametrize("how", ["drains", "moves"])
async def test_where_nobody_counts_nobody_leaves(kind: str, how: str):
    world = World()
    world.broker.create("replies.shared")
    headers = [("reply_to", b"replies.shared")] if "shared" in kind else []
    world.publish("a", topic="shared" not in kind, headers=headers, stream="whole" not in kind)
    async with world.worker() as server:
        no_seats(server)
        world.deliver(server)
        await until(lambda: server.calls and server.calls[0].events is not None)
        await asyncio.sleep(0.005)
        if how == "drains":
            await server.drain(0)
        else:
            world.source.lose()
            server.drop_lost("standard")
            await until(lambda: not server.num_calls)
    topic = "replies.shared" if "shared" in kind else "replies.a"
    assert [type(record) for _, record in world.records(topic)] == [Begin] * (kind != "shared and whole")


async def test_what_has_a_token_is_not_left():
    """Some come, then the worker drains: its attempt is no fruitless one anyway."""
    world = World()
    world.publish("a", max_tokens=200)
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: kinds(world).count(Tokens) > 2)
        await server.drain(0)
    assert Left not in kinds(world)


@pytest.mark.parametrize("event", [b"begin", b"tokens", b"end"])
async def test_with_a_record_on_its_way_nothing_is_left(event: bytes):
    """Its acknowledgement is not there yet: whatever `left` said could be wrong, or come before what it speaks of."""
    world = World()
    world.publish("a", max_tokens=1)
    on_its_way, never = asyncio.Event(), asyncio.Event()
    send = world.sink.send

    async def slow(address: ReplyAddress, record: LogRecord, trace: str | None = None) -> int | None:
        offset = await send(address, record, trace)
        if type(record).__name__.lower().encode() == event:
            on_its_way.set()
            await never.wait()
        return offset

    world.sink.send = slow
    async with world.worker() as server:
        world.deliver(server)
        await on_its_way.wait()
        await server.drain(0)
    assert Left not in kinds(world)


async def test_what_goes_on_after_tokens_and_waits_again_is_left():
    """Of the attempt that goes on there is no token yet: it is left, and the tokens of the former one stay."""
    world = World(max_fruitless_attempts=1)
    world.publish("a", max_tokens=40)
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: kinds(world).count(Tokens) > 2)
    world.source.lose()
    for how in ("drains", "moves", "drains"):
        await hand_over(world, how)
    await serve(world)
    assert kinds(world).count(Left) == 3
    assert world.answer("a").token_ids == (await calm(max_tokens=40)).token_ids


async def test_a_worker_that_ends_at_once_says_nothing():
    """A second signal, or a fault that ends the process: tasks are cancelled, and nobody has given anything up."""
    world = World()
    world.publish("a")
    async with waiting(world) as server:
        draining = asyncio.create_task(server.drain(30))
        await asyncio.sleep(0.01)
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await vanish(server)
    assert kinds(world) == [Begin]


async def test_left_between_the_records_of_the_next_owner_is_a_gap():
    """The former owner's lands late, between the tokens of the next one. That one reads the log once more, finds its
    attempt to be the current one, and goes on."""
    world = World()
    world.publish("a", max_tokens=100)
    sends = Sends(world)
    sends.held = True
    async with world.worker("w1") as former, world.worker("w2") as owner:
        no_seats(former)
        world.deliver(former)
        await until_begun(former)
        world.source.lose()
        former.drop_lost("standard")
        world.deliver(owner)
        await until(lambda: kinds(world).count(Tokens) > 10)
        num_reads = sends.num_reads
        assert Left not in kinds(world)
        sends.go_on.set()
        await until(lambda: not owner.num_calls)
        assert sends.num_reads == num_reads + 1
    place = kinds(world).index(Left)
    assert kinds(world)[place - 1] is kinds(world)[place + 1] is Tokens
    answer = world.answer("a")
    assert (answer.num_begins, answer.num_skipped, answer.num_repeated) == (2, 0, 0)
    assert answer.token_ids == (await calm(max_tokens=100)).token_ids
    assert len(world.broker.topics["usage"][0]) == 1


async def test_left_behind_the_end_changes_nothing():
    """It was on its way all the time. Whoever looks at the request once more finds its end."""
    world = World()
    world.publish("a")
    sends = Sends(world)
    sends.held = True
    async with world.worker("w1") as former, world.worker("w2") as owner:
        no_seats(former)
        world.deliver(former)
        await until_begun(former)
        world.source.lose()
        former.drop_lost("standard")
        await world.serve(owner)
        end = world.answer("a").end
        sends.go_on.set()
        await until(lambda: Left in kinds(world))
    world.source.tracker = OffsetTracker(0, log_end=1)
    await serve(world)
    assert kinds(world)[-3:] == [End, Left, Begin]
    assert world.answer("a").end == end
    assert world.source.tracker.position == 1


async def test_a_twin_that_waits_has_left():
    """Two records of one request in two workers: the younger finds that the older one's log it is, and leaves its own
    attempt at once. It did not vanish, however often that happens."""
    world = World()
    for _ in range(2):
        world.publish("a", max_tokens=30)
    older, younger = world.source.deliveries()
    async with world.worker("w1") as first, world.worker("w2") as second:
        schedule = first.engine.scheduler.schedule
        no_seats(first)
        first.deliver(older)
        await until_begun(first)
        second.deliver(younger)
        await until(lambda: Left in kinds(world))
        assert kinds(world) == [Begin, Begin, Left]
        assert world.answer("a").fruitless == {0}
        assert second.num_calls == 1
        first.engine.scheduler.schedule = schedule
        first.engine.wake()
        await until(lambda: not first.num_calls and not second.num_calls)
    assert world.answer("a").token_ids == (await calm(max_tokens=30)).token_ids
    assert world.source.tracker.position == 2


async def test_what_was_lost_on_its_way_to_the_dead_letters_is_left(monkeypatch: pytest.MonkeyPatch):
    """It has used up its attempts, and the partition moves before the DLQ takes it: the next owner decides by the same
    count."""
    monkeypatch.setattr("worker.side_topics.PUBLISH_RETRY_S", 0.001)
    world = World(max_fruitless_attempts=2)
    world.publish("a")
    for _ in range(2):
        await hand_over(world, "killed")
    world.broker.fate = lambda topic, headers: Fate.LOST if topic == "prompts.dlq" else Fate.LANDS
    async with world.worker() as server:
        world.deliver(server)
        await until(lambda: len(kinds(world)) == 3)
        world.source.lose()
        await until(lambda: not server.num_calls)
    await until(lambda: kinds(world) == [Begin, Begin, Begin, Left])
    assert world.answer("a").fruitless == {0, 1}
    world.broker.fate = lambda topic, headers: Fate.LANDS
    await serve(world)
    assert world.answer("a").end.error.message.startswith("2 attempts in a row")


# The record itself, and who waits for it.


async def test_what_is_written():
    """Key and headers of a reply record, with the caller's own names, and no trace context."""
    world = World()
    world.broker.create("replies.a")
    names = [("kafka_correlationId", b"a"), ("kafka_replyTopic", b"replies.a")]
    traceparent = ("traceparent", f"00-{'1' * 32}-{'2' * 16}-01".encode())
    world.publish("a", topic=False, headers=[*names, traceparent])
    await hand_over(world, "drains")
    begin, left = world.broker.topics["replies.a"][0]
    assert left.key == begin.key == b"a"
    assert left.value == b'{"attempt":0}'
    without = [(name, value) for name, value in begin.headers if name != "traceparent"]
    assert left.headers == [(name, b"left" if name == "event" else value) for name, value in without]


async def test_a_worker_whose_step_hangs_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    """It is drained because it hangs, perhaps on this very request: it counts as one that has died."""
    monkeypatch.setattr(loop, "RETRY_PAUSES_S", (2.0,))
    world = World()
    world.publish("a")
    async with world.worker() as server:
        server.runner.failing = range(1000)
        world.deliver(server)
        await until(lambda: server.engine.step_began is not None and kinds(world) == [Begin])
        world.clock.seconds += HANGS_S
        assert await server.drain(0) == 1
    assert kinds(world) == [Begin]
    assert world.answer("a").fruitless == {0}


async def test_a_drain_waits_for_it():
    """The process ends with the drain: what it says must be on the log by then."""
    world = World()
    world.publish("a")
    sends = Sends(world)
    sends.held = True
    async with waiting(world) as server:
        draining = asyncio.create_task(server.drain(0))
        await until(lambda: not server.num_calls)
        await asyncio.sleep(0.01)
        assert not draining.done()
        sends.go_on.set()
        assert await draining == 1
        assert kinds(world) == [Begin, Left]


@pytest.mark.parametrize(("timeout", "serves"), [(0.0, 0.0), (0.1, 0.09), (0.5, 0.48)])
async def test_a_drain_does_not_wait_for_long(timeout: float, serves: float, monkeypatch: pytest.MonkeyPatch):
    """A broker that is away holds the end up for no more than that, out of the drain's own time where it has enough."""
    monkeypatch.setattr("worker.server.LEFT_S", 0.02)
    world = World()
    world.publish("a")
    Sends(world).held = True
    wait, patience = asyncio.wait, []

    async def noted(tasks: Any, *, timeout: float, **options: Any) -> Any:
        patience.append(timeout)
        return await wait(tasks, timeout=timeout, **options)

    async with waiting(world) as server:
        monkeypatch.setattr(asyncio, "wait", noted)
        async with asyncio.timeout(timeout + 5):
            assert await server.drain(timeout) == 1
        monkeypatch.undo()
        assert patience == pytest.approx([serves, 0.02])
    assert kinds(world) == [Begin]


async def test_a_log_is_forgotten_when_left_has_landed():
    """Not before: the producer would keep the metadata of its topic for ever."""
    world = World()
    world.publish("a")
    sends = Sends(world)
    sends.held = True
    async with waiting(world) as server:
        world.source.lose()
        server.drop_lost("standard")
        await until(lambda: not server.num_calls)
        await asyncio.sleep(0.005)
        assert world.sink.forgotten == []
        sends.go_on.set()
        await until(lambda: world.sink.forgotten)
        assert kinds(world) == [Begin, Left]
    assert world.sink.forgotten == ["replies.a"]


async def test_a_log_is_not_forgotten_under_who_writes_on():
    """The partition comes back to the same worker while `left` is on its way."""
    world = World()
    world.publish("a")
    sends = Sends(world)
    sends.held = True
    async with world.worker() as server:
        schedule = server.engine.scheduler.schedule
        no_seats(server)
        world.deliver(server)
        await until_begun(server)
        world.source.lose()
        server.drop_lost("standard")
        await until(lambda: not server.num_calls)
        world.deliver(server)
        await until_begun(server)
        sends.go_on.set()
        await until(lambda: Left in kinds(world))
        await asyncio.sleep(0.005)
        assert world.sink.forgotten == []
        server.engine.scheduler.schedule = schedule
        server.engine.wake()
        await until(lambda: not server.num_calls)
    assert world.sink.forgotten == ["replies.a"]
    assert world.answer("a").token_ids == (await calm()).token_ids


async def test_a_caller_who_has_gone_gets_no_topic_back(logged: list[Any]):
    """Its topic is deleted while it waits for a seat: nothing is written, nothing is wrong."""
    world = World()
    world.publish("a")
    sends = Sends(world)
    async with waiting(world) as server:
        del world.broker.topics["replies.a"]
        await server.drain(0)
    assert sends.events == ["Begin"]
    assert "replies.a" not in world.broker.topics
    assert not [entry for entry in logged if entry["event"] == "request.not_left"]


async def test_a_send_that_fails_in_any_way_harms_nobody(logged: list[Any]):
    """The worker serves on, and the log says what went wrong."""
    world = World()
    world.publish("a")
    send = world.sink.send

    async def broken(address: ReplyAddress, record: LogRecord, trace: str | None = None) -> int | None:
        if isinstance(record, Left):
            raise RuntimeError("nobody thought of that")  # noqa: TRY004
        return await send(address, record, trace)

    world.sink.send = broken
    async with world.worker() as server:
        schedule = server.engine.scheduler.schedule
        no_seats(server)
        world.deliver(server)
        await until_begun(server)
        world.source.lose()
        server.drop_lost("standard")
        await until(lambda: not server.num_calls)
        server.engine.scheduler.schedule = schedule
        await world.serve(server)
    assert world.answer("a").ended
    assert [entry["event"] for entry in logged if entry["log_level"] == "error"] == ["request.not_left"]


async def test_spans_and_the_line_of_a_request_are_as_ever(logged: list[Any]):
    """No span, no link and no event of `left`; one line says that the request was lost here."""
    world = World(traced=True)
    world.publish("a")
    await hand_over(world, "drains")
    spans = [span for span in world.spans.get_finished_spans() if span.name != "llm.step"]
    assert sorted(span.name for span in spans) == [
        "llm.queue", f"process {LANE}", "send replies.{correlation_id}", "text_completion fake",
    ]  # fmt: skip
    assert {span.attributes.get("llm.event") for span in spans} == {"begin", None}
    (line,) = [entry for entry in logged if entry["event"] == "request.finished"]
    assert (line["outcome"], line["attempts"], line["finish_reason"]) == ("lost", 1, None)
    await serve(world)
    process = [span for span in world.spans.get_finished_spans() if span.name == f"process {LANE}"][-1]
    (begin,) = [span for span in spans if span.name.startswith("send ")]
    assert [link.context.span_id for link in process.links] == [begin.context.span_id]


@pytest.mark.shared
async def test_the_independent_reader_passes_it_over(checks: Path):
    """It has never heard of `left`, and reads the same answer as ours."""
    reader = importlib.import_module("reader")
    world = World()
    world.publish("a")
    for how in ("drains", "moves", "killed", "drains"):
        await hand_over(world, how)
    await serve(world)
    stream = reader.Stream()
    for offset, record in enumerate(world.broker.topics["replies.a"][0]):
        event, value, headers = reader.decode(
            SimpleNamespace(offset=offset, headers=record.headers, value=record.value)
        )
        stream.feed(offset, event, value, headers)
    answer = world.answer("a")
    assert [event for event, _ in stream.headers].count("left") == 3
    assert (stream.token_ids, stream.text) == (answer.token_ids, answer.text)
    assert stream.end["finish_reason"] == "length"
    assert (len(stream.attempts), stream.skipped, stream.repeated) == (5, 0, 0)
