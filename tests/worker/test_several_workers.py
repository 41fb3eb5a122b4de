"""Several workers behind one console, or in one `carousel top`: each is named, one is chosen, none are mixed."""

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.error
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from schemas import snapshot
from schemas.snapshot import NoSnapshot, Pool, Snapshot, WorkerAddress
from service.cli import app
from service.cli.keys import moved
from service.cli.top import DEFAULT_WORKER, _screen, _urls, _Watched, urls_of
from tests.worker.showing import Showing, Viewer
from tests.worker.test_live import get
from worker import live
from worker.console import GLANCE_S, console_routes
from worker.health import Health
from worker.health_server import serving_health

ANSI = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")


def url_of(show: Showing) -> str:
    return f"http://127.0.0.1:{show.port}"


@contextlib.contextmanager
def console_of(*urls: str) -> Iterator[int]:
    with serving_health(Health(30.0), "127.0.0.1", 0, console_routes(urls)) as port:
        yield port


def shot(worker: str, number: int = 1) -> bytes:
    pool = Pool(16, "0")
    return Snapshot(number, worker, "tiny", 1.0, (), 0.0, 1, 0, 0, (), (), (), (), (), pool, pool).encode()


async def test_a_console_of_two():
    """Snapshots and events are those of the worker that was asked for; all are told by name, also when one is away."""
    async with Showing(seats=4, blocks=64, name="right").running() as right, contextlib.AsyncExitStack() as leaving:
        left = await leaving.enter_async_context(Showing(seats=2, blocks=64, name="left").running())
        with console_of(url_of(left), url_of(right)) as port:
            asked = {None: "left", 0: "left", 1: "right"}
            for number, name in asked.items():
                query = "" if number is None else f"?worker={number}"
                assert json.loads(await asyncio.to_thread(get, port, f"/snapshot{query}"))["worker"] == name
            viewer = await asyncio.to_thread(Viewer, port, 1)
            for number in ("2", "-1", "01", "x"):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    await asyncio.to_thread(get, port, f"/snapshot?worker={number}")
            told = json.loads(await asyncio.to_thread(get, port, "/workers"))
            assert [(each["url"], each["name"], each["model"]) for each in told] == [
                (url_of(left), "left", "tiny"),
                (url_of(right), "right", "tiny"),
            ]
            assert [(each["here"], each["ready"], each["words"]) for each in told] == [
                (True, True, "0 of 2 seats"),
                (True, True, "0 of 4 seats"),
            ]
            gone = url_of(left)
            await leaving.aclose()
            await asyncio.sleep(GLANCE_S)
            told = json.loads(await asyncio.to_thread(get, port, "/workers"))
            assert [(each["name"], each["here"], each["ready"]) for each in told] == [
                ("left", False, False),
                ("right", True, True),
            ]
            assert told[0]["words"].startswith(f"no worker answers at {gone}: nobody listens there")
        assert {each.worker for _, each in viewer.seen} == {"right"}


async def test_a_page_of_one_worker_tells_of_no_others():
    """Neither a worker's own page nor a console of one lists workers, and nobody is asked for that."""
    async with Showing(seats=4, blocks=64).running() as show:
        with console_of(url_of(show)) as port:
            for each in (show.port, port):
                assert await asyncio.to_thread(get, each, "/workers") == b"[]"
        assert show.snapshots.num_taken == 0


async def test_viewers_of_all_workers_have_one_bound(monkeypatch: pytest.MonkeyPatch):
    """A console's places are for all that look on, whichever worker they chose."""
    monkeypatch.setattr(live, "MAX_VIEWERS", 2)
    with console_of("http://127.0.0.1:1", "http://127.0.0.1:2") as port:
        viewers = [await asyncio.to_thread(Viewer, port, number) for number in (0, 1)]
        with pytest.raises(urllib.error.HTTPError, match="503"):
            await asyncio.to_thread(get, port, "/events?worker=1")
    for viewer in viewers:
        await asyncio.to_thread(viewer.join)


