"""The viewer looks as in the pictures of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from headwise.reports.page import save_scan_page
from tests.reports.browser import Chromium, needs_a_browser
from tests.reports.viewer_scans import viewer_report, viewer_scan
from tools.viewer_pictures import FOLDER, PICTURES, differing_pixels, picture

pytestmark = [needs_a_browser, pytest.mark.slow]

# Of all pixels: letters that a font draws otherwise are about so many, a part that moved is more.
LIMIT = 0.03


@pytest.mark.parametrize("name", PICTURES)
def test_the_viewer_looks_as_documented(browser: Chromium, tmp_path: Path, name: str) -> None:
    page = save_scan_page(tmp_path / "page.html", viewer_report(viewer_scan()))
    expected = Image.open(FOLDER / f"{name}.png").convert("RGB")
    shown = picture(browser, page, name)
    assert differing_pixels(shown, expected) <= LIMIT, "look, then: python -m tools.viewer_pictures"
    moved = Image.new("RGB", shown.size, "white")
    moved.paste(shown, (0, 24))
    assert differing_pixels(moved, expected) > LIMIT
