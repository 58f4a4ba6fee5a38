"""The viewer on other screens, on paper, and with long texts; and all ways in are in sight."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwise.reports import page as scan_page
from headwise.reports.page import render_scan_page, save_scan_page
from tests.quick import others_extra
from tests.reports.browser import Chromium, Opened, needs_a_browser
from tests.reports.viewer_scans import SCALARS, gpt2_sized, large, viewer_report, viewer_scan

pytestmark = needs_a_browser

LENGTH = 640
MOST_PAGES = 4


# ---- screens -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("width", others_extra([1400, 900, 390], quick=[390]))
@pytest.mark.parametrize("scheme", others_extra(["light", "dark"], quick=["light"]))
def test_widths(browser: Chromium, path: Path, width: int, scheme: str) -> None:
    touch = width == 390
    with browser.open(path, width=width, color_scheme=scheme, has_touch=touch) as opened:
        page = opened.page
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if touch:
            for tab in ("heads", "facts", "text", "map"):
                page.click(f'[data-tab="{tab}"] >> nth=-1')
                opened.wait(f"s.tab === '{tab}'")
                assert page.locator(f"section.{tab}").is_visible()
                # Under the heads and under the map the text stays in sight.
                assert page.locator("section:visible").count() == (
                    2 if tab in ("heads", "map") else 1
                )
        assert opened.complaints == []


@pytest.mark.parametrize("width", others_extra([1400, 1100], quick=[1100]))
def test_every_way_in_is_in_sight(browser: Chromium, tmp_path: Path, width: int) -> None:
    """A scan in which a head stands out by each statistic."""
    scan = viewer_scan()
    for number, name in enumerate(SCALARS):
        scan.layer_scans[0].summaries[name]["sum"][number] = 0.9 if "_" in name else 300.0
    with browser.open(
        save_scan_page(tmp_path / "page.html", viewer_report(scan)), width=width
    ) as opened:
        ways = opened.page.locator(".way")
        assert ways.count() >= len(SCALARS)
        box = opened.page.locator(".ways").bounding_box()
        assert box is not None
        for way in ways.all():
            own = way.bounding_box()
            assert own is not None
            assert own["y"] >= box["y"]
            assert own["y"] + own["height"] <= box["y"] + box["height"] + 1
        assert opened.page.evaluate("document.documentElement.scrollHeight <= innerHeight")


@pytest.mark.slow
def test_the_chosen_sentence_is_in_sight_on_a_phone(browser: Chromium, tmp_path: Path) -> None:
    """The sentences are one row there; a tap on the edge of one shows all of it."""
    scan = viewer_scan()
    for number, name in enumerate(SCALARS):
        scan.layer_scans[0].summaries[name]["sum"][number] = 0.9 if "_" in name else 300.0
    path = save_scan_page(tmp_path / "page.html", viewer_report(scan))
    with browser.open(path, width=390, has_touch=True) as opened:
        row, way = opened.page.locator(".ways"), opened.page.locator(".way").nth(1)
        before, box = way.bounding_box(), row.bounding_box()
        assert before is not None
        assert box is not None
        assert before["x"] + before["width"] > box["x"] + box["width"]
        opened.page.touchscreen.tap(before["x"] + 10, before["y"] + 10)
        opened.poll("document.querySelectorAll('.way')[1].ariaPressed === 'true'")
        after = way.bounding_box()
        assert after is not None
        assert box["x"] <= after["x"]
        assert after["x"] + after["width"] <= box["x"] + box["width"]


@pytest.mark.slow
def test_weight_beyond_the_offsets_is_said_first(browser: Chromium, tmp_path: Path) -> None:
    scan = viewer_scan()
    profile = scan.layer_scans[1].summaries["offset_profile"]
    profile["sum"][2] *= 0.1 / (profile["sum"][2] / profile["count"][2]).sum()
    path = save_scan_page(tmp_path / "page.html", viewer_report(scan))
    with browser.open(path, address="#h=1.2") as opened:
        opened.poll("headwise.app.loaded !== null")
        text = opened.page.inner_text("[data-part=profile]")
        assert "Most of the weight, 90 %, is farther away." in text


@pytest.mark.slow
def test_the_chosen_head_is_in_sight_and_its_column_is_named(
    browser: Chromium, tmp_path: Path
) -> None:
    scan = viewer_scan(layers=32, heads=32, length=100, top=0, cells=16)
    path = save_scan_page(tmp_path / "page.html", viewer_report(scan))
    with browser.open(path, address="#s=induction&h=20.30", width=1150) as opened:
        opened.poll("document.querySelector('[data-id=\"20.30\"]') !== null")
        grid, cell, number, layer = (
            opened.page.locator(part).bounding_box()
            for part in (
                ".cells",
                '[data-id="20.30"]',
                ".numbers .column >> nth=30",
                ".cells .row:nth-child(22) .number",
            )
        )
        assert grid is not None
        assert cell is not None
        assert number is not None
        assert layer is not None
        assert grid["x"] <= cell["x"] <= grid["x"] + grid["width"] - cell["width"]
        assert grid["y"] <= cell["y"] <= grid["y"] + grid["height"] - cell["height"]
        # The numbers stay at the edges while the heads scroll.
        assert abs(number["x"] - cell["x"]) < 1
        assert grid["y"] <= number["y"] <= grid["y"] + 4
        assert abs(layer["y"] - cell["y"]) < 4
        assert grid["x"] <= layer["x"] + 3 <= grid["x"] + 4
        assert opened.page.locator(".cells .row:nth-child(22) .number").inner_text() == "20"


@pytest.mark.slow
def test_a_page_of_16384_tokens_is_small_in_the_browser(browser: Chromium, tmp_path: Path) -> None:
    with browser.open(save_scan_page(tmp_path / "page.html", gpt2_sized())) as opened:
        opened.do("headwise.app.pin(9000)", "s.token === 9000")
        opened.do("headwise.app.set({ search: 'rabbit' })", "s.parts.results > 100")
        assert opened.page.evaluate("document.querySelectorAll('*').length") <= 3000
        assert opened.page.locator('[data-t="9000"]').is_visible()
        # Of a head that does not stand out the first key is named, and the heads that have more.
        opened.do("headwise.app.choose({ layer: 3, head: 7 })", "s.head === 7")
        opened.poll("headwise.state().parts.summary.includes(' looks most at ')")
        opened.page.click(".command summary")
        held = opened.page.inner_text(".command p")
        assert held.startswith("This page holds the largest weight of every token for all heads,")
        assert "the 4 largest of heads 0.3, 1.2, " in held


@pytest.mark.slow
def test_models_of_a_page_are_one_click_apart(browser: Chromium, tmp_path: Path) -> None:
    titles = ("one", "two", "three", "four", "five")
    reports = [viewer_report(viewer_scan(top=0), title=title) for title in titles]
    with browser.open(save_scan_page(tmp_path / "two.html", *reports[:2])) as opened:
        opened.page.click("[data-part=report] button:has-text('two')")
        opened.wait("s.report === 1")
        assert opened.page.inner_text("[data-part=report] [aria-pressed=true]") == "two"
        assert opened.page.locator("h1").text_content() == "two"
    with browser.open(save_scan_page(tmp_path / "many.html", *reports)) as opened:
        opened.page.select_option("select[data-part=report]", label="four")
        opened.wait("s.report === 3")


# ---- paper ---------------------------------------------------------------------------------------


def pages_of(pdf: bytes) -> int:
    return pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ")


PRINTED: dict[str, Callable[[], str]] = {
    "viewer": lambda: render_scan_page(viewer_report(viewer_scan())),
    "144 heads": lambda: render_scan_page(gpt2_sized(2048)),
    "1,024 heads": lambda: render_scan_page(large(2048)),
    "two models": lambda: render_scan_page(
        viewer_report(viewer_scan(layers=6, heads=12)), viewer_report(viewer_scan(layers=4))
    ),
    "static": lambda: scan_page.render_static(gpt2_sized(2048)),
}


@pytest.mark.parametrize("case", others_extra(PRINTED, "viewer", "1,024 heads", "static"))
def test_print_takes_at_most_four_pages(browser: Chromium, tmp_path: Path, case: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(PRINTED[case](), "utf-8")
    for script, scheme in itertools.product((True, False), ("light", "dark")):
        waits = script and case != "static"
        with browser.open(path, script=script, waits=waits, color_scheme=scheme) as opened:
            assert 1 <= pages_of(opened.page.pdf(format="A4")) <= MOST_PAGES
            opened.page.emulate_media(media="print", color_scheme=scheme)
            ink = opened.page.evaluate("getComputedStyle(document.body).color")
            assert ink == "rgb(29, 33, 38)"  # dark on white paper


def test_paper_says_what_is_drawn_and_what_a_token_looks_at(opened_on_paper: Opened) -> None:
    page = opened_on_paper.page
    text = page.inner_text(".app")
    assert "Weight on the token before: per cent of the weight, colours from 0 to 100." in text
    assert "at 7 looks at" in text
    assert page.locator('[data-t="7"]').is_visible()
    assert not page.locator("select:visible").count()
    kept = page.evaluate(
        "[...document.querySelectorAll('.cell, .box canvas, .t, .swatch')]"
        ".every((e) => getComputedStyle(e).printColorAdjust === 'exact')"
    )
    assert kept
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture
def opened_on_paper(browser: Chromium, path: Path) -> Iterator[Opened]:
    with browser.open(path, address="#s=previous_token&h=1.0&t=7", width=718) as opened:
        opened.poll("document.querySelector('[data-t=\"7\"].pinned') !== null")
        opened.page.emulate_media(media="print")
        yield opened
