"""The client against the embedded broker and a responder that follows protocol.md."""

import asyncio
import gc

import pytest

from schemas.codec import ContentType
from schemas.connection import KafkaConnection
from schemas.errors import RequestError
from schemas.reasons import ErrorCode, FinishReason
from schemas.records import Begin, ChoiceResult, End, ErrorInfo, Tokens
from service.client import Client
from service.errors import (
    LaneMissing,
    RequestFailed,
    RequestTimeout,
    StreamBroken,
    StreamClosed,
)
from service.exchange import lane_missing
from service.kafka import TopicAdmin
from tests.service.responder import Reply, Responder

pytestmark = pytest.mark.broker


async def never_ending(reply: Reply) -> None:
    """Begins, sends a token every 10 ms, and ends only when cancelled."""
    attempt = await reply.begin()
    position = 0
    while not reply.cancelled.is_set():
        await reply.tokens(attempt, position, [120])
        position += 1
        await asyncio.sleep(0.01)
    await reply.end(attempt, position, FinishReason.CANCELLED)


async def silent(reply: Reply) -> None:
    """Says nothing."""
    reply.forget()


async def _until(condition: object, timeout: float = 5.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)


def _sent(reply: Reply) -> bytes:
    return reply.headers["correlation_id"]


async def test_stream_and_its_attributes(client: Client, responder: Responder) -> None:
    """Begin, tokens and end arrive in order; afterwards the stream has text, token ids, end and TTFT."""
    stream = client.stream(prompt="abc", tier="interactive", max_tokens=9)
    assert stream.ttft is None
    events = [event async for event in stream]
    assert isinstance(events[0], Begin)
    assert isinstance(events[-1], End)
    token_ids = [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]
    assert token_ids == [97, 98, 99] == list(stream.token_ids)
    assert stream.text == "abc"
    assert stream.end == events[-1]
    assert stream.ttft is not None
    assert 0 < stream.ttft < 10
    assert [event async for event in stream] == []
    assert responder.replies[0].fields == {"prompt": "abc", "max_tokens": 9}
    assert responder.replies[0].topic == f"replies.{stream.correlation_id}"


async def test_headers_and_key(client: Client, responder: Responder) -> None:
    """Tenant, priority, deadline, trace and key travel as protocol.md says."""
    trace = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "baggage": "a=b"}
    await client.complete(prompt="x", tenant="acme", priority=3, deadline=60, key=b"conversation", trace=trace)
    reply = responder.replies[0]
    assert reply.key == b"conversation"
    assert reply.headers["tenant"] == b"acme"
    assert reply.headers["priority"] == b"3"
    assert 55_000 < int(reply.headers["deadline_ms"]) - reply.input.timestamp_ms < 65_000
    assert reply.headers["traceparent"] == trace["traceparent"].encode()
    assert reply.headers["baggage"] == b"a=b"


async def test_json_client(responder: Responder) -> None:
    """A client may speak JSON."""
    async with Client(
        connection=responder.connection, lane_prefix=responder.lane_prefix, content_type=ContentType.JSON, tenant="t"
    ) as client:
        assert (await client.complete(prompt="héllo")).text == "héllo"
    assert responder.replies[0].content_type is ContentType.JSON
    assert responder.replies[0].headers["tenant"] == b"t"


async def test_completion(client: Client) -> None:
    """A completion has text, token ids, finish reason, usage and timing."""
    completion = await client.complete(messages=None, prompt="hello", temperature=0)
    assert completion.text == "hello"
    assert completion.token_ids == tuple(b"hello")
    assert completion.finish_reason is FinishReason.STOP
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 5
    assert completion.timing is not None


async def test_hundreds_of_streams(client: Client) -> None:
    """Three hundred concurrent streams each get their own answer."""
    prompts = [f"prompt {number}" for number in range(300)]
    completions = await asyncio.gather(*(client.complete(prompt=prompt, timeout=60) for prompt in prompts))
    assert [completion.text for completion in completions] == prompts


