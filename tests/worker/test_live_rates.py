"""How fast the live page and `carousel top` say that a worker is: also when it makes more steps than a snapshot has."""

import asyncio
import json
from dataclasses import replace

import pytest

from schemas.snapshot import Pace, Pool, Rates, Snapshot, Step
from service.cli.top import _screen, _Watched
from tests.worker import showing
from tests.worker.showing import Showing

STEPS_S = 565  # of the engine; 141 between two snapshots, of which each has the last 60


def shot(number: int, *, worker: str = "w1", counts: bool = True) -> Snapshot:
    """The number-th of a worker that has made STEPS_S steps a second for a long time: a snapshot every 0.25 s."""
    clock, done = number * 0.25, int(number * 0.25 * STEPS_S)
    steps = tuple(Step(i + 1, round(i / STEPS_S, 3), 1.7, 4, 0, 4, 2, 1, 0) for i in range(max(0, done - 60), done))
    pool = Pool(16, "0")
    told = Snapshot(number, worker, "tiny", clock, (), 0.0, 4, 0, 0, (), (), (), steps, (), pool, pool)
    return replace(told, num_steps=done, num_decode_tokens=4 * done, num_prefill_tokens=2 * done) if counts else told


def _are_true(rates: Rates | None) -> bool:
    return rates is not None and rates == pytest.approx((STEPS_S, 4 * STEPS_S, 2 * STEPS_S), rel=0.02)


def test_rates_across_gaps():
    """The first snapshot, those that follow, those after a pause of the reader, those of an older worker: true."""
    pace = Pace()
    for number in (*range(40, 80), *range(200, 220)):
        assert _are_true(pace.rates(shot(number))), number
    for number in range(40, 60):
        assert _are_true(pace.rates(shot(number, counts=False))), number


def test_rates_are_of_the_last_seconds_and_of_one_worker():
    """What was before is forgotten; a worker that begins anew, or another one, is not reckoned against the old one."""
    pace, still = Pace(), shot(80)
    for number in range(40, 81):
        pace.rates(shot(number))
    for _ in range(20):
        still = replace(still, clock_s=still.clock_s + 0.25)
        rates = pace.rates(still)
    assert rates == (0, 0, 0)
    for other in (shot(10), shot(30, worker="w2")):
        assert _are_true(pace.rates(other))


def test_before_the_first_step():
    empty = replace(shot(0), clock_s=5.0)
    assert Pace().rates(empty) is None


def test_a_snapshot_of_another_version_of_the_worker():
    """Fields that are away or unknown do not make it unreadable."""
    fields = json.loads(shot(40).encode())
    for name in ("num_steps", "num_decode_tokens", "num_prefill_tokens"):
        del fields[name]
    found = Snapshot.decode(json.dumps(fields | {"later": 1}).encode())
    assert found == shot(40, counts=False)


async def test_the_worker_counts_every_step(monkeypatch: pytest.MonkeyPatch):
    """Also those that no snapshot has: and `carousel top` says how many a second there were."""
    monkeypatch.setattr(showing, "STEP_S", 0.0005)
    async with Showing(seats=4, blocks=512).running() as show:
        for _ in range(4):
            show.serve(show.request("batch", max_tokens=1900))
        await show.steps(3)
        first = show.snapshots.take()
        await show.steps(300)
        last = show.snapshots.take()
        assert first is not None
        assert last is not None
        steps = last.steps[-1].step - first.steps[-1].step
        assert (last.num_steps or 0) - (first.num_steps or 0) == steps >= 300
        assert (last.num_decode_tokens or 0) - (first.num_decode_tokens or 0) == 4 * steps
        assert last.num_prefill_tokens == first.num_prefill_tokens == 4 * 40


async def test_top_says_the_true_rate(monkeypatch: pytest.MonkeyPatch):
    """From the snapshots that it sees one after another."""
    numbers = iter(range(40, 10_000, 2))
    monkeypatch.setattr("schemas.snapshot.fetch_snapshot", lambda url: shot(next(numbers)).encode())
    watched = _Watched("http://a", 0.02, lambda: None)
    watched.choose(True)
    while next(numbers) < 100:
        await asyncio.sleep(0.02)
    words = str(_screen([watched], 0, 1).renderables[0].renderables[1])
    assert "steps/s 56" in words
    assert "tokens/s out 226" in words
    assert "prefill/s 113" in words
