"""Pages in a real browser: Playwright drives the Chromium that is on the path."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, BrowserContext, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATH = next(filter(None, map(shutil.which, NAMES)), None)
NO_BROWSER = f"no browser on the path: none of {', '.join(NAMES)}. make browser installs one"
# Where CI is set, nothing is left out: there the tests fail instead.
needs_a_browser = pytest.mark.skipif(PATH is None and not os.environ.get("CI"), reason=NO_BROWSER)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NOTHING_LIT = "#t=none"  # the address of a page's first view without a token
SECONDS = 20  # until a condition must hold
READY = "performance.getEntriesByName('headwise-ready').length > 0"


@dataclass
class Opened:
    """A page in the browser, with what it fetched and complained about."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """What the viewer shows."""
        shown: dict[str, Any] = self.page.evaluate("headwise.state()")
        return shown

    def do(self, script: str, until: str = "true") -> None:
        """Run a script in the page, and wait until a condition holds of its state ``s``."""
        self.page.evaluate(script)
        self.wait(until)

    def wait(self, until: str) -> None:
        """Wait until a condition holds of the state ``s``."""
        self.poll(f"(() => {{ const s = headwise.state(); return {until}; }})()")

    def poll(self, condition: str) -> None:
        """Wait until a condition holds. Asked from outside: the page's policy forbids eval."""
        end = time.monotonic() + SECONDS
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"never true: {condition}; {self.complaints}"
            self.page.wait_for_timeout(10)


class Chromium:
    """The browser of a test run: a page in a context of its own for each test."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser

    @contextmanager
    def open(
        self,
        path: Path,
        *,
        width: int = 1400,
        height: int = 900,
        script: bool = True,
        waits: bool = True,
        address: str = NOTHING_LIT,
        init: str = "",
        **options: Any,
    ) -> Iterator[Opened]:
        """Open a file; with ``waits``, until the viewer is ready. The network is off.

        Without an address of its own, a page of a scan opens with a link that is lit.
        """
        context: BrowserContext = self.browser.new_context(
            viewport={"width": width, "height": height},
            java_script_enabled=script,
            offline=True,
            **options,
        )
        opened = Opened(context.new_page())
        page = opened.page
        if init:
            page.add_init_script(init)
        page.on("request", lambda request: opened.requests.append(request.url))
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on("console", lambda message: opened.complaints.append(message.text))
        page.goto(path.as_uri() + address)
        if script and waits:
            opened.poll(READY)
        try:
            yield opened
        finally:
            context.close()


@contextmanager
def chromium() -> Iterator[Chromium]:
    """Start the browser."""
    from playwright.sync_api import sync_playwright

    assert PATH is not None, NO_BROWSER
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=PATH, args=list(FLAGS))
        yield Chromium(browser)
        browser.close()


# What is wrong with a page that shows no viewer: what overflows, and pictures that are not drawn.
FAULTS = """() => ({
  wide: document.documentElement.scrollWidth > innerWidth,
  undrawn: [...document.images].filter((i) => !(i.complete && i.naturalWidth > 0)).length,
  spilled: [...document.querySelectorAll(".card, .map, .status")]
    .filter((e) => e.scrollWidth > e.clientWidth + 2).length,
  cut: [...document.querySelectorAll("svg text")].filter((t) => {
    const box = t.getBoundingClientRect(), all = t.ownerSVGElement.getBoundingClientRect();
    return box.left < all.left - 1 || box.right > all.right + 1 ||
      box.top < all.top - 1 || box.bottom > all.bottom + 1;
  }).map((t) => t.textContent),
})"""
NO_FAULTS = {"wide": False, "undrawn": 0, "spilled": 0, "cut": []}
