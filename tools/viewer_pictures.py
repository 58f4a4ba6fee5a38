"""Write the pictures of the viewer in the documentation: ``make pictures``.

One picture is the page of the trained encoder on the text that ships. The other pages are those of
the tests' seeded builder. A test compares all with the files.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from headwise import scan
from headwise.cli.scan import ScanOptions, run_scan_with_progress
from headwise.models import minilm, tiny
from headwise.reports.page import save_scan_page
from tests.reports.browser import Chromium, chromium
from tests.reports.viewer_scans import viewer_report, viewer_scan

IMAGES = Path(__file__).parents[1] / "docs" / "images"
FIGURE = IMAGES / "viewer" / "figure.png"
COLOURS = 256  # of a picture in the documentation
ENCODER = "all-MiniLM-L6-v2"
# file -> (options of the browser, address in the page)
PICTURES: dict[str, tuple[dict[str, Any], str]] = {
    # The head that links a pronoun to its noun, and what the pronoun looks at in all heads.
    "scan": ({"width": 1440}, "#h=1.3&t=70&v=links"),
    "scan-dark": ({"width": 1440, "color_scheme": "dark"}, "#h=1.3&t=70&v=links"),
    "viewer/light": ({}, "#h=1.0&t=7"),
    "viewer/light-dark": ({"color_scheme": "dark"}, "#h=1.0&t=7"),
    "viewer/compare": ({}, "#h=1.0&o=0.2.3&m=diff"),
    "viewer/maps": ({"width": 900}, "#h=1.0&v=maps"),
    "viewer/phone-heads": ({"width": 390, "height": 844}, "#h=1.0&p=heads"),
    "viewer/phone-text": ({"width": 390, "height": 844}, "#h=1.0&p=text&t=7"),
}


def save_page(name: str, folder: Path) -> Path:
    """Write the page of a picture into a folder."""
    page = folder / "page.html"
    if not name.startswith("scan"):
        return save_scan_page(page, viewer_report(viewer_scan()))
    options = ScanOptions(model_dir=minilm.model_folder(), page=page)
    return save_scan_page(page, replace(run_scan_with_progress(options), title=ENCODER))


def picture(browser: Chromium, name: str) -> Image.Image:
    """Return a picture of the viewer."""
    options, address = PICTURES[name]
    with TemporaryDirectory() as folder:
        page = save_page(name, Path(folder))
        with browser.open(page, address=address, **options) as opened:
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
    save_figure(FIGURE)
    with chromium() as browser:
        for name in PICTURES:
            file = IMAGES / f"{name}.png"
            small = picture(browser, name).quantize(COLOURS, dither=Image.Dither.NONE)
            small.save(file, optimize=True)
            print(f"{name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
