"""Reply logs on every broker: what is acknowledged is there, once, in order, and can be read back."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition

from schemas.codec import ContentType
from schemas.connection import KafkaConnection
from schemas.headers import ReplyAddress, write_reply_headers
from schemas.log_consumer import LogConsumer
from schemas.reasons import FinishReason
from schemas.records import Begin, End, InputRef, ReplyRecord, Tokens, encode_reply, event_of
from service.topic_reader import TopicReader
from tests.contract.brokers import DELETION, ERRORS, NODES, Cluster, fresh
from worker.transport.kafka_connections import KafkaConnections
from worker.transport.kafka_replies import MAX_READERS, KafkaReplies
from worker.transport.protocols import ReplyTopicGone

PRODUCE = 0  # of Kafka's APIs
NOT_LEADER, TIMED_OUT, NOT_ENOUGH_REPLICAS, NOT_ENOUGH_AFTER_APPEND = 6, 7, 19, 20
BEGIN = Begin(False, "w", "tiny", 1, 7, 0.0, InputRef("prompts.standard", 0, 0, 1))


def tokens(attempt: int, position: int, *ids: int) -> Tokens:
    return Tokens(attempt, 0, position, ids, "x" * len(ids), None)


def end(attempt: int) -> End:
    return End(attempt=attempt, finish_reason=FinishReason.LENGTH)


def address(topic: str, request_id: str | None = None) -> ReplyAddress:
    name = request_id or topic.removeprefix("replies.")
    return ReplyAddress(name.encode(), topic, None, ContentType.MSGPACK, (), request_id is None)


@pytest.fixture
async def connections(cluster: Cluster) -> AsyncIterator[KafkaConnections]:
    async with cluster.connections() as running:
        yield running


@pytest.fixture
async def replies(connections: KafkaConnections) -> AsyncIterator[KafkaReplies]:
    running = KafkaReplies(connections, max_record_bytes=900_000)
    yield running
    await running.close()


async def located(cluster: Cluster, replies: KafkaReplies) -> ReplyAddress:
    """A fresh reply topic's address."""
    topic = fresh("replies")
    await cluster.create(topic)
    found = await replies.locate(address(topic))
    assert found is not None
    return found


async def append(replies: KafkaReplies, to: ReplyAddress, *records: ReplyRecord) -> list[int | None]:
    return [await replies.send(to, record) for record in records]


async def test_a_log_is_written_and_read_back(cluster: Cluster, replies: KafkaReplies):
    """Acknowledged offsets are contiguous from 0 on; the reader rule finds the whole answer."""
    to = await located(cluster, replies)
    assert await append(replies, to, BEGIN, tokens(0, 0, 5), tokens(0, 1, 6, 7), end(0)) == [0, 1, 2, 3]
    log = await replies.read(to, 0, None)
    assert log.token_ids == {0: [5, 6, 7]}
    assert log.first_begin.seed == 7
    assert log.ended


async def test_reading_ends_at_the_offset_that_is_asked_for(cluster: Cluster, replies: KafkaReplies):
    """Up to an attempt's own begin, or from it on, and nothing of an empty log."""
    to = await located(cluster, replies)
    assert not (await replies.read(to, 0, None)).ended
    await append(replies, to, BEGIN, tokens(0, 0, 5), BEGIN, tokens(2, 1, 6), end(2))
    assert (await replies.read(to, 0, 2)).token_ids == {0: [5]}
    assert (await replies.read(to, 0, 2)).attempt == 2
    assert not (await replies.read(to, 0, 3)).ended
    assert (await replies.read(to, 0, 4)).token_ids == {0: [5, 6]}


async def test_many_logs_at_once(cluster: Cluster, replies: KafkaReplies):
    """Twenty logs written and read at the same time: each has its own."""
    topics = [fresh("replies") for _ in range(20)]
    await cluster.create(*topics)

    async def answer(topic: str, number: int) -> list[int]:
        to = await replies.locate(address(topic))
        assert to is not None
        sent = await append(replies, to, BEGIN, *(tokens(0, i, number) for i in range(5)), end(0))
        assert sent == list(range(7))
        return (await replies.read(to, 0, 6)).token_ids[0]

    answers = await asyncio.gather(*(answer(topic, number) for number, topic in enumerate(topics)))
    assert answers == [[number] * 5 for number in range(20)]


