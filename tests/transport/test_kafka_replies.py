"""Writing to reply logs through a producer of the test's own making: what it remembers, forgets and gives up."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import (
    KafkaError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
)

from schemas.codec import ContentType
from schemas.headers import ReplyAddress
from schemas.reasons import FinishReason
from schemas.records import End
from worker.transport import kafka_replies
from worker.transport.kafka_replies import KafkaReplies
from worker.transport.protocols import RecordTooLarge, ReplyTopicGone, ReplyUnauthorised

AN_END = End(attempt=-1, finish_reason=FinishReason.STOP)


def address(topic: str = "replies.a", *, per_request: bool = True) -> ReplyAddress:
    return ReplyAddress(topic.removeprefix("replies.").encode(), topic, 0, ContentType.MSGPACK, (), per_request)


class FakeConnections:
    """A producer whose sends end when the test says so; topics exist until it says otherwise."""

    def __init__(self) -> None:
        self.topics = {"replies.a", "replies.b", "prompts.dlq"}
        self.known: set[str] = set()  # topics of which the producer asks for metadata
        self.sends: list[tuple[str, asyncio.Future[Any]]] = []
        self.sent: list[dict[str, Any]] = []
        self.num_producers = 0
        self.replace_producer_now()

    def replace_producer_now(self) -> None:
        self.num_producers += 1
        task = asyncio.get_running_loop().create_future()
        self.producer = SimpleNamespace(send_and_wait=self._send, sender_task=task)

    async def _send(self, topic: str, value: bytes, **others: object) -> Any:
        self.sent.append({"value": value} | others)
        acknowledged = asyncio.get_running_loop().create_future()
        self.sends.append((topic, acknowledged))
        return await acknowledged

    def acknowledge(self, offset: int = 0) -> None:
        self.sends[-1][1].set_result(SimpleNamespace(offset=offset))

    async def replace_producer(self, broken: Any) -> None:
        assert broken is self.producer
        self.replace_producer_now()

    async def partitions_of(self, topic: str) -> int:
        return int(topic in self.topics)

    def remember_topic(self, topic: str) -> None:
        self.known.add(topic)

    def forget_topic(self, topic: str) -> None:
        self.known.discard(topic)

    def abandon_topic(self, topic: str) -> None:
        for sent_to, acknowledged in self.sends:
            if sent_to == topic and not acknowledged.done():
                acknowledged.set_exception(KafkaError("abandoned"))


@pytest.fixture
async def connections(monkeypatch: pytest.MonkeyPatch) -> FakeConnections:
    monkeypatch.setattr(kafka_replies, "has_died", lambda client: client.sender_task.done())
    monkeypatch.setattr(kafka_replies, "PENDING_S", 0.01)
    return FakeConnections()


@pytest.fixture
async def replies(connections: FakeConnections) -> KafkaReplies:
    return KafkaReplies(connections, max_record_bytes=10_000)  # type: ignore[arg-type]


async def sending(connections: FakeConnections, replies: KafkaReplies, to: ReplyAddress) -> asyncio.Task[int | None]:
    """A send that the producer has taken on."""
    number = len(connections.sends)
    task = asyncio.create_task(replies.send(to, AN_END))
    while len(connections.sends) == number:
        await asyncio.sleep(0)
    return task


async def test_t29_an_ended_topic_is_forgotten(connections: FakeConnections, replies: KafkaReplies):
    """The producer asks for the metadata of what is being written to, and of nothing else; shared topics stay."""
    for to in (address(), address("replies.b", per_request=False)):
        task = await sending(connections, replies, to)
        connections.acknowledge(7)
        assert await task == 7
        replies.forget(to)
    assert connections.known == {"replies.b"}


async def test_a_topic_with_a_record_on_its_way_is_not_forgotten(connections: FakeConnections, replies: KafkaReplies):
    """Without its metadata the record would find no leader after a broker's restart, and block its log until it expires
    (found by bench.faults). It is forgotten when the record has arrived."""
    task = await sending(connections, replies, address())
    task.cancel()  # its partition was lost; the record is on its way all the same
    replies.forget(address())
    await asyncio.sleep(0)
    assert connections.known == {"replies.a"}
    connections.acknowledge()
    while connections.known:
        await asyncio.sleep(0)


async def test_a_new_attempt_keeps_the_topic(connections: FakeConnections, replies: KafkaReplies):
    """The topic is written to again before the last record of the attempt before has arrived: it stays known."""
    first = await sending(connections, replies, address())
    replies.forget(address())
    second = await sending(connections, replies, address())
    for _, acknowledged in connections.sends:
        acknowledged.set_result(SimpleNamespace(offset=1))
    await asyncio.gather(first, second)
    assert connections.known == {"replies.a"}


async def test_t20_a_topic_that_is_deleted_ends_its_send(connections: FakeConnections, replies: KafkaReplies):
    """The caller has gone: the send ends soon, with a sentence, and so does the producer's search for a leader."""
    task = await sending(connections, replies, address())
    connections.topics.remove("replies.a")
    with pytest.raises(ReplyTopicGone):
        await asyncio.wait_for(task, 20)
    assert connections.sends[0][1].done()


async def test_a_deleted_topic_that_nobody_waits_for_is_abandoned_too(
    connections: FakeConnections, replies: KafkaReplies
):
    """The call was cancelled, then its topic deleted: the record does not stay in the producer."""
    task = await sending(connections, replies, address())
    task.cancel()
    replies.forget(address())
    connections.topics.remove("replies.a")
    async with asyncio.timeout(20):
        while not connections.sends[0][1].done() or connections.known:
            await asyncio.sleep(0.001)


