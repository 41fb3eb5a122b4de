"""The supervisor with stand-ins for the worker: small scripts that report, wait, end and die."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from worker.supervised import VARIABLE
from worker.supervisor import Restarts, Settings, Supervisor

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60  # for a busy machine; nothing here takes a second

STAND_IN = """
import json, os, signal, socket, sys, time
pid, fd, _ = map(int, os.environ["CAROUSEL_SUPERVISOR_LINK"].split(":"))
link = socket.socket(fileno=fd)
def report(**facts): link.send(json.dumps(facts).encode() + b"\\n")
def wait_for(*numbers): return signal.sigwait(numbers)
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
print("pid", os.getpid(), flush=True)
"""


def stand_in(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", STAND_IN + code]


class World:
    """A supervisor in this process, what it said and whom it took out of which group."""

    def __init__(self, code: str, *, kill_after: float = LIMIT_S, restarts: Restarts | None = None) -> None:
        self.said: list[tuple[str, dict]] = []
        self.left: list[dict[str, str]] = []
        self.event = asyncio.Event()  # something was said
        quick = restarts or Restarts(first=0.0)
        self.supervisor = Supervisor(stand_in(code), self._leave, self._say, kill_after=kill_after, restarts=quick)

    async def run(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            return await self.supervisor.run()

    async def _leave(self, members: Mapping[str, str]) -> Mapping[str, str]:
        self.left.append(dict(members))
        return {}

    def _say(self, event: str, **facts: object) -> None:
        self.said.append((event, facts))
        self.event.set()

    def num_said(self, event: str) -> int:
        return sum(each == event for each, _ in self.said)


async def test_the_exit_status_is_the_workers():
    """A worker that ends in order is not started again."""
    world = World("sys.exit(0)")
    assert await world.run() == 0
    assert world.said == []
    assert world.left == []


async def test_a_dead_worker_leaves_its_groups_and_comes_back(tmp_path: Path):
    """kill -9: LeaveGroup with the last member id of each group, then a new worker, whose end is the end."""
    mark = tmp_path / "lived"
    world = World(f"""
if os.path.exists({str(mark)!r}): sys.exit(0)
open({str(mark)!r}, "w").close()
report(group="a", member="old"); report(group="b", member="b1"); report(ready=True); report(group="a", member="a2")
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert await world.run() == 0
    assert world.left == [{"a": "a2", "b": "b1"}]
    assert world.num_said("supervisor.restarting") == 1
    restarting = dict(world.said)["supervisor.restarting"]
    assert "SIGKILL" in restarting["how"]


async def test_a_crash_loop_gives_up_with_a_last_word(capfd: pytest.CaptureFixture):
    """Five deaths without `ready`: a sentence that says so, and the worker's own exit status."""
    world = World("sys.exit(7)")
    assert await world.run() == 7
    assert world.num_said("supervisor.restarting") == 4
    out, err = capfd.readouterr()
    assert out.count("pid") == 5
    assert err.startswith("carousel worker: gave up.")
    assert "with status 7" in err


async def test_a_worker_that_refuses_is_not_tried_again():
    """A wrong configuration does not get better by repetition: the status passes through at once."""
    world = World("report(refused=True); sys.exit(1)")
    assert await world.run() == 1
    assert world.said == []


async def test_after_it_was_ready_a_refusal_is_a_death(tmp_path: Path):
    """Kafka may be away when the worker is started again: that passes."""
    lives = tmp_path / "lives"
    world = World(f"""
with open({str(lives)!r}, "a+") as f: f.write("x"); f.seek(0); life = len(f.read())
if life == 1: report(ready=True); sys.exit(1)
if life == 2: report(refused=True); sys.exit(1)
sys.exit(0)
""")
    assert await world.run() == 0
    assert lives.read_text() == "xxx"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_are_passed_on(number: signal.Signals):
    """The worker gets the signal once, and its status is ours."""
    world = World(f"""
os.kill(pid, {int(number)})
received = wait_for(signal.SIGTERM, signal.SIGINT)
again = signal.sigtimedwait((signal.SIGTERM, signal.SIGINT), 0.2)
sys.exit(40 if received == {int(number)} and again is None else 41)
""")
    assert await world.run() == 40
    assert world.num_said("supervisor.restarting") == 0


async def test_a_worker_that_dies_while_it_drains_leaves_its_groups():
    """It is not started again, and the status names the signal."""
    world = World("""
report(group="a", member="a1")
os.kill(pid, signal.SIGTERM)
wait_for(signal.SIGTERM)
os.kill(os.getpid(), signal.SIGKILL)
""")
    assert await world.run() == 128 + signal.SIGKILL
    assert world.left == [{"a": "a1"}]


async def test_a_second_signal_is_passed_on_too():
    """The worker decides what a second one means."""
    world = World("""
for _ in range(2):
    os.kill(pid, signal.SIGTERM)
    wait_for(signal.SIGTERM)
sys.exit(143)
""")
    assert await world.run() == 143


async def test_a_worker_that_does_not_end_is_killed():
    """After its time to drain, and its members leave."""
    world = World('report(group="a", member="a1"); os.kill(pid, signal.SIGTERM); time.sleep(1000)', kill_after=0.1)
    assert await world.run() == 128 + signal.SIGKILL
    assert world.left == [{"a": "a1"}]


