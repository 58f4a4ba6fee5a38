"""A page in a real browser: chromium or Google Chrome, if there is one on the path."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
NO_BROWSER = f"no browser on the path: none of {', '.join(NAMES)}"
# Where CI is set, nothing is left out: there the tests fail instead.
needs_a_browser = pytest.mark.skipif(
    BROWSER is None and not os.environ.get("CI"), reason=NO_BROWSER
)
DARK = "--blink-settings=preferredColorScheme=0"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

# The page itself runs no script. This one is put into a copy of it, and writes what it measured.
PROBE = """
<script>
addEventListener("load", () => {
  const root = document.documentElement, seen = (e) => getComputedStyle(e).display;
  const found = JSON.stringify({
    wide: root.scrollWidth, window: innerWidth, images: document.images.length,
    drawn: [...document.images].filter((i) => i.complete && i.naturalWidth > 0).length,
    fetched: performance.getEntriesByType("resource").map((r) => r.name)
      .filter((name) => !name.startsWith("data:")),
    spilled: [...document.querySelectorAll(".card, .map, .status")]
      .filter((e) => e.scrollWidth > e.clientWidth + 2).length,
    paper: getComputedStyle(document.body).backgroundColor,
    cut: [...document.querySelectorAll("svg text")].filter((t) => {
      const box = t.getBoundingClientRect(), all = t.ownerSVGElement.getBoundingClientRect();
      return box.left < all.left - 1 || box.right > all.right + 1 ||
        box.top < all.top - 1 || box.bottom > all.bottom + 1;
    }).map((t) => t.textContent),
    facts: [...document.querySelectorAll(".map .more")].filter((e) => seen(e) !== "none").length,
    enlarged: document.querySelector(":target")?.querySelector("img").clientWidth,
  });
  if (parent === window) root.dataset.probe = found; else parent.postMessage(found, "*");
});
</script>
"""
# A headless window is at least 500 wide; narrow ones need a frame.
FRAME = """<!doctype html><body><script>addEventListener("message", (e) => {
  document.documentElement.dataset.probe = e.data; });</script>
<iframe src="{name}" style="width:{width}px;height:800px;border:0"></iframe>
"""


def with_probe(html: str, folder: Path) -> Path:
    page = folder / "copy.html"
    page.write_text(html.replace("</body>", PROBE + "</body>"), "utf-8")
    return page


def framed(page: Path, *, width: int) -> Path:
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.replace("{name}", page.name).replace("{width}", str(width)), "utf-8")
    return frame


def measured(address: str, profile: Path, *flags: str, width: int = 1280) -> dict[str, Any]:
    """What the probe found."""
    assert BROWSER is not None, NO_BROWSER
    command = [BROWSER, *FLAGS, *flags, f"--user-data-dir={profile / 'profile'}"]
    done = subprocess.run(
        [*command, f"--window-size={width},900", "--dump-dom", address],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(found[1].replace("&quot;", '"'))
    return result
