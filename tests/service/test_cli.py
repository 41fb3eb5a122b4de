"""The command line, as a program."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import typer
from typer.testing import CliRunner

from schemas.connection import KafkaConnection
from schemas.reasons import ErrorCode, FinishReason
from schemas.records import End, ErrorInfo
from service.broker import EmbeddedBroker
from service.cli import app
from service.cli.submit import _what_ends
from service.topics import create_topics
from tests.service.responder import Reply, Responder
from worker.cli import command as worker_command

PROGRAM = [sys.executable, "-m", "service"]


@asynccontextmanager
async def _program(*arguments: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _run(*arguments: str, **environment: str) -> tuple[int | None, str, str]:
    async with _program(*arguments, **environment) as process, asyncio.timeout(30):
        stdout, stderr = await process.communicate()
        return process.returncode, stdout.decode(), stderr.decode()


def _submit(responder: Responder, *arguments: str) -> list[str]:
    bootstrap = responder.connection.bootstrap
    return ["submit", *arguments, "--bootstrap", bootstrap, "--lane-prefix", responder.lane_prefix]


@pytest.fixture(autouse=True)
def _logging_restored() -> Iterator[None]:
    """Commands that run in this process set up logging for all of it."""
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    client_log = logging.getLogger("aiokafka")
    client_log.propagate = True
    client_log.handlers.clear()


def test_help_lists_every_command() -> None:
    """The help names the commands, the worker too."""
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in ("demo", "broker", "topics", "worker", "submit", "cancel", "status", "dlq", "reap", "simulate"):
        assert re.search(rf"\b{name}\b", result.output)


def _commands(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{name}{word} ")
        elif word != "worker":  # hands everything to a command of its own
            yield name + word, command


COMMANDS = dict(_commands(typer.main.get_command(app))) | {"worker": typer.main.get_command(worker_command)}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_option_in_full(name: str) -> None:
    """On a narrow terminal, too; nothing is wider than that, but a name or a choice that is."""
    result = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0
    options = [option for option in COMMANDS[name].params if option.param_type_name == "option"]
    assert options
    for option in options:
        for word in (*option.opts, *option.secondary_opts):
            assert re.search(rf"(?<![\w-]){word}(?![\w…-])", result.output), word
    lines = result.output.splitlines()
    assert [line for line in lines if len(line) > 80 and not re.fullmatch(r"  --\S+( / --\S+| <\S+>)?", line)] == []


def test_version() -> None:
    """`--version` prints the distribution's version."""
    result = CliRunner().invoke(app, ["--version"])
    assert re.fullmatch(r"carousel \d+\.\d+\.\d+\S*\n", result.output)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--bootstrap", "nonsense"], "host:port"),
        (["--bootstrap", "x:1", "--sasl-username", "me"], "security_protocol"),
        (["--system", "be brief"], "--chat"),
    ],
)
def test_options_that_cannot_be(arguments: list[str], sentence: str) -> None:
    """Connection options that do not fit together are a usage error that says what to do."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["submit", "x", *arguments])
    assert result.exit_code == 2
    assert sentence in result.output


@pytest.mark.parametrize("command", [["submit", "x"], ["topics", "create"]])
def test_no_broker_is_one_sentence(command: list[str]) -> None:
    """A Kafka that cannot be reached costs one line on stderr and the exit status 1."""
    result = CliRunner().invoke(app, [*command, "--bootstrap", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.stderr.startswith("carousel: no Kafka at 127.0.0.1:1: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.broker
async def test_broker_and_topics() -> None:
    """`broker` prints `ready HOST:PORT` and its limits and stops on SIGTERM; `topics create` can be repeated."""
    async with _program("broker", "--listen", "127.0.0.1:0") as process:
        assert process.stdout is not None
        ready = (await process.stdout.readline()).decode()
        address = re.fullmatch(r"ready (127\.0\.0\.1:\d+)\n", ready)
        assert address
        bootstrap = address[1]
        status, stdout, _ = await _run("topics", "create", "--partitions", "2", CAROUSEL_BOOTSTRAP=bootstrap)
        assert (status, stdout.split()[:2]) == (0, ["created", "prompts.interactive"])
        status, stdout, _ = await _run("topics", "create", "--bootstrap", bootstrap)
        assert (status, stdout.count("exists")) == (0, 6)
        status, _, stderr = await _run("broker", "--listen", bootstrap)
        assert (status, stderr) == (1, f"carousel: {bootstrap} is taken by another program\n")
        process.send_signal(signal.SIGTERM)
        _, stderr_bytes = await process.communicate()
        assert process.returncode == 0
        assert b"nothing after it stops" in stderr_bytes


@pytest.mark.broker
async def test_submit(responder: Responder) -> None:
    """The answer is streamed to stdout as text, or as one JSON line per event."""
    status, stdout, _ = await _run(*_submit(responder, "hello", "--max-tokens", "7", "--temperature", "0"))
    assert (status, stdout) == (0, "hello\n")
    assert responder.replies[0].fields == {"prompt": "hello", "max_tokens": 7, "temperature": 0.0}
    status, stdout, _ = await _run(*_submit(responder, "hi", "--json", "--tier", "batch"))
    events = [json.loads(line) for line in stdout.splitlines()]
    assert [event["event"] for event in events if event["event"] != "tokens"] == ["begin", "end"]
    assert "".join(event.get("text", "") for event in events) == "hi"
    assert responder.replies[1].input.topic.endswith("batch")
    status, _, stderr = await _run(*_submit(responder, "", "--allow-empty"))
    assert (status, stderr) == (0, "(no text: finish_reason stop)\n")
    assert responder.replies[2].fields == {"prompt": ""}


@pytest.mark.broker
async def test_submit_while_no_worker_runs(responder: Responder) -> None:
    """After some seconds stderr says that nobody has begun; then Ctrl-C ends it as ever."""

    async def silent(reply: Reply) -> None:
        reply.forget()

    responder.script = silent
    async with _program(*_submit(responder, "hello", "--tier", "batch")) as process, asyncio.timeout(60):
        assert process.stderr is not None
        while b"no worker has begun it yet: is one running for the lane batch?" not in await process.stderr.readline():
            assert process.returncode is None
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130


@pytest.mark.broker
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["submit", b"\xff\xfe"], r"carousel: this argument is not UTF-8: '\\udcff\\udcfe'"),
        (["submit", "x", "--tenant", b"a\xff"], r"carousel: this argument is not UTF-8: 'a\\udcff'"),
        (["submit", ""], "it is empty, .* --allow-empty"),
        (["submit", " \n", "--chat"], "it is empty, .* --allow-empty"),
        (["submit", "-"], "standard input is not UTF-8: invalid start byte at byte 2"),
        (["submit", "x", "--tier", ""], "carousel: '' cannot name a tier"),
        (["submit", "x", "--tier", "a/b"], "carousel: 'a/b' cannot name a tier"),
        (["submit", "x", "--deadline", "inf"], "carousel: deadline must be a number of seconds, not inf"),
        (["submit", "x", "--timeout", "inf"], "carousel: timeout must be a number of seconds, not inf"),
        (["topics", "create", "--tier", ""], "carousel: '' cannot name a tier"),
        (["cancel", ""], "an id is empty"),
    ],
    ids=str,
)
def test_odd_arguments(broker: EmbeddedBroker, arguments: list[str | bytes], sentence: str) -> None:
    """Each is a sentence on stderr, and no traceback."""
    words = [*PROGRAM, *arguments, "--bootstrap", broker.bootstrap]
    environment = os.environ | {"COLUMNS": "120"}
    done = subprocess.run(words, input=b"ab\xff", capture_output=True, check=False, timeout=100, env=environment)
    stderr = done.stderr.decode()
    assert done.returncode in (1, 2)
    assert re.search(sentence, stderr), stderr
    assert "Traceback" not in stderr


@pytest.mark.kafka
async def test_a_prompt_beyond_what_the_lane_takes(kafka: Any) -> None:
    """3 MB through standard input: a sentence that says how large it is and what bounds it."""
    connection = KafkaConnection(bootstrap=kafka.bootstrap)
    await create_topics(connection, lane_prefix="large.", partitions=1)
    words = [*PROGRAM, "submit", "-", "--bootstrap", kafka.bootstrap, "--lane-prefix", "large."]
    done = await asyncio.to_thread(
        subprocess.run, words, input=b"x" * 3_000_000, capture_output=True, check=False, timeout=100
    )
    stderr = done.stderr.decode()
    assert done.returncode == 1
    assert re.fullmatch(
        r"carousel: the request has 3,000,\d+ bytes, more than large.standard takes \(its max.message.bytes\)\n", stderr
    )


@pytest.mark.broker
async def test_submit_chat(responder: Responder) -> None:
    """With --chat the prompt is a user's message, after the system's."""

    async def end(reply: Reply) -> None:
        await reply.end(await reply.begin())

    responder.script = end
    await _run(*_submit(responder, "hello", "--chat", "--system", "be brief", "--stop", "a", "--stop", "b"))
    assert responder.replies[0].fields == {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        "stop": ["a", "b"],
    }


@pytest.mark.broker
async def test_submit_fails_with_a_sentence(responder: Responder) -> None:
    """An answer that is an error, and a request that is wrong, give status 1 and the sentence."""

    async def refuse(reply: Reply) -> None:
        await reply.write(End(-1, FinishReason.ERROR, ErrorInfo(ErrorCode.MODEL_NOT_FOUND, "no such model")))

    responder.script = refuse
    status, _, stderr = await _run(*_submit(responder, "x"))
    assert status == 1
    assert stderr.endswith("carousel: model_not_found: no such model\n")
    status, _, stderr = await _run(*_submit(responder, "x", "--top-p", "3"))
    assert status == 1
    assert "top_p" in stderr
    assert "Traceback" not in stderr


@pytest.mark.broker
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signal_cancels_submit(responder: Responder, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM cancel the request and end the program without a traceback."""

    async def until_cancelled(reply: Reply) -> None:
        await reply.tokens(await reply.begin(), 0, [65])
        await reply.cancelled.wait()
        reply.forget()

    responder.script = until_cancelled
    async with _program(*_submit(responder, "x")) as process, asyncio.timeout(20):
        assert process.stdout is not None
        assert await process.stdout.read(1) == b"A"
        process.send_signal(number)
        _, stderr = await process.communicate()
        assert process.returncode == 128 + number
        assert b"Traceback" not in stderr
        while not responder.cancels:
            await asyncio.sleep(0.01)
        assert stderr == b"\n[cancelling the request " + responder.cancels[0] + b"]\n"