async def test_a_signal_ends_the_pause_between_two_lives():
    """Nobody waits for a worker that will not be started."""
    world = World("report(ready=True); sys.exit(3)", restarts=Restarts(first=1000.0, most=1000.0))
    running = asyncio.create_task(world.run())
    while not world.num_said("supervisor.restarting"):
        await asyncio.wait_for(world.event.wait(), LIMIT_S)
        world.event.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 3


def test_pauses_double_and_a_stable_life_resets_them():
    """0.5, 1, 2, ... s up to the limit; a worker that was ready for a minute starts anew."""
    restarts = Restarts(first=0.5, most=3.0, stable=60.0)
    assert [restarts.died(now, 1.0) for now in range(4)] == [0.5, 1.0, 2.0, 3.0]
    assert restarts.died(100.0, 61.0) == 0.5
    assert restarts.died(101.0, 0.1) == 1.0
    assert {restarts.died(200.0, 0.1) for _ in range(2000)} == {2.0, 3.0}


def test_only_deaths_in_a_row_without_ready_are_a_crash_loop():
    """A life that became ready, and one that is long ago, do not count."""
    restarts = Restarts(max_deaths=3, window=100.0)
    assert restarts.died(0.0, None) is not None
    assert restarts.died(1.0, None) is not None
    assert restarts.died(2.0, 0.5) is not None
    assert restarts.died(3.0, None) is not None
    assert restarts.died(4.0, None) is not None
    assert restarts.died(104.0, None) is not None
    assert restarts.died(104.0, None) is None


@asynccontextmanager
async def supervised(code: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A supervisor in a process of its own, started as `carousel worker` does it, and its child's process id."""
    read, write = os.pipe()
    settings = Settings(kafka={"bootstrap_servers": ["127.0.0.1:1"]}, tls=None, kill_after=60.0, json_lines=True)
    os.write(write, json.dumps(asdict(settings)).encode())
    os.close(write)
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "worker.supervisor", str(read), *stand_in(code)],
        pass_fds=(read,),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    os.close(read)
    try:
        async with asyncio.timeout(LIMIT_S):
            assert process.stdout is not None
            line = await process.stdout.readline()
            yield process, int(line.split()[1])
    finally:
        if process.returncode is None:
            process.terminate()  # which ends the stand-in, too
        async with asyncio.timeout(LIMIT_S):
            await process.communicate()


async def test_it_is_small():
    """Less than 40 MB resident, also after it has tried to reach Kafka; and no torch, no pydantic in it."""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc to read the resident memory from")
    code = """
report(ready=True); report(group="a", member="a1")
print("reported", flush=True)
wait_for(signal.SIGTERM); sys.exit(5)
"""
    async with supervised(code) as (process, child):
        assert process.stdout is not None
        assert process.stderr is not None
        assert await process.stdout.readline() == b"reported\n"
        os.kill(child, signal.SIGKILL)  # no Kafka answers: it must go on all the same
        second = int((await process.stdout.readline()).split()[1])
        said = [json.loads(await process.stderr.readline()) for _ in range(2)]
        assert said[0]["event"] == "supervisor.left_groups"
        assert "a" in said[0]["failures"]
        assert said[1]["event"] == "supervisor.restarting"
        resident = Path(f"/proc/{process.pid}/status").read_text().partition("VmRSS:")[2].split()[0]
        assert int(resident) < 40_000
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "torch" not in maps
        assert "pydantic" not in maps
        threads = Path(f"/proc/{process.pid}/status").read_text().partition("Threads:")[2].split()[0]
        assert threads == "1", "a worker would hear of its death more than once"
        assert await process.stdout.readline() == b"reported\n"
        process.terminate()
        assert await process.wait() == 5
        assert not Path(f"/proc/{second}").exists()


async def test_a_worker_knows_how_often_it_was_started_again():
    """For its metrics: 0, then 1, then 2."""
    code = """
count = int(os.environ["CAROUSEL_SUPERVISOR_LINK"].split(":")[2])
report(ready=True)
sys.exit(0 if count == 2 else 7)
"""
    world = World(code)
    assert await world.run() == 0
    assert [facts["restarts"] for event, facts in world.said if event == "supervisor.restarting"] == [1, 2]


async def test_a_worker_dies_with_its_supervisor():
    """kill -9 of the supervisor: the worker gets a SIGTERM by the kernel, and knows that it is an orphan."""
    if sys.platform != "linux":
        pytest.skip("PR_SET_PDEATHSIG is Linux's")
    worker = f"""
link.detach()
sys.path.insert(0, {str(ROOT)!r})
from worker.supervised import SupervisorLink
link = SupervisorLink.from_environment()
assert not link.orphaned and link.num_restarts == 0 and "{VARIABLE}" not in os.environ
print("linked", flush=True)
wait_for(signal.SIGTERM)
print("orphaned" if link.orphaned else "not orphaned", flush=True)
"""
    async with supervised(worker) as (process, _):
        assert process.stdout is not None
        assert await process.stdout.readline() == b"linked\n"
        process.kill()
        assert await process.stdout.readline() == b"orphaned\n"
