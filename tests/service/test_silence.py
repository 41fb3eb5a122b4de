"""What `carousel submit` says while nothing comes."""

import asyncio
import sys
from collections.abc import Iterator

import pytest

from bench.beside import free_port
from schemas.connection import KafkaConnection
from service.cli.submit import _Silence

submit = sys.modules[_Silence.__module__]  # the package has a function of that name
AWAY = "nobody listens there"


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(submit, "_SILENCE_S", 0.02)


async def _asked(monkeypatch: pytest.MonkeyPatch, silence: _Silence, causes: list[str | None]) -> None:
    """Explains until Kafka has been asked that often."""
    left: Iterator[str | None] = iter(causes)
    done = asyncio.Event()

    async def whats_wrong(_: KafkaConnection) -> str | None:
        try:
            return next(left)
        except StopIteration:
            done.set()
            await asyncio.Event().wait()
            raise

    monkeypatch.setattr(submit, "whats_wrong", whats_wrong)
    task = asyncio.create_task(silence.explain())
    async with asyncio.timeout(10):
        await done.wait()
    task.cancel()


@pytest.mark.usefixtures("short_times")
async def test_a_kafka_that_goes_and_comes_back_is_told_once_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silence = _Silence(KafkaConnection(bootstrap="k:1"), "batch")
    silence.ends()
    await _asked(monkeypatch, silence, [None, AWAY, AWAY, None, None])
    assert capsys.readouterr().err.splitlines() == [
        f"[Kafka at k:1: {AWAY}. The answer goes on when it is back; Ctrl-C gives up]",
        "[Kafka at k:1 answers again]",
    ]


@pytest.mark.usefixtures("short_times")
async def test_who_is_answered_is_asked_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "_SILENCE_S", 0.5)
    silence = _Silence(KafkaConnection(bootstrap=f"127.0.0.1:{free_port()}"), "batch")
    silence.ends()
    task = asyncio.create_task(silence.explain())
    for _ in range(12):
        await asyncio.sleep(0.1)
        silence.ends()
    assert not task.done()
    assert capsys.readouterr().err == ""
    async with asyncio.timeout(10):
        while AWAY not in (said := capsys.readouterr().err):
            await asyncio.sleep(0.05)
    assert "carousel broker --listen" in said  # what to do, where that would do
    task.cancel()