def test_workers_behind_one_address_are_not_mixed(monkeypatch: pytest.MonkeyPatch):
    """A balancer, or a name with several addresses: a sentence, instead of figures that are those of none. A worker
    that takes another one's place is another worker, and no mixture; nor is one that has begun anew under its name."""
    answers: list[bytes] = []
    clock = iter(range(1000))
    monkeypatch.setattr(snapshot, "fetch_snapshot", lambda url: answers.pop(0))
    monkeypatch.setattr(snapshot.time, "monotonic", lambda: float(next(clock)))
    address = WorkerAddress("http://workers:9100")
    for data in (shot("a"), shot("a", 2), shot("b"), shot("b", 2), shot("b", 1), shot("c")):
        answers[:] = [data]
        assert address.fetch() == data
    for name in ("b", "b", "c"):
        answers[:] = [shot(name)]
        with pytest.raises(NoSnapshot, match=r"several workers answer at http://workers:9100 in turns \(a, b, c\)"):
            address.fetch()
    for _ in range(70):  # the others have left the balancer
        next(clock)
    answers[:] = [shot("c")]
    assert address.fetch() == shot("c")
    answers[:] = [b"[]"]
    assert address.fetch() == b"[]", "its reader says what is wrong with it"


@pytest.mark.parametrize(
    ("chosen", "typed", "expected"),
    [
        (0, "\x1b[C", 1), (2, "\x1b[C", 0), (0, "\x1b[D", 2), (1, "\x1bOA", 0), (1, "\x1b[B", 2), (2, "\t", 0),
        (0, "3", 2), (0, "4", 0), (1, "0", 1), (0, "q\x1b[C\x1b[C", 2), (1, "", 1), (0, "\x1b", 0), (0, "32", 1),
    ],
)  # fmt: skip
def test_keys(chosen: int, typed: str, expected: int):
    """Of three: arrows and tab go round, numbers name one, everything else is nothing."""
    assert moved(chosen, typed, 3) == expected


def test_addresses():
    """Each once, in their order, without a slash at the end; the default when there is none."""
    assert urls_of(None) == urls_of([]) == [DEFAULT_WORKER]
    assert urls_of(["http://b/", "http://a", "http://b"]) == ["http://b", "http://a"]


@pytest.mark.parametrize("command", ["top", "console"])
@pytest.mark.parametrize(
    "url",
    [
        *("localhost", "http://", "http://[::1", "http://b\u00fccher.example:9100", "http://h:99999", "http://h:0"),
        *(
            "http://h:x",
            "http://a..b:1",
            f"http://{'a' * 64}:1",
            "http://a b:1",
            "http://h\n:1",
            "http://h:1/?worker=1",
        ),
    ],
)
def test_an_address_that_is_none(command: str, url: str):
    """A sentence before anything starts."""
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, [command, "--worker", url])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "An address such as" in result.stderr


@pytest.mark.parametrize("url", ["http://[::1]:9100", "https://w-1.example", "http://127.0.0.1:65535/", "http://a_b:1"])
def test_an_address_that_is_one(url: str):
    assert _urls([url]) == [url]


def test_two_addresses_of_one_name(monkeypatch: pytest.MonkeyPatch):
    """Names that are the same are told apart by their addresses."""
    monkeypatch.setattr(WorkerAddress, "fetch", lambda self: shot("other" if self.url == "http://c" else "same"))
    looked = threading.Semaphore(0)
    workers = [_Watched(url, 60.0, looked.release) for url in ("http://a", "http://b", "http://c")]
    for _ in workers:
        assert looked.acquire(timeout=10)
    lines = [str(line) for line in _screen(workers, 0, 1).renderables[1:4]]
    assert lines == ["▶ 1 same (http://a): ready", "  2 same (http://b): ready", "  3 other: ready"]


