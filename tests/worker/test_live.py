"""The live page's data: what a snapshot says, how often one is made, and what a viewer is told when there is none."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
from starlette.types import Message
from typer.testing import CliRunner

from schemas.reasons import FinishReason
from schemas.records import End, Timing
from schemas.snapshot import COLUMNS, PERIOD_S, NoSnapshot, Pool, Snapshot
from schemas.topics import Tier
from service.cli import app
from service.cli.tables import console
from service.cli.top import picture
from tests.engine.builders import Engine, make_request
from tests.worker.showing import Lane, Showing, Viewer
from tests.worker.test_health import until
from worker import live
from worker.console import RemoteWorker, run_console
from worker.engine.block_pool import BlockState
from worker.health import Health
from worker.health_server import serving_health
from worker.live import MAX_VIEWERS, Feed, live_routes, worker_feed
from worker.snapshots import Snapshots
from worker.transport.kafka_lane import KafkaLane

_NUMBER, _TEXT, _MAYBE = {"type": "number", "minimum": 0}, {"type": "string"}, {"type": ["number", "null"]}


def _rows(*cells: object) -> dict[str, object]:
    row = {"type": "array", "prefixItems": list(cells), "minItems": len(cells), "maxItems": len(cells)}
    return {"type": "array", "items": row}


_POOL = {
    "type": "object",
    "properties": {"block_size": {"const": 16}, "blocks": {"type": "string", "pattern": "^[0-3]*$"}},
    "required": ["block_size", "blocks"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "version": {"const": 1},
        "columns": {"const": {name: list(columns) for name, columns in COLUMNS.items()}},
        "number": _NUMBER,
        "worker": {"const": "w1"},
        "model": {"const": "tiny"},
        "clock_s": _NUMBER,
        "reasons": {"type": "array", "items": _TEXT},
        "loop_lag_ms": _NUMBER,
        "num_seats": _NUMBER,
        "num_swaps": _NUMBER,
        "num_recomputes": _NUMBER,
        "seats": _rows(
            _NUMBER, _TEXT, _NUMBER, _TEXT, _TEXT, {"enum": ["prefill", "decode", "paused", "leaving"]}, *[_NUMBER] * 6
        ),
        "lanes": _rows(_TEXT, _NUMBER, _NUMBER, _MAYBE, _NUMBER, _NUMBER),
        "latencies": _rows(_TEXT, _NUMBER, *[_MAYBE] * 7),
        "steps": _rows(*[_NUMBER] * 9),
        "preempted": _rows(
            _NUMBER,
            _NUMBER,
            _TEXT,
            _NUMBER,
            {"enum": ["seat", "block"]},
            {"enum": ["swap", "recompute"]},
            _NUMBER,
            _TEXT,
        ),
        "device": _POOL,
        "host": _POOL,
        "num_steps": _NUMBER,
        "num_decode_tokens": _NUMBER,
        "num_prefill_tokens": _NUMBER,
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])


def get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
        return bytes(response.read())


async def test_a_snapshot_of_a_full_worker():
    """256 seats and 8,192 blocks under load: the JSON keeps to its schema, and its parts agree with each other."""
    async with Showing().running() as show:
        await show.load(batch=250, interactive=12)
        await show.steps(100)
        data = await asyncio.to_thread(get, show.port, "/snapshot")
        jsonschema.validate(json.loads(data), SCHEMA)
        shot = Snapshot.decode(data)
        assert shot.encode() == data
        assert len({seat.place for seat in shot.seats}) == len(shot.seats) == shot.num_seats == 256
        assert {lane.tier: lane.num_seated for lane in shot.lanes} == {"interactive": 6, "standard": 6, "batch": 244}
        assert sum(lane.num_waiting for lane in shot.lanes) == 6
        assert {lane.num_unread for lane in shot.lanes} == {3}
        assert len(shot.device.blocks) == 8192
        # No two share a block; what is swapped in ahead of a seat is in no seat's table yet.
        assert 0 <= shot.device.count("active") - sum(seat.num_blocks for seat in shot.seats) < 100
        assert shot.num_swaps + shot.num_recomputes >= len(shot.preempted) >= 6
        assert {each.mode for each in shot.preempted} == {"swap"}
        assert [step.step for step in shot.steps] == list(range(shot.steps[0].step, shot.steps[-1].step + 1))
        assert shot.reasons == ()


async def test_three_viewers_cost_one_snapshot_at_a_time():
    """However many look on: at most one snapshot in PERIOD_S, the same for all, and none when nobody looks."""
    async with Showing(seats=8, blocks=64).running() as show:
        await show.load(batch=8, interactive=2)
        await show.steps(10)
        assert show.snapshots.num_taken == 0
        began = time.monotonic()
        looking = await asyncio.to_thread(lambda: [Viewer(show.port) for _ in range(3)])
        async with asyncio.timeout(30):
            while min(len(viewer.seen) for viewer in looking) < 8:
                await asyncio.sleep(0.01)
        seconds = time.monotonic() - began
        assert show.snapshots.num_taken <= seconds / PERIOD_S + 1
        assert seconds >= 7 * PERIOD_S
        numbers = [{shot.number: shot for _, shot in viewer.seen} for viewer in looking]
        for number in numbers[0].keys() & numbers[1].keys() & numbers[2].keys():
            assert numbers[0][number] == numbers[1][number] == numbers[2][number]
    for viewer in looking:  # the server has gone with the block: it did not wait for them, nor they for it
        await asyncio.to_thread(viewer.join)
        assert viewer.ended


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.0021, 0.25, 0.31), (0.004, 0.5, 0.55), (1.0, 1.0, 1.0)])
async def test_snapshots_that_cost_much_are_fewer(
    seconds: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch
):
    """What they take of a core is bounded, but for a page that would stand still."""
    cpu = iter([10.0, 10.0003])
    monkeypatch.setattr(live.time, "thread_time", lambda: next(cpu))
    feed = Feed(lambda: asyncio.sleep(0, (b"{}", seconds)))
    assert await feed.latest() == b"{}"
    assert least <= feed._period <= most
    feed._taken_at = 0.0
    assert await feed.latest() == b"{}"
    assert least < feed._period <= most or least == feed._period == 1.0


async def test_whoever_sits_keeps_the_place():
    """From one snapshot to the next a sequence stays where it is, and a newcomer takes a place that came free."""
    async with Showing(seats=8, blocks=256).running() as show:
        for _ in range(8):
            show.serve(show.request("batch", max_tokens=1900))
        await show.steps(3)
        first = show.snapshots.take()
        show.serve(show.request("interactive", name="guest", max_tokens=50))
        await show.steps(4)
        second = show.snapshots.take()
        assert first is not None
        assert second is not None
        places = [{(seat.request, seat.choice): seat.place for seat in shot.seats} for shot in (first, second)]
        stayed = places[0].keys() & places[1].keys()
        assert len(stayed) == 7
        assert all(places[0][who] == places[1][who] for who in stayed)
        (gone,) = places[0].keys() - stayed
        assert places[1]["guest", 0] == places[0][gone]
        (lost,) = second.preempted
        assert (lost.request, lost.beneficiary, lost.cause, lost.mode) == (gone[0], "guest", "seat", "swap")
        assert second.host.count("active") == -(-lost.num_tokens // 16)


async def test_seats_are_those_that_the_engine_has():
    """A budget of eight tokens a step is enough for seven seats, whatever --max-num-seqs allows."""
    async with Showing(seats=32, blocks=256, budget=8).running() as show:
        for _ in range(10):
            show.serve(show.request("batch", prompt=4, max_tokens=1900))
        await show.steps(20)
        shot = show.snapshots.take()
        assert shot is not None
        assert len(shot.seats) == shot.num_seats == 7


async def test_no_prompt_and_no_answer_is_shown():
    """Nothing of a request's tokens or text is in a snapshot."""
    async with Showing(seats=8, blocks=256).running() as show:
        secret = [987_654_321, 987_654_322, 987_654_323]
        show.serve(make_request("r#1", prompt=secret, max_tokens=50, lane="batch", ignore_eos=True, arrival=0.0))
        await show.steps(3)
        shot = show.snapshots.take()
        assert shot is not None
        assert [seat.request for seat in shot.seats] == ["r"]
        assert b"98765432" not in shot.encode()


