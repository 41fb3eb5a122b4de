"""The worker's side task that clears up after callers; what `carousel reap` deletes is tested with the command."""

import asyncio
import os
import sys

import pytest

from schemas.connection import KafkaConnection
from worker.reaper import Reaper

LIMIT_S = 30


async def reap_until(reaper: Reaper, done: asyncio.Event) -> None:
    async with asyncio.timeout(LIMIT_S):
        running = asyncio.create_task(reaper.run())
        await done.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_only_the_holder_of_the_lease_reaps(monkeypatch: pytest.MonkeyPatch):
    """Asked at every interval, since a re-balance may give the lease to another worker."""
    leases, reaped, done = [False, True, False, True], [], asyncio.Event()

    def has_lease() -> bool:
        if not leases:
            done.set()
        return leases.pop(0) if leases else False

    async def reap(self: Reaper) -> None:
        reaped.append(len(leases))
        if len(reaped) == 1:
            raise RuntimeError("the broker is away")  # the next interval tries again

    monkeypatch.setattr(Reaper, "_reap", reap)
    await reap_until(Reaper(KafkaConnection(), "replies.", "prompts.", 0.001, has_lease), done)
    assert reaped == [2, 0]


async def test_it_runs_the_command_with_the_workers_connection(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """The age and the prefixes as arguments, the connection in the environment, where nobody else sees it."""
    connection = KafkaConnection(
        bootstrap="a:1", security_protocol="SASL_PLAINTEXT", sasl_username="me", sasl_password="secret"
    )
    done = asyncio.Event()
    reaper = Reaper(connection, "r.", "p.", 0.01, lambda: not done.is_set())
    assert reaper._command[1:] == [
        *("-m", "service", "reap", "--older-than", "0.010s", "--yes", "--json"),
        *("--reply-prefix", "r.", "--lane-prefix", "p."),
    ]
    seen = tmp_path / "seen"
    script = (
        "import os, sys; open(sys.argv[1], 'w').write(os.environ['CAROUSEL_BOOTSTRAP'] + "
        "os.environ['CAROUSEL_SASL_PASSWORD']); print('{\"ended\": {}, \"kept\": {}}')"
    )
    monkeypatch.setattr(reaper, "_command", [sys.executable, "-c", script, os.fspath(seen)])

    async def look() -> None:
        while not seen.exists() or not seen.read_text():
            await asyncio.sleep(0.01)
        done.set()

    looking = asyncio.create_task(look())
    await reap_until(reaper, done)
    await looking
    assert seen.read_text() == "a:1secret"
