"""The viewer with scans that are awkward: hostile words, nothing to show, no numbers, one token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.reports.page import save_scan_page
from headwise.scanning.result import HeadScan
from tests.quick import others_slow
from tests.reports.browser import Chromium, needs_a_browser
from tests.reports.viewer_scans import HOSTILE, WORDS, viewer_report, viewer_scan

pytestmark = needs_a_browser


def without_texts(scan: HeadScan) -> HeadScan:
    layers = (replace(layer, query_text=None, key_text=None) for layer in scan.layer_scans)
    return replace(scan, texts=(), layer_scans=tuple(layers))


def nan_head(scan: HeadScan) -> HeadScan:
    scan.layer_scans[0].summaries["map"]["sum"][0] = torch.nan
    return scan


AWKWARD: dict[str, Any] = {
    "hostile": lambda: viewer_report(
        viewer_scan(words=(*HOSTILE, *WORDS)), words=(*HOSTILE, *WORDS), title=HOSTILE[1]
    ),
    "one-token": lambda: viewer_report(viewer_scan(layers=1, heads=1, length=1)),
    "no-texts": lambda: viewer_report(without_texts(viewer_scan())),
    "empty": lambda: viewer_report(replace(viewer_scan(), layer_scans=(), texts=())),
    "nan": lambda: viewer_report(nan_head(viewer_scan())),
}


@pytest.mark.parametrize("case", others_slow(AWKWARD, "hostile", "one-token"))
def test_awkward_scans(browser: Chromium, tmp_path: Path, case: str) -> None:
    path = save_scan_page(tmp_path / "page.html", AWKWARD[case]())
    with browser.open(path) as opened:
        assert opened.complaints == []
        assert opened.requests == [path.as_uri()]
        page = opened.page
        if case == "hostile":
            assert page.inner_text("h1") == HOSTILE[1]
            assert page.locator("img").count() == 0
            # A word that is longer than a line is drawn in parts.
            parts = page.locator(".t").evaluate_all(
                "(all) => all.map((e) => [e.dataset.t, e.textContent])"
            )
            shown = ["".join(text for t, text in parts if t == str(n)) for n in range(len(HOSTILE))]
            assert shown[0].startswith("</script><script>")
            assert shown[2] == "[U+202E]abc"
            assert shown[3] == "\\x00"
            assert shown[4].endswith("(10,000 characters)")
            assert shown[7] == "[U+D83D]"
        if case == "nan":
            page.click('[data-id="0.0"]')
            opened.wait("s.layer === 0 && s.head === 0")
            assert "no map of this head" in page.inner_text("[data-part=badge]")
        if case == "no-texts":
            assert "does not hold the text" in page.inner_text("[data-part=text]")