async def test_choices(client: Client, responder: Responder) -> None:
    """With n > 1 each choice has its text, tokens and finish reason."""

    async def two_choices(reply: Reply) -> None:
        attempt = await reply.begin()
        await reply.tokens(attempt, 0, [97], choice=1)
        await reply.tokens(attempt, 0, [65, 66], choice=0)
        reasons = (FinishReason.LENGTH, FinishReason.STOP)
        await reply.write(End(attempt, reasons, tail={1: "!"}))

    responder.script = two_choices
    completion = await client.complete(prompt="x", n=2)
    assert completion.choices == (
        ChoiceResult("AB", (65, 66), FinishReason.LENGTH),
        ChoiceResult("a!", (97,), FinishReason.STOP),
    )


async def test_unstreamed_answer(client: Client, responder: Responder) -> None:
    """With stream=False the end record carries everything."""

    async def whole(reply: Reply) -> None:
        attempt = await reply.begin()
        choice = ChoiceResult("AB", (65, 66), FinishReason.STOP)
        await reply.write(End(attempt, FinishReason.STOP, choices=(choice,)))

    responder.script = whole
    async with client.stream(prompt="x", stream=False) as stream:
        completion = await stream.completion()
    assert completion.text == stream.text == "AB"
    assert completion.token_ids == stream.token_ids == (65, 66)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "x", "max_token": 3}, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "token_ids": [1]}, "exactly one"),
        ({}, "exactly one"),
        ({"prompt": "x", "priority": 11}, "priority"),
        ({"prompt": "x", "tenant": ""}, "tenant"),
    ],
)
async def test_wrong_requests_are_not_sent(
    client: Client, responder: Responder, fields: dict[str, object], message: str
) -> None:
    """What the service would refuse raises RequestError at once, and nothing is published."""
    with pytest.raises(RequestError, match=message):
        client.stream(**fields)  # type: ignore[arg-type]
    assert responder.replies == []


async def test_missing_lane(client: Client) -> None:
    """A tier without a topic is an error, not a new topic. It says which there are."""
    with pytest.raises(LaneMissing, match=r"no lane premium .* There are: batch, interactive, standard\. "):
        await client.complete(prompt="x", tier="premium")


@pytest.mark.parametrize(
    ("lane", "prefix", "topics", "words"),
    [
        (
            "prompts.gold",
            "prompts.",
            ["prompts.batch", "prompts.control", "prompts.dlq", "usage"],
            "There are: batch. ",
        ),
        (
            "prompts.gold",
            "prompts.",
            [],
            "`carousel topics create --tier gold` makes it, and a worker with a table [tier",
        ),
        (
            "m.batch",
            "m.",
            ["prompts.batch"],
            "none with this prefix. `carousel topics create --lane-prefix m.` makes it",
        ),
    ],
)
def test_a_missing_lane_says_what_makes_it(lane: str, prefix: str, topics: list[str], words: str) -> None:
    """The lanes that exist, without the topics beside them, and the command for this tier and prefix."""
    assert words in lane_missing(lane, prefix, topics)


async def test_service_error(client: Client, responder: Responder) -> None:
    """An end with an error is an event of the stream, and an exception of complete."""

    async def refuse(reply: Reply) -> None:
        await reply.write(End(-1, FinishReason.ERROR, ErrorInfo(ErrorCode.OVERLOADED, "come back", 1500)))

    responder.script = refuse
    events = [event async for event in client.stream(prompt="x")]
    assert [type(event) for event in events] == [End]
    with pytest.raises(RequestFailed, match="come back") as raised:
        await client.complete(prompt="x")
    assert (raised.value.code, raised.value.retry_after_ms, raised.value.retriable) == ("overloaded", 1500, True)


async def test_resumed_attempt(client: Client, responder: Responder) -> None:
    """A second attempt goes on where the first stopped; what a zombie of the first still writes is not seen."""

    async def two_attempts(reply: Reply) -> None:
        first = await reply.begin()
        await reply.tokens(first, 0, [65])
        second = await reply.begin()
        await reply.tokens(first, 1, [90])
        await reply.tokens(second, 1, [66])
        await reply.end(first)
        await reply.end(second, 2)

    responder.script = two_attempts
    async with client.stream(prompt="x") as stream:
        begins = [event.restart async for event in stream if isinstance(event, Begin)]
        assert stream.text == "AB"
    assert begins == [False, False]


