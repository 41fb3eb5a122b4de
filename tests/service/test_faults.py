"""The client while its broker is away, and on Apache Kafka."""

import asyncio
import os
import signal
import uuid
from typing import Any

import pytest

from schemas.connection import KafkaConnection
from schemas.records import Tokens
from service.broker import EmbeddedBroker
from service.client import Client
from service.errors import BrokerUnavailable, ReplyTopicDeleted, RequestTimeout, StreamClosed
from service.kafka import TopicAdmin
from tests.service.responder import Reply, Responder


def _client(connection: KafkaConnection, lane_prefix: str) -> Client:
    return Client(connection=connection, lane_prefix=lane_prefix)


async def dripping(reply: Reply) -> None:
    """The prompt's characters, one every 50 ms."""
    attempt = await reply.begin()
    for position, character in enumerate(reply.fields["prompt"]):
        await asyncio.sleep(0.05)
        await reply.tokens(attempt, position, [ord(character)])
    await reply.end(attempt, len(reply.fields["prompt"]))


@pytest.mark.broker
async def test_frozen_broker() -> None:
    """The broker stands still for 3 s: running streams go on afterwards, requests made meanwhile are answered."""
    async with EmbeddedBroker() as broker:
        connection = KafkaConnection(bootstrap=broker.bootstrap)
        async with Responder(connection, "t.").running() as responder:
            responder.script = dripping
            async with _client(connection, "t.") as client:
                prompts = [f"{number} and then some more text" for number in range(20)]
                running = [asyncio.create_task(client.complete(prompt=prompt)) for prompt in prompts]
                await asyncio.sleep(0.5)
                os.kill(broker.pid, signal.SIGSTOP)
                try:
                    later = [asyncio.create_task(client.complete(prompt=prompt)) for prompt in prompts]
                    with pytest.raises(RequestTimeout):
                        await client.complete(prompt="impatient", timeout=0.5)
                    await asyncio.sleep(2.5)
                    assert not any(task.done() for task in (*running, *later))
                finally:
                    os.kill(broker.pid, signal.SIGCONT)
                async with asyncio.timeout(20):
                    assert [each.text for each in await asyncio.gather(*running)] == prompts
                    assert [each.text for each in await asyncio.gather(*later)] == prompts


@pytest.mark.broker
@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
async def test_broker_that_does_not_come_back(fault: signal.Signals) -> None:
    """The broker dies or freezes: closing the client does not hang, nor who waits; a new client says so at once."""
    async with EmbeddedBroker() as broker:
        connection = KafkaConnection(bootstrap=broker.bootstrap)
        async with Responder(connection, "t.").running():
            client = _client(connection, "t.")
            await client.__aenter__()
            await client.complete(prompt="x")
        os.kill(broker.pid, fault)
        with pytest.raises(RequestTimeout):
            await client.complete(prompt="x", timeout=0.3)
        waiting = [asyncio.create_task(client.complete(prompt="x")) for _ in range(3)]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(15):
            await client.__aexit__()
            results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [StreamClosed] * 3
    with pytest.raises(BrokerUnavailable):
        await Client(connection=connection).__aenter__()


@pytest.mark.kafka
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # the cluster's own log file
async def test_on_apache_kafka(kafka: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The same client on Apache Kafka: idempotent, hundreds of streams, cancels, and no reply topic left."""
    connection = KafkaConnection(bootstrap=kafka.bootstrap)
    prefix = f"t{uuid.uuid4().hex[:8]}."
    async with TopicAdmin(connection) as admin:
        others = set(await admin.list())  # of other tests on this broker
    async with Responder(connection, prefix).running() as responder, _client(connection, prefix) as client:
        prompts = [f"prompt {number}" for number in range(200)]
        completions = await asyncio.gather(*(client.complete(prompt=prompt, timeout=60) for prompt in prompts))
        assert [completion.text for completion in completions] == prompts
        assert client._exchange._producer._txn_manager is not None  # type: ignore[union-attr]
        responder.script = dripping
        async with client.stream(prompt="a long answer") as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    break
        await asyncio.sleep(1.5)
        assert responder.cancels == [responder.replies[-1].headers["correlation_id"]]
    async with TopicAdmin(connection) as admin:
        async with asyncio.timeout(10):
            while any(name.startswith("replies.") for name in set(await admin.list()) - others):
                await asyncio.sleep(0.1)  # a broker hears of deletions after the controller has answered


@pytest.mark.kafka
async def test_t20_somebody_else_deletes_the_reply_topic(kafka: Any) -> None:
    """Who waits without a time-out hears of it in seconds, before and after the first tokens; others are served on."""
    connection = KafkaConnection(bootstrap=kafka.bootstrap)
    prefix = f"t{uuid.uuid4().hex[:8]}."

    async def beginning(reply: Reply) -> None:
        if reply.fields["prompt"] == "begun":
            await reply.tokens(await reply.begin(), 0, [1])
        reply.forget()

    async with Responder(connection, prefix).running() as responder, _client(connection, prefix) as client:
        responder.script = beginning
        streams = [client.stream(prompt=prompt) for prompt in ("begun", "not begun")]
        waiting = [asyncio.create_task(stream.completion()) for stream in streams]
        async with asyncio.timeout(60), TopicAdmin(connection) as admin:
            while len(responder.replies) < 2 or not streams[0].token_ids:
                await asyncio.sleep(0.05)
            await admin.delete([f"replies.{stream.correlation_id}" for stream in streams])
            failures = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(failure) for failure in failures] == [ReplyTopicDeleted] * 2
            responder.script = dripping
            assert (await client.complete(prompt="still here")).text == "still here"


@pytest.mark.kafka
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # the cluster's own log file
async def test_restart_of_apache_kafka(kafka: Any) -> None:
    """The broker is away for 5 s: streams go on, and the next requests are answered."""
    connection = KafkaConnection(bootstrap=kafka.bootstrap)
    prefix = f"t{uuid.uuid4().hex[:8]}."
    async with Responder(connection, prefix).running() as responder, _client(connection, prefix) as client:
        responder.script = dripping
        await client.complete(prompt="warm up")
        prompts = [f"{number} and then a lot more text" for number in range(20)]
        running = [asyncio.create_task(client.complete(prompt=prompt)) for prompt in prompts]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(kafka.nodes[0].stop)
        later = [asyncio.create_task(client.complete(prompt=prompt)) for prompt in prompts]
        await asyncio.sleep(5)
        kafka.nodes[0].start(wait=False)  # here: a thread that starts it takes it along
        async with asyncio.timeout(60):
            assert [each.text for each in await asyncio.gather(*running)] == prompts
            assert [each.text for each in await asyncio.gather(*later)] == prompts