async def test_top_prints_all():
    """--once and --json: each worker under its name, one after another; where one is away, a sentence and status 1."""
    async with (
        Showing(seats=2, blocks=64, name="left").running() as left,
        Showing(seats=4, blocks=64, name="right").running() as right,
    ):
        runner = CliRunner(env={"COLUMNS": "140", "CAROUSEL_WORKER_URL": f"{url_of(left)} {url_of(right)}"})
        result = await asyncio.to_thread(runner.invoke, app, ["top", "--once"])
        assert (result.exit_code, re.findall("(left|right) serves tiny: ready", result.output)) == (
            0,
            ["left", "right"],
        )
        result = await asyncio.to_thread(runner.invoke, app, ["top", "--json"])
        assert [json.loads(line)["worker"] for line in result.output.splitlines()] == ["left", "right"]
        words = ["top", "--once", "--worker", "http://127.0.0.1:1", "--worker", url_of(right)]
        result = await asyncio.to_thread(runner.invoke, app, words)
        assert (result.exit_code, "right serves tiny: ready" in result.stdout) == (1, True)
        assert result.stderr.startswith("carousel top: no worker answers at http://127.0.0.1:1: nobody listens there")


class Terminal:
    """`carousel top` in a terminal of 120 columns; `until` waits for what is on its screen."""

    def __init__(self, *urls: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 120, 0, 0))
        words = [word for url in urls for word in ("--worker", url)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service", "top", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=os.environ | {"TERM": "xterm"},
            preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),  # Ctrl-C comes from a terminal
        )
        os.close(slave)
        self._shown = b""

    @property
    def is_as_it_was(self) -> bool:
        """Whole lines are read from it, and what is typed shows."""
        both = termios.ICANON | termios.ECHO
        return termios.tcgetattr(self._master)[3] & both == both

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def until(self, pattern: str) -> None:
        """It is on the last whole screen."""
        end = time.monotonic() + 60
        while not re.search(pattern, self._screen(), re.DOTALL):
            assert time.monotonic() < end, f"{pattern} never came: {self._screen()}"
            with contextlib.suppress(OSError):  # it has ended
                self._shown = (self._shown + os.read(self._master, 1 << 16))[-200_000:]

    def _screen(self) -> str:
        screens = self._shown.split(b"\x1b[H")
        return ANSI.sub(b"", screens[-2] if len(screens) > 1 else b"").decode(errors="replace")

    def end(self) -> tuple[int, bool]:
        """Ctrl-C. Its exit status, and whether the terminal is as it was."""
        self.type("\x03")
        status, restored = self.process.wait(20), self.is_as_it_was
        os.close(self._master)
        return status, restored


async def test_top_of_two_workers():
    """The chosen one is shown under the names of all, arrow keys and numbers choose, and one that goes is away; Ctrl-C
    ends it, and the terminal is as it was."""
    async with Showing(seats=4, blocks=64, name="right").running() as right, contextlib.AsyncExitStack() as leaving:
        left = await leaving.enter_async_context(Showing(seats=2, blocks=64, name="left").running())
        terminal = await asyncio.to_thread(Terminal, url_of(left), url_of(right))

        async def until(pattern: str) -> None:
            await asyncio.to_thread(terminal.until, pattern)

        try:
            await until(r"▶ 1 left: ready.*  2 right: ready.*left serves tiny: ready.*seats 0/2")
            terminal.type("\x1b[C")
            await until(r"  1 left: ready.*▶ 2 right: ready.*right serves tiny: ready.*seats 0/4")
            await leaving.aclose()
            await until(r"  1 left: away.*▶ 2 right: ready.*right serves tiny: ready.*seats 0/4")
            terminal.type("1")
            await until(r"▶ 1 left: away.*  2 right: ready.*no worker answers at http://127")
            assert not terminal.is_as_it_was, "keys come one by one"
        finally:
            ended = await asyncio.to_thread(terminal.end)
        assert ended == (128 + signal.SIGINT, True)
