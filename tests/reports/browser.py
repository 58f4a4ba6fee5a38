"""Pages in a real browser: Playwright drives the Chromium that is on the path."""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

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
SECONDS = 60  # until a condition must hold: a page on a busy machine may start 40 times slower
READY = "performance.getEntriesByName('headwise-ready').length > 0"
# Counts in ``drawings`` how often the viewer is drawing: each change of the state draws it later.
COUNT_DRAWINGS = """(() => {
  if (window.drawings !== undefined || !window.headwise) return;
  const app = headwise.app, refresh = app.refresh.bind(app);
  window.drawings = 0;
  app.refresh = async () => {
    window.drawings += 1;
    try { await refresh(); } finally { window.drawings -= 1; }
  };
})()"""
# What scrolls and what takes the focus does so in the next frame.
TWO_FRAMES = "new Promise((end) => requestAnimationFrame(() => requestAnimationFrame(() => end())))"


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

    def load(self) -> None:
        """Wait until the data of the state have arrived: maps are inflated later than it is set."""
        self.page.evaluate("headwise.app.load().then(() => null)")

    def wait(self, until: str) -> None:
        """Wait until a condition holds of the state ``s``, and the page has drawn that state."""
        held = f"!window.drawings && ({until})"
        self.poll(f"(() => {{ const s = headwise.state(); return {held}; }})()")

    def settle(self) -> None:
        """Wait until the page has drawn its state, has scrolled and has moved the focus."""
        self.wait("true")
        self.page.evaluate(TWO_FRAMES)

    def poll(self, condition: str) -> None:
        """Wait until a condition holds. Asked from outside: the page's policy forbids eval."""
        end = time.monotonic() + SECONDS
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"never true: {condition}; {self.complaints}"
            self.page.wait_for_timeout(10)


class Chromium:
    """The browser of a test run. Tests use one tab after the other, since a new one takes long."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.free: dict[tuple[Any, ...], list[Page]] = defaultdict(list)

    @contextmanager
    def open(
        self,
        path: Path,
        *,
        width: int = 1400,
        height: int = 900,
        waits: bool = True,
        address: str = NOTHING_LIT,
        **options: Any,
    ) -> Iterator[Opened]:
        """Open a file; with ``waits``, until the viewer is ready. The network is off.

        Without an address of its own, a page of a scan opens with a link that is lit.
        """
        with self._tab(**options) as page:
            page.set_viewport_size({"width": width, "height": height})
            opened = Opened(page)
            listeners: dict[Any, Callable[[Any], None]] = {
                "request": lambda request: opened.requests.append(request.url),
                "pageerror": lambda error: opened.complaints.append(str(error)),
                "console": lambda message: opened.complaints.append(message.text),
            }
            for event, listener in listeners.items():
                page.on(event, listener)
            page.goto(path.as_uri() + address)
            if waits and options.get("script", True):
                opened.poll(READY)
                page.evaluate(COUNT_DRAWINGS)
            yield opened
            for event, listener in listeners.items():
                page.remove_listener(event, listener)

    @contextmanager
    def _tab(
        self,
        *,
        init: str = "",
        script: bool = True,
        has_touch: bool = False,
        is_mobile: bool = False,
        color_scheme: Any = "light",
        forced_colors: Any = "none",
        reduced_motion: Any = "no-preference",
    ) -> Iterator[Page]:
        """Yield an empty tab, which another test may have left. With ``init`` it is a new one."""
        free = self.free[script, has_touch, is_mobile]
        if free and not init:
            page = free.pop()
        else:
            page = self.browser.new_context(
                offline=True, java_script_enabled=script, has_touch=has_touch, is_mobile=is_mobile
            ).new_page()
        if init:
            page.add_init_script(init)
        page.emulate_media(
            media="null",
            color_scheme=color_scheme,
            forced_colors=forced_colors,
            reduced_motion=reduced_motion,
        )
        try:
            yield page
            page.mouse.move(-1, -1)
            page.goto("about:blank")
        except BaseException:  # nobody knows what it left
            page.context.close()
            raise
        if init:
            page.context.close()
        else:
            free.append(page)


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