async def test_before_the_model_is_loaded():
    """A viewer is told why there is nothing to see, and the first snapshot comes by itself."""
    health = Health(stuck_after=10.0)
    show = Showing(seats=8, blocks=64)
    snapshots = Snapshots("w1", "tiny", {}, health)
    routes = live_routes(worker_feed(snapshots, health, asyncio.get_running_loop()))
    with serving_health(health, "127.0.0.1", 0, routes) as port:
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(get, port, "/snapshot")
        assert refused.value.code == 503
        assert refused.value.read() == b"the model is being loaded"
        refused.value.close()
        viewer = await asyncio.to_thread(Viewer, port)
        async with asyncio.timeout(10):
            while not viewer.away:
                await asyncio.sleep(0.01)
            assert viewer.away == ["the model is being loaded"]
            health.model_loaded(show.engine)
            while not viewer.seen:
                await asyncio.sleep(0.01)
        assert viewer.seen[0][1].reasons == ("no lane is consumed yet",)
    viewer.join()


async def test_a_blocked_event_loop_is_said():
    """Snapshots are taken on the worker's event loop: while that is held up, viewers hear so instead of waiting."""
    async with Showing(seats=8, blocks=64).running() as show:
        viewer = await asyncio.to_thread(Viewer, show.port)
        end = time.monotonic() + 20
        while not viewer.away:  # holds the loop up
            assert time.monotonic() < end
            time.sleep(0.01)
        assert viewer.away == ["the worker's event loop is held up"]
        seen = len(viewer.seen)
        async with asyncio.timeout(10):
            while len(viewer.seen) == seen:
                await asyncio.sleep(0.01)
    viewer.join()


