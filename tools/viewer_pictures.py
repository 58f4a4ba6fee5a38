"""Write the pictures of the viewer in the documentation: ``python -m tools.viewer_pictures``.

The pages are those of the tests' seeded builder, which a test compares with the pictures.
"""

from __future__ import annotations

import io
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from headwise import scan
from headwise.models import tiny
from headwise.reports.page import save_scan_page
from tests.reports.browser import Chromium, chromium
from tests.reports.viewer_scans import viewer_report, viewer_scan

FOLDER = Path(__file__).parents[1] / "docs" / "images" / "viewer"
COLOURS = 256  # of a picture in the documentation
# name -> (options of the browser, what is done in the page)
PICTURES: dict[str, tuple[dict[str, Any], str]] = {
    "light": ({}, "headwise.app.pin(7)"),
    "dark": ({"color_scheme": "dark"}, "headwise.app.choose({ layer: 0, head: 1 }, 'entropy')"),
    "compare": ({}, "headwise.app.compareWith({ scan: 0, layer: 2, head: 3 })"),
    "maps": ({"width": 900}, "headwise.app.set({ order: 'maps' })"),
    "phone-heads": ({"width": 390, "height": 844}, "headwise.app.set({ tab: 'heads' })"),
    "phone-text": ({"width": 390, "height": 844}, "headwise.app.set({ tab: 'text', token: 7 })"),
}


def picture(browser: Chromium, page: Path, name: str) -> Image.Image:
    """Return a picture of the viewer."""
    options, action = PICTURES[name]
    with browser.open(page, **options) as opened:
        opened.do("headwise.app.choose({ layer: 1, head: 0 })", "s.layer === 1 && s.head === 0")
        opened.page.evaluate(action)
        opened.page.wait_for_timeout(400)
        return Image.open(io.BytesIO(opened.page.screenshot())).convert("RGB")


def save_figure(path: Path) -> None:
    """Write the figure of matplotlib that the documentation shows."""
    ids = tiny.encode("the quick brown fox jumps over the lazy dog. " * 4)[None]
    scan(tiny.load(), ids, statistics=["map"]).plot("map", layer=2, head=0).savefig(path, dpi=150)


def differing_pixels(a: Image.Image, b: Image.Image) -> float:
    """Return the share of pixels in which a channel differs by more than an eighth of its range."""
    if a.size != b.size:
        return 1.0
    gap = np.abs(np.asarray(a, int) - np.asarray(b, int)).max(-1)
    return float((gap > 32).mean())


def main() -> None:
    """Write every picture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_figure(FOLDER / "figure.png")
    with TemporaryDirectory() as folder, chromium() as browser:
        page = save_scan_page(Path(folder) / "page.html", viewer_report(viewer_scan()))
        for name in PICTURES:
            small = picture(browser, page, name).quantize(COLOURS, dither=Image.Dither.NONE)
            small.save(FOLDER / f"{name}.png", optimize=True)
            print(f"{name}: {(FOLDER / f'{name}.png').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
