"""The live page in a real browser: under load, with preemptions, wide and narrow, by keyboard and without motion.

What each test looked at stays behind in SCREENSHOTS until the next run.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.snapshot import Pace
from tests.worker.chromium import Page
from tests.worker.showing import Showing
from tests.worker.test_live_rates import STEPS_S, shot
from worker.console import console_routes
from worker.health import Health
from worker.health_server import serving_health
from worker.live import live_routes, worker_feed

pytestmark = pytest.mark.browser
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
HOSTILE = "<img src=x onerror=document.title='taken'>"


def _keep(page: Page, name: str) -> Path:
    """The page as it is now, in place of the last run's picture of that name."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{name}.png"
    path.unlink(missing_ok=True)
    page.screenshot(path)
    return path


async def _shown(show: Showing, look: Callable[[str], None]) -> None:
    await asyncio.to_thread(look, f"http://127.0.0.1:{show.port}/")


@pytest.mark.parametrize(("width", "height", "dark"), [(1280, 800, False), (390, 844, True)])
async def test_under_load(page: Page, width: int, height: int, dark: bool):
    """256 seats and 8,192 blocks: it turns, shows a preemption, fits the width, and the console has no complaint."""

    def look(url: str) -> None:
        page.view(width, height, dark=dark)
        page.load(url)
        page.until("document.body.dataset.snapshots > 4")
        before = page.value("document.querySelector('#turning').style.transform")
        page.until("document.querySelector('.displaced') !== null", "a preemption")
        assert _keep(page, f"live-{width}").stat().st_size > 20_000
        assert page.value("document.querySelectorAll('#turning g').length") == 256
        assert page.value("document.querySelectorAll('#turning .taken').length") == 256
        page.until(f"document.querySelector('#turning').style.transform !== '{before}'", "it turns")
        assert page.value("document.querySelector('#state').textContent") == "ready"
        assert " gave a seat to " in page.value("document.querySelector('#preempted li').textContent")
        assert page.value("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
        cut = "[...document.querySelectorAll('.wide')].filter((e) => e.scrollWidth > e.clientWidth).length"
        assert page.value(cut) == 0, "a table is cut off"
        counts = page.value(
            "[...document.querySelectorAll('#l-device li')].map((li) => +li.textContent.replace(/\\D/g, ''))"
        )
        assert sum(counts) == 8192
        colours = page.value(
            "(() => { const c = document.querySelector('#device'), d = c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data, s = new Set();"
            "for (let i = 0; i < d.length; i += 4) s.add(d.slice(i, i + 4).join()); return s.size; })()"
        )
        assert colours >= 3  # two states at least, and the gaps between the blocks
        assert page.problems == []

    async with Showing().running() as show:
        await show.load(batch=250, interactive=12)
        await _shown(show, look)


async def test_keyboard_and_screen_reader(page: Page):
    """The seats are a list box that the arrows go through; regions, tables and the log of preemptions have names."""

    def look(url: str) -> None:
        page.view(1280, 800)
        page.load(url)
        page.until("document.body.dataset.snapshots > 1")
        page.value("document.querySelector('#seats').focus()")
        page.press("ArrowRight")
        page.press("ArrowRight")
        assert page.value("document.querySelector('#seats').getAttribute('aria-activedescendant')") == "seat1"
        assert page.value("document.querySelector('#told').textContent").startswith("Seat 2: batch-")
        page.press("End")
        assert page.value("document.querySelector('[aria-selected=true]').id") == "seat7"
        page.value("document.querySelector('#d-seats').open = true")
        page.until("document.querySelectorAll('#t-seats tbody tr').length === 8")
        _keep(page, "live-keyboard")
        roles = page.roles()
        assert len(roles["option"]) == 8
        assert any(name.startswith("seat 3: batch-") for name in roles["option"])
        assert {"Table of seats", "Table of lanes", "Table of latencies", "Seats", "KV blocks", "Steps"} <= set(
            roles["region"]
        )
        assert roles["log"] == ["Preemptions, newest first"]
        assert all(name for role in ("image", "button", "listbox", "heading") for name in roles[role])
        assert page.problems == []

    async with Showing(seats=8, blocks=512).running() as show:
        for _ in range(8):
            show.serve(show.request("batch", max_tokens=1900))
        await _shown(show, look)


async def test_reduced_motion_and_pause(page: Page):
    """Who wants no motion sees none, and Pause stops what is shown until Go on."""

    def look(url: str) -> None:
        page.view(390, 844, still=True)
        page.load(url)
        page.until("document.body.dataset.snapshots > 6")
        assert page.value("document.querySelector('#turning').style.transform") == ""
        assert page.value("getComputedStyle(document.querySelector('#turning')).transitionProperty") == "none"
        page.value("document.querySelector('#d-steps').open = true")
        page.value("document.querySelector('#pause').click()")
        assert page.value("document.querySelector('#state').textContent") == "paused"
        last, tabled = "now.steps.at(-1).step", "document.querySelector('#t-steps tbody td').textContent"
        assert page.value(f"number({last}) === {tabled}"), "the tables are of another moment than the ring"
        seen = page.value("document.body.dataset.snapshots")
        page.value("new Promise((done) => setTimeout(done, 800))")
        assert page.value("document.body.dataset.snapshots") == seen
        _keep(page, "live-paused-390")
        page.value("document.querySelector('#pause').click()")
        page.until(f"document.body.dataset.snapshots > {seen}")
        page.until("document.querySelector('#state').textContent === 'ready'")
        assert page.problems == []

    async with Showing(seats=8, blocks=128).running() as show:
        await show.load(batch=8, interactive=1)
        await _shown(show, look)


async def test_what_a_caller_wrote_is_text(page: Page):
    """A correlation id that is HTML is shown as it is written."""

    def look(url: str) -> None:
        page.view(1280, 800)
        page.load(url)
        page.value("document.querySelector('#d-seats').open = true")
        page.until("document.querySelectorAll('#t-seats tbody tr').length === 1")
        assert HOSTILE in page.value("document.querySelector('#t-seats').textContent")
        _keep(page, "live-hostile-text")
        assert page.value("document.querySelectorAll('img').length") == 0
        assert page.value("document.title") == "Carousel"

    async with Showing(seats=4, blocks=128).running() as show:
        show.serve(show.request("batch", name=HOSTILE, max_tokens=1900))
        await _shown(show, look)


NAMES = "[...document.querySelectorAll('#workers label')].map((e) => e.children[1].textContent)"


async def test_several_workers(page: Page):
    """A console of two: both are named with how they are, the arrow keys choose, nothing of one stays beside the other,
    and one that goes is away, said and shown, whether it is chosen or not."""
    left, right = Showing(seats=4, blocks=128, name="left"), Showing(seats=6, blocks=128, name="right")

    def both(url: str) -> None:
        page.view(1280, 800)
        page.load(url)
        page.until(f"{NAMES}.join() === 'left,right'")
        page.until("document.querySelector('#worker').textContent === 'left serves tiny'")
        page.until("document.querySelector('#preempted li') !== null", "a preemption on the left one")
        page.value("document.querySelector('#d-seats').open = true")
        page.until("document.querySelector('#t-seats').textContent.includes('batch-')")
        page.value("document.querySelector('#seats').focus()")
        page.press("ArrowRight")
        page.value("document.querySelector('#workers input:checked').focus()")
        page.press("ArrowRight")
        assert page.value("document.querySelector('#preempted li')") is None
        page.until("document.querySelector('#worker').textContent === 'right serves tiny'")
        page.until("document.querySelector('#state').textContent === 'ready'")
        page.until("document.querySelectorAll('#turning g').length === 6")
        assert page.value("document.querySelector('[aria-selected=true]')") is None, "a seat of the other one"
        page.until("document.querySelector('#t-lanes tbody').rows.length === 3")
        assert page.value("document.querySelectorAll('#preempted li, #turning .taken, #t-seats tbody tr').length") == 0
        assert page.problems == []
        _keep(page, "live-two-workers")

    def left_has_gone() -> None:
        page.until("document.querySelector('#moved').textContent.startsWith('left is away: no worker answers at ')")
        assert page.value("document.querySelector('#workers label .bad').textContent") == "away"
        page.until("document.querySelector('#state').textContent === 'ready'", "the other one's")
        page.press("ArrowLeft")
        page.until("document.querySelector('#state').textContent.startsWith('no worker answers at ')")
        assert page.value("document.querySelectorAll('#turning g, #t-lanes tbody tr, #totals div').length") == 0
        assert page.value(f"{NAMES}.join()") == "left,right"
        assert page.value("getComputedStyle(document.querySelector('main')).display") == "none", "empty panels"
        assert page.value("document.body.innerText.match(/no worker answers/g).length") == 1, "said twice"
        _keep(page, "live-one-has-gone")
        page.view(390, 844)
        page.until("innerWidth === 390")
        assert page.value("document.documentElement.scrollWidth") <= 390
        _keep(page, "live-one-has-gone-390")
        page.view(1280, 800)
        page.press("ArrowRight")
        page.until("document.querySelector('#state').textContent === 'ready'")
        page.until("getComputedStyle(document.querySelector('main')).display !== 'none'")
        page.until("document.querySelector('#device').clientWidth === document.querySelector('#host').clientWidth")
        _keep(page, "live-one-is-there")

    async with right.running(), contextlib.AsyncExitStack() as leaving:
        await leaving.enter_async_context(left.running())
        await left.load(batch=4, interactive=2)
        urls = [f"http://127.0.0.1:{each.port}" for each in (left, right)]
        with serving_health(Health(30.0), "127.0.0.1", 0, console_routes(urls)) as port:
            await asyncio.to_thread(both, f"http://127.0.0.1:{port}/")
            await leaving.aclose()
            await asyncio.to_thread(left_has_gone)


async def test_one_worker_under_two_addresses(page: Page):
    """Names that are the same stand beside their addresses; a worker that did nothing yet says so."""

    def look(url: str, port: int) -> None:
        page.view(1280, 800)
        page.load(url)
        page.until(f"{NAMES}.join() === 'w1 (127.0.0.1:{port}),w1 (localhost:{port})'")
        page.until("document.querySelector('#state').textContent === 'ready'")
        assert page.value("document.querySelector('#t-lanes tbody').rows.length") == 3, (
            "its first snapshot has no tables"
        )
        _keep(page, "live-one-name")

    async with Showing(seats=4, blocks=128).running() as show:
        urls = [f"http://{host}:{show.port}" for host in ("127.0.0.1", "localhost")]
        with serving_health(Health(30.0), "127.0.0.1", 0, console_routes(urls)) as port:
            await asyncio.to_thread(look, f"http://127.0.0.1:{port}/", show.port)


async def test_a_worker_that_goes(page: Page):
    """The page says that it is not connected, and goes on by itself when a worker is there again."""
    show = Showing(seats=4, blocks=128)
    loop = asyncio.get_running_loop()
    async with show.running():
        port = show.port
        await asyncio.to_thread(page.view, 1280, 800)
        await asyncio.to_thread(page.load, f"http://127.0.0.1:{port}/")
        await asyncio.to_thread(page.until, "document.querySelector('#state').textContent === 'ready'")
    await asyncio.to_thread(page.until, "document.querySelector('#state').textContent.startsWith('not connected')")
    await asyncio.to_thread(_keep, page, "live-not-connected")
    routes = live_routes(worker_feed(show.snapshots, show.health, loop))
    with serving_health(show.health, "127.0.0.1", port, routes):
        await asyncio.to_thread(page.until, "document.querySelector('#state').textContent === 'ready'")


async def test_rates_of_a_fast_engine(page: Page):
    """It makes more steps between two snapshots than a snapshot has: the page says how many, as `carousel top` does."""
    pairs = "[...document.querySelectorAll('#totals div')].map((e) => [...e.children].map((c) => c.textContent))"

    def look(url: str) -> None:
        page.view(1280, 800)
        page.load(url)
        page.until("document.body.dataset.snapshots > 0")
        page.value("document.querySelector('#pause').click(), clear()")
        pace = Pace()
        for number in range(40, 60):
            page.value(f"show({shot(number).encode().decode()})")
            rates, shown = pace.rates(shot(number)), dict(page.value(pairs))
            assert rates is not None
            assert shown["steps/s"] == f"{rates.steps:.1f}"
            assert float(shown["steps/s"]) == pytest.approx(STEPS_S, rel=0.02)
            assert float(shown["tokens/s out"].replace(",", "")) == pytest.approx(4 * STEPS_S, rel=0.02)
            assert float(shown["prefill/s"].replace(",", "")) == pytest.approx(2 * STEPS_S, rel=0.02)
        assert page.problems == []

    async with Showing(seats=4, blocks=128).running() as show:
        await _shown(show, look)