async def test_viewers_have_a_bound():
    """One too many is refused; when one has left, there is room again."""
    async with Showing(seats=8, blocks=64).running() as show:
        looking = await asyncio.to_thread(lambda: [Viewer(show.port) for _ in range(MAX_VIEWERS)])
        async with asyncio.timeout(30):
            while not all(viewer.seen for viewer in looking):
                await asyncio.sleep(0.01)
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(Viewer, show.port)
        assert refused.value.code == 503
        refused.value.close()
    for viewer in looking:
        await asyncio.to_thread(viewer.join)


async def test_a_viewer_who_takes_nothing_loses_its_place(monkeypatch: pytest.MonkeyPatch):
    """Its connection is open and all buffers are full; the others look on."""
    monkeypatch.setattr(live, "SEND_S", 0.2)
    feed, sent = Feed(lambda: asyncio.sleep(0, (b"{}", 0.0))), []

    async def full_after_two(message: Message) -> None:
        sent.append(message)
        if len(sent) > 2:
            await asyncio.sleep(60)

    async with asyncio.timeout(10):
        response = live._ViewerResponse(feed, lambda: False)
        assert feed.num_viewers == 1
        await response({"type": "http", "asgi": {"spec_version": "2.4"}}, asyncio.Event().wait, full_after_two)
    assert feed.num_viewers == 0
    assert len(sent) == 3


async def test_a_burst_of_viewers_has_the_same_bound():
    """Those that come at once are counted as they are accepted, not when they are served."""
    feed = Feed(lambda: asyncio.sleep(0, (b"{}", 0.0)))

    async def status(port: int) -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        return (await reader.readline()).split()[1], writer

    with serving_health(Health(30.0), "127.0.0.1", 0, live_routes(feed)) as port:
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*(status(port) for _ in range(150)))
    given = [code for code, _ in answers]
    for _, writer in answers:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert given.count(b"200") == MAX_VIEWERS
    assert given.count(b"503") == 150 - MAX_VIEWERS


def _big_snapshots() -> Callable[[], Awaitable[tuple[bytes, float]]]:
    numbers = itertools.count()
    return lambda: asyncio.sleep(0, (b"%d " % next(numbers) + b"x" * 8000, 0.0))


def _sits_in_silence(port: int) -> int:
    """Takes the only place and reads nothing until another one has it. How many bytes were sent to it."""
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        silent.recv(1)

        def another_has_it() -> bool:
            with socket.create_connection(("127.0.0.1", port)) as other:
                other.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
                return other.recv(12) == b"HTTP/1.1 200"

        assert not another_has_it()
        until(another_has_it)
        silent.settimeout(1)
        taken = 0
        with contextlib.suppress(TimeoutError, ConnectionError):
            while part := silent.recv(1 << 16):
                taken += len(part)
        return taken


@pytest.mark.parametrize("server", ["worker", "console"])
def test_a_viewer_who_reads_nothing_fills_no_megabytes(server: str, monkeypatch: pytest.MonkeyPatch):
    """The buffers before it are full soon, of the worker's page and of the console's, and then its time runs."""
    for name, value in {"SEND_S": 0.3, "PERIOD_S": 0.001, "SHARE": 1e6, "MAX_VIEWERS": 1}.items():
        monkeypatch.setattr(live, name, value)
    sent: list[int] = []
    if server == "worker":
        with serving_health(Health(30.0), "127.0.0.1", 0, live_routes(Feed(_big_snapshots()))) as port:
            sent.append(_sits_in_silence(port))
    else:
        take = _big_snapshots()
        monkeypatch.setattr(RemoteWorker, "_take", lambda self: take())
        handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

        def look(port: int) -> None:
            try:
                sent.append(_sits_in_silence(port))
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        try:
            run_console(
                ["http://127.0.0.1:1"], "127.0.0.1", 0, lambda port: threading.Thread(target=look, args=[port]).start()
            )
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)
    assert 100_000 < sent[0] < 1_000_000


