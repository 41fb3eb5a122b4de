"""The consumer's polls go on whatever is in a log: nobody's record takes others with it."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer import fetcher
from aiokafka.consumer.subscription_state import SubscriptionState

from schemas.log_consumer import LogConsumer
from schemas.record_batches import MAX_BATCH_BYTES
from tests.schemas.test_record_batches import batch, with_payload

TOPIC = TopicPartition("t", 0)


class Answer:
    """A broker's answer to a fetch."""

    API_VERSION = 4

    def __init__(self, data: bytes) -> None:
        self.topics = [("t", [(0, 0, 100, 100, [], data)])]


@pytest.fixture
async def consumer() -> Any:
    """A consumer whose fetches are answered by `answers`, one after the other."""
    made = LogConsumer(bootstrap_servers="nowhere:1", enable_auto_commit=False, auto_offset_reset="earliest")
    yield made
    made._closed = True  # it was never started


async def polled(consumer: Any, data: bytes, *, check_crcs: bool = True) -> list[tuple[int, bytes | None]]:
    """What a poll gives of a fetched log."""
    subscriptions = SubscriptionState()
    subscriptions.assign_from_user([TOPIC])
    assignment = subscriptions.subscription.assignment
    assignment.state_value(TOPIC).reset_to(0)
    client = AIOKafkaClient(bootstrap_servers="nowhere:1")
    made = fetcher.Fetcher(client, subscriptions, check_crcs=check_crcs)
    with contextlib.suppress(asyncio.CancelledError):
        made._fetch_task.cancel()
        await made._fetch_task
    consumer._fetcher = made
    client.send = lambda *_: asyncio.sleep(0, Answer(data))  # type: ignore[method-assign]
    request = SimpleNamespace(topics=[("t", [(0, 0, 10**6)])])
    assert await made._proc_fetch_request(assignment, 1, request)
    found: list[tuple[int, bytes | None]] = []
    while records := (await made.fetched_records([], 0, max_records=3)).get(TOPIC):
        assert len(records) <= 3
        found += [(r.offset, r.value) for r in records]
    return found


GOOD = [(1, b"k", b"good", [])]


async def test_a_bad_record_hides_nothing(consumer: LogConsumer):
    """A header's name that is no text, a batch that cannot be decompressed: what stands around them comes as ever."""
    name = batch([*GOOD, (1, b"k", b"named", [("zz", b"1")]), *GOOD], base=0).replace(b"zz", b"\xff\xfe")
    noise = bytearray(with_payload(1, b"\x1f\x8bnoise"))
    noise[:8] = (3).to_bytes(8)
    found = await polled(consumer, name + bytes(noise) + batch(GOOD, base=4), check_crcs=False)
    assert found == [(0, b"good"), (1, b"named"), (2, b"good"), (3, None), (4, b"good")]


async def test_a_wrong_checksum_is_not_believed(consumer: LogConsumer):
    """Its records are places without content, and the next batch is read."""
    wrong = bytearray(batch(GOOD * 2))
    wrong[-10] ^= 0x01
    assert await polled(consumer, bytes(wrong) + batch(GOOD, base=2)) == [(0, None), (1, None), (2, b"good")]


async def test_compressed_batches_are_read_as_ever(consumer: LogConsumer):
    """Every codec, with its checksum."""
    data = b"".join(batch(GOOD * 2, codec, base=2 * codec) for codec in range(5))
    assert await polled(consumer, data) == [(offset, b"good") for offset in range(10)]


async def test_a_poll_holds_few_records(consumer: LogConsumer):
    """So that what a poll holds is bounded, whatever was fetched."""
    assert consumer._max_poll_records * MAX_BATCH_BYTES < 300 * 2**20


async def test_a_task_that_has_ended_is_noticed(consumer: LogConsumer):
    """The fetching one, and with a group the coordinating one; before the start there is none."""
    assert not consumer.has_died
    fetching = asyncio.get_running_loop().create_future()
    consumer._own_fetcher = SimpleNamespace(_fetch_task=fetching)
    consumer._coordinator = SimpleNamespace()
    assert not consumer.has_died
    coordinating = asyncio.get_running_loop().create_future()
    consumer._coordinator = SimpleNamespace(_coordination_task=coordinating)
    assert not consumer.has_died
    coordinating.set_result(None)
    assert consumer.has_died
    consumer._coordinator = SimpleNamespace()
    fetching.set_result(None)
    assert consumer.has_died
    consumer._own_fetcher = None