async def test_a_shared_log_is_told_apart_by_request(cluster: Cluster, replies: KafkaReplies):
    """Three requests in two partitions of one topic: each finds its own end, from its own begin on."""
    topic = fresh("replies")
    await cluster.create(topic, partitions=2)
    found = [await replies.locate(address(topic, name)) for name in ("a", "b", "c")]
    assert {to.partition for to in found if to} <= {0, 1}
    begins = [await replies.send(to, BEGIN) for to in found]
    for to, begin, number in zip(found, begins, range(3), strict=True):
        await append(replies, to, tokens(begin, 0, number))
    for to, begin, number in zip(found, begins, range(3), strict=True):
        last = await replies.send(to, end(begin))
        log = await replies.read(to, begin, last)
        assert (log.token_ids, log.ended, log.attempt) == ({0: [number]}, True, begin)


async def test_a_topic_that_never_was(cluster: Cluster, replies: KafkaReplies):
    """It is told apart, in about two seconds, and asking has not created it."""
    nowhere = address(fresh("replies"))
    assert await replies.locate(nowhere) is None
    with pytest.raises(ReplyTopicGone):
        await replies.read(nowhere, 0, None)


async def test_t09_readers_outlive_cancelled_reads(cluster: Cluster, replies: KafkaReplies):
    """All readers are cancelled in the middle of a poll, twice, as when a partition is lost: each ends at once, and
    then they read other logs, and nothing of those that they were at."""
    found = [await located(cluster, replies) for _ in range(MAX_READERS + 2)]
    for number, to in enumerate(found):
        await append(replies, to, BEGIN, tokens(0, 0, number))
    for _ in range(2):
        waiting = [asyncio.create_task(replies.read(to, 0, 100)) for to in found[:MAX_READERS]]
        await asyncio.sleep(0.5)  # all have read what there is, and poll for more
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=5)
        assert all(task.cancelled() for task in waiting)
    async with asyncio.timeout(30):
        logs = await asyncio.gather(*(replies.read(to, 0, 1) for to in reversed(found)))
    assert [log.token_ids for log in logs] == [{0: [number]} for number in reversed(range(len(found)))]


async def test_t09_a_send_whose_sender_is_cancelled_lands(cluster: Cluster, replies: KafkaReplies):
    """The `end` is on its way when nobody waits for it any more: the sender is free at once, and the record is written,
    once."""
    to = await located(cluster, replies)
    await append(replies, to, BEGIN)
    sending = asyncio.create_task(replies.send(to, end(0)))
    await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait([sending], timeout=1)
    assert sending.cancelled()
    async with asyncio.timeout(30):
        log = await replies.read(to, 0, 1)
        assert log.ended
        assert await replies.send(to, BEGIN) == 2


async def test_t20_a_topic_deleted_under_its_writer(
    cluster: Cluster, connections: KafkaConnections, replies: KafkaReplies
):
    """The next send, and a read, say that it is gone; other logs are written meanwhile, and after. Nothing waits in the
    producer any more, which would ask for the topic's leader without a pause (found by measuring)."""
    cluster.needs(DELETION)
    to, other = await located(cluster, replies), await located(cluster, replies)
    await append(replies, to, BEGIN)
    await cluster.delete(to.topic)
    async with asyncio.timeout(30):
        sending = asyncio.create_task(replies.send(to, tokens(0, 0, 5)))
        assert await append(replies, other, BEGIN, tokens(0, 0, 5)) == [0, 1]
        with pytest.raises(ReplyTopicGone):
            await sending
        with pytest.raises(ReplyTopicGone):
            await replies.read(to, 0, None)
        assert await append(replies, other, tokens(0, 1, 5), end(0)) == [2, 3]
    assert not connections.producer._message_accumulator._batches


async def test_t29_the_producer_keeps_no_ended_topics(
    cluster: Cluster, connections: KafkaConnections, replies: KafkaReplies
):
    """After thirty requests the producer asks for the metadata of none of their topics."""
    for _ in range(30):
        to = await located(cluster, replies)
        await append(replies, to, BEGIN, end(0))
        replies.forget(to)
    assert not [topic for topic in connections.producer.client._topics if topic.startswith("replies.")]


async def test_a_forgotten_log_is_begun_again(cluster: Cluster, replies: KafkaReplies):
    """A partition that was lost comes back: its requests' logs, forgotten meanwhile, are gone on with at the next
    offset, not at that of an old record for whose double the broker could take a new one."""
    to = await located(cluster, replies)
    assert await append(replies, to, BEGIN, tokens(0, 0, 5)) == [0, 1]
    replies.forget(to)
    assert await replies.locate(to) == to
    assert await append(replies, to, BEGIN, tokens(2, 1, 6), end(2)) == [2, 3, 4]
    assert (await replies.read(to, 0, 4)).token_ids == {0: [5, 6]}