async def test_a_feed_survives_any_error_of_a_look():
    """Also one that nobody foresaw is a reason, and the next look is a new one."""
    answers: list[Exception | bytes] = [ValueError("idna"), b"{}"]

    async def take() -> tuple[bytes, float]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer, 0.0

    feed = Feed(take)
    with pytest.raises(NoSnapshot, match="idna"):
        await feed.latest()
    feed._taken_at = 0.0
    assert await feed.latest() == b"{}"


async def test_a_console_reads_a_worker():
    """What the worker serves, another server passes on, once for all its viewers; a worker that is away is said so."""
    async with Showing(seats=8, blocks=64).running() as show:
        feed = RemoteWorker(f"http://127.0.0.1:{show.port}", ThreadPoolExecutor(1)).feed
        first, second = await asyncio.gather(feed.latest(), feed.latest())
        assert first == second
        assert Snapshot.decode(first).num_seats == 8
        assert show.snapshots.num_taken == 1
    await asyncio.sleep(PERIOD_S)
    with pytest.raises(NoSnapshot, match="no worker answers at http://127"):
        await feed.latest()


def test_the_command_console():
    """It prints its address, serves the page without a worker, says a sentence for a port that is taken, and ends at a
    signal although somebody looks on."""
    words = [sys.executable, "-m", "service", "console", "--worker", "http://127.0.0.1:1", "--port"]
    with subprocess.Popen([*words, "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        port = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", address)[1])  # type: ignore[index]
        assert b"<title>Carousel</title>" in get(port, "/")
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(port, "/snapshot")
        assert refused.value.read().startswith(b"no worker answers at http://127.0.0.1:1")
        refused.value.close()
        taken = subprocess.run([*words, str(port)], capture_output=True, text=True, check=False, timeout=60)
        assert taken.returncode == 1
        assert f"port {port} of 127.0.0.1 cannot be had: address already in use. Give another --port" in taken.stderr
        viewer = Viewer(port)
        until(lambda: bool(viewer.away))
        assert viewer.away[0].startswith("no worker answers")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        viewer.join()
        assert viewer.ended


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_console_that_is_stopped_at_once(number: signal.Signals):
    """A signal before the server runs ends it as one does later: nothing is printed, nothing left unawaited."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        given = run_console(["http://127.0.0.1:1"], "127.0.0.1", 0, lambda port: signal.raise_signal(number))
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert given == number


async def test_a_feed_asks_again_only_after_its_period():
    """Also while there is nothing: a failing source is not asked more often than a good one."""
    asked = 0

    async def take() -> bytes:
        nonlocal asked
        asked += 1
        raise NoSnapshot("gone")

    feed = Feed(take)
    for _ in range(5):
        with pytest.raises(NoSnapshot, match="gone"):
            await feed.latest()
    assert asked == 1


def test_block_states_are_the_pools():
    """`states` says of every block what `state` says of one; the reader's names are the engine's."""
    engine = Engine(num_blocks=32, num_host_blocks=8, max_num_seqs=2, preemption="swap")
    engine.add(make_request("low", prompt=20, max_tokens=30, lane="batch"))
    engine.add(make_request("done", prompt=9, max_tokens=1, lane="batch"))
    engine.step()
    engine.step()
    engine.add(make_request("high", max_tokens=20, priority_class=1), make_request("high2", priority_class=1))
    seen: set[BlockState] = set()

    def check() -> None:
        pool = engine.scheduler._blocks.device
        expected = [list(BlockState).index(pool.state(i)) for i in range(pool.num_blocks)]
        assert list(pool.states()) == expected
        seen.update(map(pool.state, range(pool.num_blocks)))
        digits = "".join(map(str, pool.states()))
        assert Pool(4, digits).count("draining") == pool.num_draining
        assert Pool(4, digits).count("cached") == pool.num_cached

    for _ in range(4):
        engine.step(in_flight=check)
        check()
    assert seen == set(BlockState)


def test_waiting_by_lane():
    """How many wait per lane, and since when the oldest does; those with a seat do not count."""
    engine = Engine(max_num_seqs=1)
    engine.add(make_request("a", lane="batch", arrival=1.0, priority=9))
    engine.step()
    engine.add(make_request("b", lane="batch", arrival=3.0, n=2), make_request("c", lane="standard", arrival=4.0))
    engine.add(make_request("d", lane="batch", arrival=2.0))
    assert engine.scheduler.waiting_by_lane() == {"batch": (3, 2.0), "standard": (1, 4.0)}
    assert [seq.request.request_id for seq in engine.scheduler.seated] == ["a"]


def test_latencies():
    """Percentiles by nearest rank; attained counts the requests that met both targets; no first token, no latency."""
    snapshots = Snapshots("w1", "tiny", {"gold": Tier("gold", 5, 5, ttft_ms=100.0, tpot_ms=10.0)}, Health(30.0))
    latencies = snapshots._latencies["gold"]
    assert latencies.summary.num_requests == 0
    assert latencies.summary.attained is None
    for ttft, tpot in ((50.0, 0.01), (60.0, 0.03), (200.0, None), (None, None)):  # met, slow, late, cancelled
        snapshots.finished("gold", End(0, FinishReason.LENGTH, timing=Timing(0.0, ttft, 300.0)), tpot)
    found = latencies.summary
    assert (found.num_requests, found.ttft_p50_ms, found.ttft_p95_ms) == (3, 60.0, 200.0)
    assert (found.tpot_p50_ms, found.tpot_p95_ms) == (10.0, 30.0)
    assert found.attained == pytest.approx(1 / 3, abs=1e-4)


async def test_top_shows_the_same():
    """`carousel top` in a terminal's width: seats, lanes, blocks, who was displaced for whom; JSON for programs."""
    async with Showing(seats=8, blocks=256).running() as show:
        for i in range(8):
            show.serve(show.request("batch", name=f"\x1b[2Jcrafty-{i}", max_tokens=1900))
        await show.steps(3)
        show.serve(show.request("interactive", name="guest", max_tokens=500))
        await show.steps(4)
        url = f"http://127.0.0.1:{show.port}"
        runner = CliRunner(env={"COLUMNS": "140"})
        result = await asyncio.to_thread(runner.invoke, app, ["top", "--worker", url, "--once"])
        assert result.exit_code == 0, result.output
        assert "w1 serves tiny: ready" in result.output
        assert "seats 8/8   waiting 1" in result.output
        assert re.search(r"seats  (?=.*I)[BI]{8}\n", result.output)
        assert re.search(r"gave a seat to guest \(swap, \d+ tokens\)", result.output)
        assert "\\x1b[2Jcrafty" in result.output
        assert "\x1b[2J" not in result.output
        result = await asyncio.to_thread(runner.invoke, app, ["top", "--worker", url, "--json"])
        jsonschema.validate(json.loads(result.output), SCHEMA)
    result = await asyncio.to_thread(runner.invoke, app, ["top", "--worker", url, "--once"])
    assert result.exit_code == 1
    assert f"no worker answers at {url}: nobody listens there; a worker does at its --metrics-port" in result.output
    result = runner.invoke(app, ["top", "--worker", "localhost"])
    assert result.exit_code == 2


