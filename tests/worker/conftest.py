"""A browser, for the tests of the live page."""

from collections.abc import Iterator

import pytest

from tests.worker.chromium import Page, find_browser


@pytest.fixture
def page() -> Iterator[Page]:
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium: install Debian's package chromium, or let CHROMIUM name a browser")
    with Page(browser) as opened:
        yield opened
