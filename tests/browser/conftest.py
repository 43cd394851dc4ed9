"""A real Chromium for tests that look at what labkit draws."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import Browser, Page, sync_playwright

SWITCHES = [
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_HERE = re.compile(r"(file:|data:|blob:|about:|(http|ws)://(127\.0\.0\.1|localhost)[:/])")


@dataclass
class Seen:
    """What a page asked for and complained of."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def outside(self) -> list[str]:
        """Requests that would leave this machine."""
        return [url for url in self.requests if not _HERE.match(url)]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Start a headless browser; skip where none is installed."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=SWITCHES)
        yield browser
        browser.close()


@pytest.fixture
def seen() -> Seen:
    """Return what the test's `page` asked for and complained of, as it happens."""
    return Seen()


@pytest.fixture
def page(chromium: Browser, seen: Seen) -> Iterator[Page]:
    """Open a fresh page of 1400 by 900 pixels whose requests and errors go to `seen`."""
    context = chromium.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on(
        "console",
        lambda message: seen.errors.append(message.text) if message.type in ("error", "warning") else None,
    )
    yield page
    context.close()