def test_top_draws_a_large_pool_small():
    """8,192 blocks and 256 seats fit a terminal: a character stands for several blocks, by majority."""
    pool = Pool(16, "1" * 6000 + "0" * 2192)
    shot = Snapshot(1, "w", "m", 1.0, (), 0.0, 256, 0, 0, (), (), (), (), (), pool, Pool(16, ""))
    out = console()
    with out.capture() as captured:
        out.print(picture(shot, 4, None))
    text = captured.get()
    assert "█ active 6000, · free 2192" in text or "· free 2192, █ active 6000" in text
    assert sum(line.count("█") for line in text.splitlines()[3:]) in range(370, 380)
    assert len(text.splitlines()) < 30


def test_the_page_brings_all_with_it():
    """No address of anything outside is in the page, and nothing in it makes HTML of what a caller wrote."""
    html = (Path(__file__).resolve().parents[2] / "worker/live.html").read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", html)
    assert html.count("<script>") == html.count("<style>") == 1
    assert "style=" not in html, "the policy forbids style attributes"


def test_lanes_of_the_test_are_like_the_real_ones():
    """The page reads of a lane what a KafkaLane has."""
    assert all(hasattr(KafkaLane, name) for name in ("assigned", "lags", "num_outstanding"))
    assert all(hasattr(Lane(), name) for name in ("assigned", "lags", "num_outstanding"))