@pytest.mark.broker
async def test_a_time_out_says_that_the_request_is_cancelled(responder: Responder) -> None:
    """As Ctrl-C does; and it is."""

    async def silent(reply: Reply) -> None:
        reply.forget()

    responder.script = silent
    status, _, stderr = await _run(*_submit(responder, "x", "--timeout", "1"))
    assert (status, stderr) == (1, "carousel: no event for 1 s: the request has been left, and is cancelled\n")
    async with asyncio.timeout(10):
        while not responder.cancels:
            await asyncio.sleep(0.01)


@pytest.mark.broker
@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
async def test_an_answer_that_is_not_whole(responder: Responder, reason: FinishReason) -> None:
    """Ended by somebody else, or by the clock: what came is on stdout, why it ends on stderr, and the status is 1."""

    async def cut_short(reply: Reply) -> None:
        attempt = await reply.begin()
        await reply.tokens(attempt, 0, [ord("o"), ord("k")])
        await reply.end(attempt, 2, reason)

    responder.script = cut_short
    status, stdout, stderr = await _run(*_submit(responder, "x"))
    assert (status, stdout, stderr) == (1, "ok\n", f"[the answer is not whole: {reason}]\n")


def test_a_signal_before_the_request_is_published() -> None:
    """Nothing was sent, and nothing is to be cancelled."""
    stream = SimpleNamespace(correlation_id=None)
    assert _what_ends(stream) == "stopped before the request was published"  # type: ignore[arg-type]


@pytest.mark.broker
async def test_worker_is_handed_its_arguments(broker: EmbeddedBroker) -> None:
    """`carousel worker` is the worker's own command, its --help and its errors included."""
    status, stdout, _ = await _run("worker", "--help")
    assert status == 0
    assert "--max-num-seqs" in stdout
    status, _, stderr = await _run("worker", "--bootstrap", broker.bootstrap)
    assert status != 0
    assert "model" in stderr
