"""The live page, left open: over a console that begins anew, without a place, beside a screen reader."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from tests.worker.chromium import Page
from tests.worker.showing import Showing
from worker import live
from worker.console import console_routes
from worker.health import Health
from worker.health_server import serving_health

pytestmark = pytest.mark.browser
NAMES = "[...document.querySelectorAll('#workers label')].map((e) => e.children[1].textContent).join()"
CHECKED = "[...document.querySelectorAll('#workers input')].findIndex((e) => e.checked)"
STATE = "document.querySelector('#state').textContent"
SHOWN = "document.querySelector('#worker').textContent"
WRITES = """
window.writes = [];
new MutationObserver(() => writes.push(document.querySelector('ID').textContent))
  .observe(document.querySelector('ID'), { childList: true, characterData: true, subtree: true });
"""
LIVE = "[...document.querySelectorAll('[aria-live=polite], [role=status], [role=log]:not([aria-live=off])')]"


@contextlib.asynccontextmanager
async def three() -> AsyncIterator[list[str]]:
    shows = [Showing(seats=4, blocks=128, name=name) for name in ("one", "two", "three")]
    async with shows[0].running(), shows[1].running(), shows[2].running():
        yield [f"http://127.0.0.1:{show.port}" for show in shows]


class Console:
    """Begins anew at the same port."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self.port = 0

    async def of(self, urls: list[str], look: Callable[[], None]) -> None:
        with serving_health(Health(30.0), "127.0.0.1", self.port, console_routes(urls)) as port:
            if not self.port:
                self.port = port
                await asyncio.to_thread(self._page.view, 1280, 800)
                await asyncio.to_thread(self._page.load, f"http://127.0.0.1:{port}/")
            await asyncio.to_thread(look)


async def test_a_console_of_fewer_and_of_more(page: Page):
    """The worker that was shown is no longer there: the first one is, and it is said; so is any other number."""

    def two() -> None:
        page.until(f"{NAMES} === 'one,two'")
        page.value("document.querySelectorAll('#workers input')[1].click()")
        page.until(f"{SHOWN} === 'two serves tiny' && {STATE} === 'ready'")

    def more() -> None:
        page.until(f"{NAMES} === 'one,two,three'")
        page.value("document.querySelectorAll('#workers input')[2].click()")
        page.until(f"{SHOWN} === 'three serves tiny' && {STATE} === 'ready'")

    def fewer() -> None:
        page.until(f"{SHOWN} === 'one serves tiny' && {STATE} === 'ready'")
        page.until(f"{NAMES} === 'one,two' && {CHECKED} === 0")
        assert "no longer there" in page.value("document.querySelector('#moved').textContent")
        two()

    def alone() -> None:
        page.until(f"{SHOWN} === 'one serves tiny' && {STATE} === 'ready'")
        page.until("document.querySelector('#workers').hidden")

    def again() -> None:
        page.until(f"{NAMES} === 'one,two' && {STATE} === 'ready' && !document.querySelector('#workers').hidden")

    console = Console(page)
    async with three() as urls:
        for number, look in ((2, two), (3, more), (2, fewer), (1, alone), (2, again)):
            await console.of(urls[:number], look)


async def test_one_viewer_too_many(page: Page, monkeypatch: pytest.MonkeyPatch):
    """It reads the server's reason, and looks on as soon as there is a place."""
    monkeypatch.setattr(live, "MAX_VIEWERS", 0)

    def look() -> None:
        page.until(f"{STATE} === '0 viewers look on already; trying again'")
        monkeypatch.setattr(live, "MAX_VIEWERS", 1)
        page.until(f"{STATE} === 'ready'")

    async with three() as urls:
        await Console(page).of(urls[:1], look)


async def test_a_screen_reader_hears_what_matters(page: Page):
    """Of the chosen seat: who sits there and what it does, not each token. Of preemptions: a line in five seconds."""

    def look(url: str) -> None:
        page.view(1280, 800)
        page.load(url)
        page.until("document.body.dataset.snapshots > 1")
        page.value("choose(0)")
        page.until("document.querySelector('#said').textContent.startsWith('Seat 1: batch-')")
        page.value(WRITES.replace("ID", "#said"))
        first = page.value("document.querySelector('#told').textContent")
        page.until(f"document.querySelector('#told').textContent !== {first!r}", "it is seen")
        page.until("document.body.dataset.snapshots > 6")
        assert page.value("writes") == [], "it is heard again"
        page.value("choose(1)")
        page.until("writes.length === 1")
        assert page.value("writes[0]").startswith("Seat 2: batch-")
        assert page.value(f"{LIVE}.some((e) => e.id === 'told' || e.id === 'preempted')") is False
        assert page.value(f"{LIVE}.map((e) => e.id).join()") == "state,moved,said,lost"
        page.value("document.querySelector('#pause').click()")
        page.value(WRITES.replace("ID", "#lost"))
        page.value(
            "window.row = (step) => ['seat', 'block'].map((cause) => ({ step, request: 'a', choice: 0, cause,"
            " mode: 'swap', num_tokens: 3, beneficiary: 'b' })); lostSaidAt = -Infinity"
        )
        page.value("for (let step = 1; step < 30; step++) { now.fresh = row(step); drawPreempted(); }")
        page.value("lostSaidAt -= SAY_MS; now.fresh = []; drawPreempted(); drawPreempted()")
        assert page.value("document.querySelectorAll('#preempted li').length") == 40
        page.until("writes.length > 0")
        assert page.value("document.querySelector('#lost').textContent") == (
            "56 preemptions, the last one: step 29: a gave a block to b; 3 tokens swapped out"
        )
        assert page.problems == []

    async with Showing(seats=4, blocks=512).running() as show:
        for _ in range(4):
            show.serve(show.request("batch", max_tokens=1900))
        await asyncio.to_thread(look, f"http://127.0.0.1:{show.port}/")