async def test_restarted_attempt(client: Client, responder: Responder) -> None:
    """A restart is visible as a Begin, and voids what came before."""

    async def restart(reply: Reply) -> None:
        first = await reply.begin()
        await reply.tokens(first, 0, [65, 66, 67])
        second = await reply.begin(restart=True)
        await reply.tokens(second, 0, [68])
        await reply.end(second, 1)

    responder.script = restart
    async with client.stream(prompt="x") as stream:
        begins = [event.restart async for event in stream if isinstance(event, Begin)]
    assert begins == [False, True]
    assert stream.text == "D"


async def test_broken_log_ends_its_stream_only(client: Client, responder: Responder) -> None:
    """A log with a hole breaks its own stream and cancels its request; others go on."""

    async def hole(reply: Reply) -> None:
        attempt = await reply.begin()
        if reply.fields["prompt"] == "hole":
            await reply.tokens(attempt, 7, [65])
            await reply.cancelled.wait()
            reply.forget()
        else:
            await asyncio.sleep(0.2)
            await reply.tokens(attempt, 0, [65])
            await reply.end(attempt, 1)

    responder.script = hole
    good = asyncio.create_task(client.complete(prompt="good"))
    with pytest.raises(StreamBroken, match="position 7"):
        await client.complete(prompt="hole")
    assert (await good).text == "A"
    broken = next(_sent(reply) for reply in responder.replies if reply.fields["prompt"] == "hole")
    await _until(lambda: responder.cancels == [broken])


async def test_leaving_the_block_cancels(client: Client, responder: Responder) -> None:
    """Leaving `async with` before the end publishes one cancel."""
    responder.script = never_ending
    async with client.stream(prompt="x") as stream:
        async for event in stream:
            if isinstance(event, Tokens):
                break
    await _until(lambda: responder.cancels)
    await _until(lambda: responder.replies[0].cancelled.is_set())
    assert responder.cancels == [_sent(responder.replies[0])]
    assert [event async for event in stream] == []
    with pytest.raises(StreamClosed):
        await stream.completion()


async def test_exception_in_the_block_cancels(client: Client, responder: Responder) -> None:
    """An exception that leaves the block does so too, and is not replaced."""
    responder.script = never_ending

    async def fail() -> None:
        async with client.stream(prompt="x") as stream:
            async for _ in stream:
                raise LookupError

    with pytest.raises(LookupError):
        await fail()
    await _until(lambda: responder.cancels)


async def test_breaking_out_of_a_bare_loop_cancels(client: Client, responder: Responder) -> None:
    """Without a block, the cancel is published when Python drops the stream."""
    responder.script = never_ending
    async for _ in client.stream(prompt="x"):
        break
    gc.collect()
    await _until(lambda: responder.cancels)


async def test_aclose_cancels_once(client: Client, responder: Responder) -> None:
    """`aclose` leaves the stream; closing again, or dropping it, adds nothing."""
    responder.script = never_ending
    stream = client.stream(prompt="x")
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    del stream
    gc.collect()
    await _until(lambda: responder.cancels)
    await asyncio.sleep(0.1)
    assert len(responder.cancels) == 1


async def test_cancelling_the_task_cancels_the_request(client: Client, responder: Responder) -> None:
    """A task that is cancelled while it waits for an event takes its request with it."""
    responder.script = silent
    task = asyncio.create_task(client.complete(prompt="x"))
    await _until(lambda: responder.replies)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _until(lambda: responder.cancels == [_sent(responder.replies[0])])


async def test_ended_streams_are_not_cancelled(client: Client, responder: Responder) -> None:
    """Leaving after the end, and leaving what was never started, publishes nothing."""
    async with client.stream(prompt="x") as stream:
        await stream.completion()
    del stream
    client.stream(prompt="never started")
    gc.collect()
    await asyncio.sleep(0.2)
    assert responder.cancels == []
    assert len(responder.replies) == 1


async def test_timeout_without_an_event(client: Client, responder: Responder) -> None:
    """A stream without an event for `timeout` seconds raises and cancels; slow but steady ones do not."""
    responder.script = silent
    with pytest.raises(RequestTimeout, match=r"no event for 0\.3 s"):
        await client.complete(prompt="x", timeout=0.3)
    await _until(lambda: responder.cancels)

    async def steady(reply: Reply) -> None:
        attempt = await reply.begin()
        for position in range(8):
            await asyncio.sleep(0.1)
            await reply.tokens(attempt, position, [65])
        await reply.end(attempt, 8)

    responder.script = steady
    assert (await client.complete(prompt="x", timeout=0.6)).text == "A" * 8