async def test_t29_a_log_goes_on_under_another_producer(
    cluster: Cluster, connections: KafkaConnections, replies: KafkaReplies, monkeypatch: pytest.MonkeyPatch
):
    """Producers are renewed because they remember every log: one that is being written to has every record once."""
    monkeypatch.setattr("worker.transport.kafka_connections.MAX_SEQUENCES", 3)
    long, first = await located(cluster, replies), connections.producer
    sent = await append(replies, long, BEGIN)
    for number in range(6):
        short = await located(cluster, replies)
        assert await append(replies, short, BEGIN, end(0)) == [0, 1]
        replies.forget(short)
        sent += await append(replies, long, tokens(0, number, number))
    assert sent == list(range(7))
    assert (await replies.read(long, 0, 6)).token_ids == {0: list(range(6))}
    assert connections.producer is not first or not connections.idempotent


async def test_a_log_is_read_to_its_end(
    cluster: Cluster, connections: KafkaConnections, replies: KafkaReplies, monkeypatch: pytest.MonkeyPatch
):
    """Its last batch holds several records. Kafka is asked once; the embedded broker has to be asked again."""
    fetched: list[TopicPartition] = []
    original = LogConsumer._high_watermarks

    async def spied(self: LogConsumer, ends: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        fetched.extend(ends)
        return await original(self, ends)

    monkeypatch.setattr(LogConsumer, "_high_watermarks", spied)
    to = await located(cluster, replies)
    async with AIOKafkaProducer(bootstrap_servers=cluster.bootstrap, linger_ms=500, acks="all") as producer:
        sent = []
        for record in (BEGIN, tokens(0, 0, 5), tokens(0, 1, 6), tokens(0, 2, 7), end(0)):
            headers = write_reply_headers(to, event_of(record), None)
            value = encode_reply(record, to.content_type)
            sent.append(await producer.send(to.topic, value, key=b"k", headers=headers, partition=0))
        assert [(await future).offset for future in sent] == [0, 1, 2, 3, 4]
    log = await replies.read(to, 0, None)
    assert (log.ended, log.token_ids) == (True, {0: [5, 6, 7]})
    assert fetched == ([] if connections.idempotent else [TopicPartition(to.topic, 0)])


async def test_dead_letters_without_anything(cluster: Cluster, replies: KafkaReplies):
    """A record without key and value can be put on the DLQ and has none there, and so can one that is too large."""
    topic = fresh("dlq")
    await cluster.create(topic)
    assert await replies.publish(topic, None, None, [("dlq_reason", b"x")])
    assert await replies.publish(topic, b"", b"", [("dlq_reason", b"x")])
    async with TopicReader(KafkaConnection(bootstrap=cluster.bootstrap)) as reader:
        records = [r async for r in reader.records({TopicPartition(topic, 0): (0, 2)})]
    assert [(r.key, r.value, r.headers) for r in records] == [(x, x, (("dlq_reason", b"x"),)) for x in (None, b"")]
    assert await replies.publish(topic, b"k", b"x" * 2_000_000, [("dlq_reason", b"x")])


async def test_errors_of_produce_requests_pass(cluster: Cluster, replies: KafkaReplies):
    """What a leader that moves or lacks replicas answers: every record is there once, at contiguous offsets."""
    cluster.needs(ERRORS)
    to = await located(cluster, replies)
    sent = await append(replies, to, BEGIN)
    for code in (NOT_LEADER, TIMED_OUT, NOT_ENOUGH_REPLICAS, NOT_ENOUGH_AFTER_APPEND):
        cluster.handle.errors(PRODUCE, [code] * 2)
        sent += await append(replies, to, tokens(0, len(sent) - 1, code))
    assert sent == [0, 1, 2, 3, 4]
    assert (await replies.read(to, 0, 4)).token_ids[0] == [6, 7, 19, 20]


async def test_leaders_that_move_and_brokers_that_go_down(cluster: Cluster, replies: KafkaReplies):
    """A log's leader moves from record to record, then its broker is away for a while: nothing is lost or doubled."""
    cluster.needs(NODES)
    to = await located(cluster, replies)
    sent = await append(replies, to, BEGIN)
    for number in range(3):
        await cluster.move_leader(to.topic, number)
        sent += await append(replies, to, tokens(0, number, number))
    away = asyncio.create_task(cluster.brokers_away(2.0))
    await asyncio.sleep(0.2)
    sent.append(await asyncio.wait_for(replies.send(to, tokens(0, 3, 3)), 60))
    await away
    assert sent == [0, 1, 2, 3, 4]
    assert (await replies.read(to, 0, 4)).token_ids[0] == [0, 1, 2, 3]