async def test_a_slow_broker_is_waited_for(connections: FakeConnections, replies: KafkaReplies):
    """The topic exists: the send takes as long as it takes."""
    task = await sending(connections, replies, address())
    await asyncio.sleep(0.05)
    assert not task.done()
    connections.acknowledge(3)
    assert await task == 3


@pytest.mark.parametrize(
    ("error", "dies", "is_replaced"),
    [
        (KafkaError("refused"), False, False),
        (OutOfOrderSequenceNumber(), False, True),
        (KafkaError("unexpected"), True, True),
    ],
)
async def test_t09_a_producer_that_cannot_go_on_is_replaced(
    connections: FakeConnections, replies: KafkaReplies, error: KafkaError, dies: bool, is_replaced: bool
):
    """A gap in its sequence, or its sending task ended: a fresh one takes over; one refused record is no reason."""
    task = await sending(connections, replies, address())
    if dies:
        connections.producer.sender_task.set_result(None)
    connections.sends[-1][1].set_exception(error)
    assert await task is None
    assert (connections.num_producers == 2) is is_replaced


async def test_t19_a_record_too_large_is_not_sent(connections: FakeConnections, replies: KafkaReplies):
    """It is refused before it is sent, so that the producer's sequence has no gap; a dead letter is cut."""
    big = End(attempt=-1, finish_reason=FinishReason.STOP, tail={0: "x" * 20_000})
    with pytest.raises(RecordTooLarge):
        await replies.send(address(), big)
    assert connections.sends == []
    publishing = asyncio.create_task(replies.publish("prompts.dlq", b"k", b"x" * 20_000, []))
    while not connections.sends:
        await asyncio.sleep(0)
    assert connections.sent[-1]["headers"] == [("truncated_from", b"20000")]
    connections.acknowledge()
    assert await publishing


@pytest.mark.parametrize("key", [b"small", b"k" * 20_000])
@pytest.mark.parametrize("headers", [[("h", b"x" * 20_000)], [("ü" * 9_000, b"")], [("h", b"x")] * 5_000])
async def test_t19_a_dead_letter_of_large_headers_is_cut(
    connections: FakeConnections, replies: KafkaReplies, headers: list[tuple[str, bytes]], key: bytes
):
    """One that is huge, or many: what we added ourselves stays, a key that fits beside it, too; and the record fits."""
    ours = [(f"dlq_{i}", b"why") for i in range(8)]
    num_bytes = sum(len(name.encode()) + len(value) for name, value in [*headers, *ours])
    cut = [("truncated_headers_from", str(num_bytes).encode())]
    cut += [] if key == b"small" else [("truncated_key_from", b"20000")]
    publishing = asyncio.create_task(replies.publish("prompts.dlq", key, b"body", [*headers, *ours]))
    while not connections.sends:
        await asyncio.sleep(0)
    sent = connections.sent[-1]
    assert sent["headers"][-len(ours + cut) :] == [*ours, *cut]
    assert sent["key"] == (b"small" if key == b"small" else None)
    assert len(sent["value"]) + sum(len(n.encode()) + len(v) for n, v in sent["headers"]) < 10_000
    connections.acknowledge()
    assert await publishing


async def test_t19_a_dead_letter_of_a_large_key_has_none(connections: FakeConnections, replies: KafkaReplies):
    """Its headers and its value stay, whatever they are, and one more says what is missing."""
    for headers in ([], [("h", b"x")]):
        publishing = asyncio.create_task(replies.publish("prompts.dlq", b"k" * 20_000, b"body", headers))
        count = len(connections.sends)
        while len(connections.sends) == count:
            await asyncio.sleep(0)
        assert connections.sent[-1] | {"partition": None} == {
            "value": b"body",
            "key": None,
            "partition": None,
            "headers": [*headers, ("truncated_key_from", b"20000")],
        }
        connections.acknowledge()
        assert await publishing


@pytest.mark.parametrize("error", [MessageSizeTooLargeError, RecordListTooLargeError])
async def test_a_topic_that_refuses_a_size_is_told(
    connections: FakeConnections, replies: KafkaReplies, error: type[KafkaError]
):
    """Its caller has made it with a limit of its own: trying the same again cannot help. A DLQ's may be lifted."""
    task = await sending(connections, replies, address())
    connections.sends[-1][1].set_exception(error())
    with pytest.raises(RecordTooLarge, match="refused"):
        await task
    publishing = asyncio.create_task(replies.publish("prompts.dlq", b"k", b"x", []))
    while len(connections.sends) < 2:
        await asyncio.sleep(0)
    connections.sends[-1][1].set_exception(error())
    assert not await publishing


async def test_a_reply_topic_that_the_worker_may_not_use(connections: FakeConnections, replies: KafkaReplies):
    """Trying again cannot help: whoever serves the request hears of it. A record of the DLQ is then not done."""

    async def refuse(topic: str) -> int:
        raise TopicAuthorizationFailedError(topic)

    task = await sending(connections, replies, address())
    connections.sends[-1][1].set_exception(TopicAuthorizationFailedError("replies.a"))
    with pytest.raises(ReplyUnauthorised):
        await task
    publishing = asyncio.create_task(replies.publish("usage", None, b"x", []))
    while len(connections.sends) < 2:
        await asyncio.sleep(0)
    connections.sends[-1][1].set_exception(TopicAuthorizationFailedError("usage"))
    assert await publishing is False
    connections.partitions_of = refuse  # type: ignore[method-assign]
    with pytest.raises(ReplyUnauthorised):
        await replies.locate(address())
    with pytest.raises(ReplyUnauthorised):
        await replies.read(address(), 0, None)