async def test_deadline_without_an_answer(
    client: Client, responder: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline long past without an end is a time-out, so that no caller waits for a service that is gone."""
    monkeypatch.setattr("service.stream._DEADLINE_GRACE_S", 0.2)
    responder.script = silent
    with pytest.raises(RequestTimeout, match="after the deadline"):
        await client.complete(prompt="x", deadline=0.1)


async def test_slow_consumer_holds_up_nobody(client: Client, responder: Responder) -> None:
    """A stream whose consumer stands still does not delay another, and gets everything in the end."""
    async with client.stream(prompt="a" * 200) as slow:
        await anext(slow)
        assert (await client.complete(prompt="quick", timeout=10)).text == "quick"
        await _until(lambda: slow.end is not None)
        num_events = len([event async for event in slow])
    assert slow.text == "a" * 200
    assert num_events <= 2


async def test_closing_the_client_ends_its_streams(responder: Responder) -> None:
    """Streams that wait fail with StreamClosed, their requests are cancelled, and no reply topic is left."""
    responder.script = silent
    before = await _reply_topics(responder)
    client = Client(connection=responder.connection, lane_prefix=responder.lane_prefix)
    async with client:
        unused = client.stream(prompt="x")
        waiting = [asyncio.create_task(client.complete(prompt="x")) for _ in range(20)]
        await _until(lambda: len(responder.replies) == 20)
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, StreamClosed) for result in results)
    await _until(lambda: len(responder.cancels) == 20)
    assert await _reply_topics(responder) <= before
    with pytest.raises(StreamClosed):
        client.stream(prompt="x")
    with pytest.raises(StreamClosed):
        await anext(unused)


async def test_reply_topics_are_deleted(responder: Responder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics of ended requests go while the client lives; at its close nothing is left."""
    before = await _reply_topics(responder)
    async with Client(connection=responder.connection, lane_prefix=responder.lane_prefix) as client:
        client._exchange._pool._grace = 0.1  # type: ignore[union-attr]
        await asyncio.gather(*(client.complete(prompt="x") for _ in range(30)))
        used = {reply.topic for reply in responder.replies}
        await asyncio.sleep(0.8)
        assert not used & await _reply_topics(responder)
    assert await _reply_topics(responder) <= before


async def _reply_topics(responder: Responder) -> set[str]:
    async with TopicAdmin(responder.connection) as admin:
        return {name for name in await admin.list() if name.startswith("replies.")}


async def test_reader_death_reaches_every_stream(client: Client, responder: Responder) -> None:
    """When the reader dies, streams that wait fail, and so do new ones: nobody hangs."""
    responder.script = silent
    waiting = [asyncio.create_task(client.complete(prompt="x")) for _ in range(3)]
    await _until(lambda: len(responder.replies) == 3)
    client._exchange._reader._deliver = None  # type: ignore[assignment, union-attr, method-assign]
    await responder.replies[0].begin()
    async with asyncio.timeout(5):
        results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, StreamBroken) for result in results)
    with pytest.raises(StreamBroken, match="died"):
        await client.complete(prompt="x")


async def test_death_of_the_fetching_task_is_noticed(client: Client, responder: Responder) -> None:
    """The consumer's own task ending is the reader's death, not silence."""
    responder.script = silent
    waiting = asyncio.create_task(client.complete(prompt="x"))
    await _until(lambda: responder.replies)
    client._exchange._reader._consumer._fetcher._fetch_task.cancel()  # type: ignore[union-attr]
    async with asyncio.timeout(5):
        with pytest.raises(StreamBroken):
            await waiting


async def test_use_before_entering() -> None:
    """A client that has not been entered says how to use it."""
    with pytest.raises(StreamClosed, match="async with"):
        Client("localhost:9092").stream(prompt="x")
    with pytest.raises(ValueError, match="not both"):
        Client("localhost:9092", connection=KafkaConnection())
