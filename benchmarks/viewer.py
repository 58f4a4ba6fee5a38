"""The viewer in the browser: ``python -m benchmarks.viewer``. Medians of five, beside the limits.

The pages are those of the tests' seeded builder: 144 heads x 16,384 tokens, and 1,024 heads x
131,072 tokens. Times are those of Chromium without a window.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from headwise.reports.page import save_scan_page
from headwise.reports.report import ScanReport
from tests.reports.browser import READY, Chromium, Opened, chromium
from tests.reports.viewer_scans import gpt2_sized, large

RUNS = 5
HOVERS = 300
PAGES: dict[str, Callable[[], ScanReport]] = {
    "144 x 16,384": gpt2_sized,
    "1,024 x 131,072": large,
}
# row -> (unit, limit of the first page, limit of the second; None for none)
LIMITS: dict[str, tuple[str, float | None, float | None]] = {
    "writing the page": ("s", 3, 3),
    "file": ("MB", 12, 25),
    "first paint": ("ms", 1000, 1000),
    "interactive": ("ms", 1500, 4000),
    "longest task of the start": ("ms", 100, None),
    "hovers: 95 % of frames": ("ms", 17, None),
    "hovers: worst frame": ("ms", 50, None),
    "first search": ("ms", 50, None),
    "a word in all heads": ("ms", 50, None),
    "the next word, in all heads": ("ms", 50, None),
    "what looks at it, in all heads": ("ms", 50, None),
    "what looks at the next word": ("ms", 50, None),
    "DOM nodes": ("", 3000, None),
}
WATCH_TASKS = """
window.tasks = [];
new PerformanceObserver((list) => tasks.push(...list.getEntries().map((e) => e.duration)))
  .observe({ entryTypes: ["longtask"] });
"""
START_FRAMES = """
window.frames_ = []; window.running = true;
const next = (before) => requestAnimationFrame((now) => {
  if (before) frames_.push(now - before);
  if (running) next(now);
});
next();
"""
# From a click to the frame in which the cells of all heads show its answer, once it is painted.
ANSWER = """(([token, direction]) => {
  const grid = headwise.app.parts.find((part) => "links" in part);
  window.answered = new Promise((resolve) => addEventListener("click", (event) => {
    const look = () => {
      const { links } = grid.dump();
      const isThere = links.token === token && links.direction === direction;
      if (!isThere) return requestAnimationFrame(look);
      const painted = new MessageChannel();
      painted.port1.onmessage = () => resolve(performance.now() - event.timeStamp);
      painted.port2.postMessage(null);
    };
    requestAnimationFrame(look);
  }, { capture: true, once: true }));
})"""
PINNED, NEXT, LAST = 1000, 1003, 1006  # tokens in sight of one another
SEARCH = """(async () => {
  const start = performance.now();
  headwise.app.set({ search: "rabbit" });
  await headwise.app.refresh();
  return performance.now() - start;
})()"""


def main() -> None:
    """Measure both pages, and print one table."""
    rows: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as folder, chromium() as browser:
        for name, make in PAGES.items():
            report, path = make(), Path(folder) / "page.html"
            written = [_seconds(lambda: save_scan_page(path, report)) for _ in range(RUNS)]  # noqa: B023
            runs = [measure(browser, path) for _ in range(RUNS)]
            medians = {row: statistics.median(run[row] for run in runs) for row in runs[0]}
            size = path.stat().st_size / 1e6
            rows[name] = {"writing the page": statistics.median(written), "file": size, **medians}
    table = Table("median of 5", *(f"{name}, limit" for name in PAGES))
    for row, (unit, *limits) in LIMITS.items():
        cells = [
            f"{rows[name][row]:.3g} {unit}" + (f" of {limit}" if limit else "")
            for name, limit in zip(PAGES, limits, strict=True)
        ]
        table.add_row(row, *cells)
    Console().print(table)


def measure(browser: Chromium, path: Path) -> dict[str, float]:
    """Return the figures of one visit of a page."""
    with browser.open(path, waits=False, address="", init=WATCH_TASKS) as opened:
        opened.poll(READY)
        opened.page.wait_for_timeout(500)
        found: dict[str, float] = opened.page.evaluate(
            """({
              "first paint": performance.getEntriesByType("paint")[0].startTime,
              "interactive": performance.getEntriesByName("headwise-ready")[0].startTime,
              "longest task of the start": Math.max(0, ...tasks),
            })"""
        )
        frames = hovers(opened)
        search = opened.page.evaluate(SEARCH)
        pin = f"headwise.app.set({{ search: '', token: {PINNED} }})"
        opened.do(pin, f"s.token === {PINNED}")
        opened.poll(f"document.querySelector('[data-t=\"{NEXT}\"]') !== null")
        return found | {
            "hovers: 95 % of frames": frames[int(0.95 * len(frames))],
            "hovers: worst frame": frames[-1],
            "first search": search,
            "a word in all heads": click(opened, "[data-part=every-head]", PINNED),
            "the next word, in all heads": click(opened, f'[data-t="{NEXT}"]', NEXT),
            "what looks at it, in all heads": click(
                opened, "[data-direction=queries]", NEXT, direction="queries"
            ),
            "what looks at the next word": click(
                opened, f'[data-t="{LAST}"]', LAST, direction="queries"
            ),
            "DOM nodes": opened.page.evaluate("document.querySelectorAll('*').length"),
        }


def click(opened: Opened, place: str, token: int, *, direction: str = "keys") -> float:
    """Return the ms from a click to the painted answer about a token in all heads."""
    opened.page.wait_for_timeout(100)
    opened.page.evaluate(ANSWER, [token, direction])
    opened.page.click(place)
    taken: float = opened.page.evaluate("answered")
    return taken


def hovers(opened: Opened) -> list[float]:
    """Return the sorted times between frames while the pointer moves over the map and the text."""
    opened.page.evaluate(START_FRAMES)
    for part in ("[data-part=map] canvas", ".scroller"):
        box: Any = opened.page.locator(part).first.bounding_box()
        for step in range(HOVERS // 2):
            across = (37 * step) % (box["width"] - 40)
            down = (53 * step) % (box["height"] - 10)
            opened.page.mouse.move(box["x"] + 10 + across, box["y"] + 5 + down)
    frames: list[float] = opened.page.evaluate("(running = false, frames_)")
    return sorted(frames)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
