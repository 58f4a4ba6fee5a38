"""The screen: map, heads and text together in a window, and the text under each tab of a phone."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headwise import scan as scan_model
from headwise.models import tiny
from headwise.reports.page import save_scan_page
from headwise.reports.report import ScanReport
from headwise.scanning.statistics.maps import Map, TopKeysOfEveryQuery
from tests.quick import others_extra, others_slow
from tests.reports.browser import Chromium, Opened, needs_a_browser
from tests.reports.viewer_scans import gpt2_sized, viewer_report, viewer_scan

pytestmark = needs_a_browser

Box = tuple[float, float, float, float]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_scan_page(tmp_path_factory.mktemp("layout") / "large.html", gpt2_sized())


def box(opened: Opened, selector: str) -> Box:
    """Left, top, right and bottom of an element in the window."""
    made = opened.page.locator(selector).first.bounding_box()
    assert made is not None, selector
    return made["x"], made["y"], made["x"] + made["width"], made["y"] + made["height"]


def area(opened: Opened, selector: str) -> float:
    left, top, right, bottom = box(opened, selector)
    return (right - left) * (bottom - top)


def is_inside(inner: Box, width: int, height: int) -> bool:
    left, top, right, bottom = inner
    return left >= 0 and top >= 0 and right <= width and bottom <= height


WINDOWS = [(1280, 720), (1366, 768), (1440, 900), (1920, 1080)]


@pytest.mark.parametrize("page", others_slow(["path", "large"]))
@pytest.mark.parametrize(("width", "height"), others_extra(WINDOWS, quick=[(1280, 720)]))
def test_the_map_takes_a_fifth_of_the_window_beside_the_text(
    browser: Chromium, request: pytest.FixtureRequest, page: str, width: int, height: int
) -> None:
    with browser.open(request.getfixturevalue(page), width=width, height=height) as opened:
        assert area(opened, "[data-part=map] canvas") >= 0.2 * width * height
        for part in ("[data-part=map] canvas", ".text .scroller", "[data-part=grid] .cells"):
            assert is_inside(box(opened, part), width, height), part
        lines = box(opened, ".text .scroller")
        assert lines[3] - lines[1] >= 4 * 26


def test_the_heads_take_no_more_than_they_need(browser: Chromium, path: Path) -> None:
    with browser.open(path, width=1440, height=900) as opened:
        last = box(opened, "[data-part=grid] .cells .row:last-child")
        cells, text = box(opened, "[data-part=grid] .cells"), box(opened, ".text")
        assert cells[3] - last[3] < 8
        assert text[1] - cells[3] < 16


@pytest.mark.parametrize("width", others_extra([1440, 900, 390], quick=[390]))
def test_cards_are_one_row_that_scrolls(browser: Chromium, path: Path, width: int) -> None:
    with browser.open(path, width=width, height=844) as opened:
        cards = opened.page.locator("[data-part=standouts] button")
        tops = {round(card["y"]) for each in cards.all() if (card := each.bounding_box())}
        assert len(tops) == 1
        sizes = "[document.documentElement.scrollWidth, innerWidth]"
        assert opened.page.evaluate(sizes) == [width, width]


@pytest.mark.parametrize("tab", others_slow(["heads", "map"]))
def test_on_a_phone_the_text_stays_in_sight(browser: Chromium, path: Path, tab: str) -> None:
    with browser.open(path, width=390, height=844) as opened:
        opened.do(f"headwise.app.set({{ tab: '{tab}', token: 7 }})", f"s.tab === '{tab}'")
        opened.settle()
        part = {"heads": "[data-part=grid] .cells", "map": "[data-part=map] canvas"}[tab]
        for each in (part, ".text .summary", ".text .scroller"):
            assert is_inside(box(opened, each), 390, 844), each
        pinned = box(opened, ".text .t.pinned")
        lines = box(opened, ".text .scroller")
        assert lines[1] <= pinned[1]
        assert pinned[3] <= lines[3]


def test_in_a_narrow_window_map_and_text_share_the_first_screen(
    browser: Chromium, path: Path
) -> None:
    with browser.open(path, width=900, height=700) as opened:
        assert is_inside(box(opened, "[data-part=map] canvas"), 900, 700)
        assert is_inside(box(opened, ".text .scroller"), 900, 700)
        assert area(opened, "[data-part=map] canvas") >= 0.2 * 900 * 700
        for fact in range(3):
            assert is_inside(box(opened, f".facts dd >> nth={fact}"), 900, 700)


@pytest.mark.slow
def test_two_maps_leave_the_text_in_sight(browser: Chromium, tmp_path: Path) -> None:
    report = viewer_report(viewer_scan(), second=viewer_scan(), names=("before", "after"))
    page = save_scan_page(tmp_path / "two.html", report)
    for width, height in ((900, 700), (1400, 900)):
        with browser.open(page, width=width, height=height) as opened:
            assert opened.state()["mode"] == "both"
            maps = opened.page.locator("[data-part=map] .frame canvas:not(.over)").all()
            for each in maps:
                made = each.bounding_box()
                assert made is not None
                assert made["width"] >= 150
            text = box(opened, ".text .scroller")
            assert is_inside(text, width, height)
            assert text[3] - text[1] >= 3 * 26


@pytest.mark.parametrize("touch", [False, True])
def test_on_a_phone_the_map_takes_the_width(browser: Chromium, path: Path, touch: bool) -> None:
    options = {"has_touch": touch, "is_mobile": touch}
    with browser.open(path, width=390, height=844, address="#h=1.0&t=7", **options) as opened:
        left, top, right, bottom = box(opened, "[data-part=map] canvas")
        assert right - left == bottom - top >= 0.8 * 370


def test_what_is_said_about_the_page_moves_nothing(browser: Chromium, path: Path) -> None:
    with browser.open(path, width=390, height=844) as opened:
        before = box(opened, "[data-part=map] canvas")
        opened.page.click(".about summary")
        assert is_inside(box(opened, ".about .notes"), 390, 844)
        assert box(opened, "[data-part=map] canvas") == before


@pytest.mark.slow
@pytest.mark.parametrize("order", others_slow(["layers", "links"]))
@pytest.mark.parametrize("width", others_extra([900, 1280, 1440], quick=[900]))
def test_every_column_of_twelve_heads_is_in_sight(
    browser: Chromium, large: Path, width: int, order: str
) -> None:
    with browser.open(large, width=width, height=800, address=f"#t=9000&v={order}") as opened:
        cells = "document.querySelector('[data-part=grid] .cells')"
        sizes = opened.page.evaluate(f"[{cells}.scrollWidth, {cells}.clientWidth]")
        assert sizes[0] <= sizes[1]
        if order == "links":
            opened.wait("s.parts.links.all?.length === 144")
            cut = (
                "(all) => all.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.innerText)"
            )
            assert opened.page.locator(".cells .share").evaluate_all(cut) == []


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), others_slow([*WINDOWS, (900, 700)]))
def test_one_word_in_all_heads_moves_nothing(
    browser: Chromium, large: Path, width: int, height: int
) -> None:
    """The heads take the place of the map, and the pinned word stays under the pointer."""
    with browser.open(large, width=width, height=height, address="#t=9000") as opened:
        opened.poll("document.querySelector('.t.pinned') !== null")
        places = (".text .scroller", ".text .t.pinned")
        before = [box(opened, place) for place in places]
        left, top, right, _ = box(opened, "[data-part=map]")
        opened.page.click("[data-part=every-head]")
        opened.wait("s.parts.links.token === 9000")
        opened.settle()
        assert [box(opened, place) for place in places] == before
        heads = box(opened, "[data-part=grid]")
        assert heads[:2] == pytest.approx((left, top), abs=1)
        assert heads[2] >= right - 1
        small = box(opened, "[data-part=map] canvas")
        assert small[2] - small[0] >= 100
        assert is_inside(small, width, height)


@pytest.mark.slow
def test_columns_out_of_sight_fade_the_edge(browser: Chromium, large: Path) -> None:
    cells = "[data-part=grid] .cells"
    phone = {"width": 390, "height": 844, "has_touch": True, "is_mobile": True}
    with browser.open(large, address="#t=9000&v=links", **phone) as opened:
        opened.do("headwise.app.set({ tab: 'heads' })", "s.tab === 'heads'")
        opened.poll(f"document.querySelector('{cells}').matches('[data-more]')")
        mask = opened.page.locator(cells).evaluate("(all) => getComputedStyle(all).maskImage")
        assert mask.startswith("linear-gradient")
        opened.page.locator(cells).evaluate("(all) => { all.scrollLeft = all.scrollWidth; }")
        opened.poll(f"!document.querySelector('{cells}').matches('[data-more]')")
    with browser.open(large, width=1440, height=900) as opened:
        assert not opened.page.locator(f"{cells}[data-more]").count()


@pytest.mark.slow
def test_both_answers_about_a_token_are_in_sight(browser: Chromium, worded: Path) -> None:
    address = "#h=0.0&o=0.2.3&m=both&t=40"
    for width, height in SIZES:
        with browser.open(worded, width=width, height=height, address=address) as opened:
            opened.poll("document.querySelectorAll('.summary .answer').length === 2")
            summary = box(opened, ".summary")
            for n, name in enumerate(("0.0", "2.3")):
                line, most = (f".summary .answer >> nth={n}", ".entry >> nth=0")
                assert opened.page.inner_text(line).startswith(f"{name}: ")
                left, top, right, bottom = box(opened, f"{line} >> {most}")
                assert summary[0] <= left < right <= summary[2]
                assert summary[1] - 1 <= top < bottom <= summary[3] + 1


def test_a_quotation_mark_stands_in_single_ones(browser: Chromium, worded: Path) -> None:
    with browser.open(worded, address="#h=0.0&t=1") as opened:
        opened.poll("document.querySelectorAll('.summary .entry').length > 0")
        marks = [
            n
            for n in range(16)
            if opened.page.evaluate(f"headwise.app.loaded.keys.word(0, {n})") == "“"
        ]
        opened.do(f"headwise.app.set({{ token: {marks[0]} }})", f"s.token === {marks[0]}")
        opened.poll(f"headwise.app.light.lights.token === {marks[0]}")
        assert f"‘“’ at {marks[0]} looks at" in opened.page.inner_text(".summary")
        assert "““" not in opened.page.inner_text(".headwise")


@pytest.mark.slow
def test_no_cell_shows_left_of_the_number_of_its_layer(browser: Chromium, large: Path) -> None:
    with browser.open(large, width=390, height=844, has_touch=True, is_mobile=True) as opened:
        opened.do("headwise.app.set({ tab: 'heads' })", "s.tab === 'heads'")
        cells = opened.page.locator("[data-part=grid] .cells")
        cells.evaluate("(all) => { all.scrollLeft = 60; }")
        opened.settle()
        left, top, _, bottom = box(opened, "[data-part=grid] .cells .row:nth-child(2) .number")
        edge = cells.bounding_box()
        assert edge is not None
        clip = {"x": edge["x"], "y": top, "width": left + 20 - edge["x"], "height": bottom - top}
        paper = Image.open(io.BytesIO(opened.page.screenshot(clip=clip))).convert("RGB")
        left_of_it = np.asarray(paper)[:, : max(1, round(left - edge["x"])) + 3]
        assert np.ptp(left_of_it.reshape(-1, 3), axis=0).max() == 0


def test_another_scheme_draws_the_differences_again(browser: Chromium, path: Path) -> None:
    with browser.open(path, address="#h=1.0&o=0.2.3&m=diff") as opened:
        middle = "getComputedStyle(document.querySelectorAll('.map .swatch')[2]).backgroundColor"
        light = opened.page.evaluate(middle)
        opened.page.emulate_media(color_scheme="dark")
        opened.poll(f"{middle} !== '{light}'")


# The texts that an element on the way up cuts, that are wider than their block, or that leave the
# window. A text may end early where a title has it whole; the row of heads is one that scrolls.
CUT_TEXTS = """() => {
  const root = document.querySelector(".headwise"), all = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const isBlock = (each) => !["inline", "contents"].includes(getComputedStyle(each).display);
  const within = (rect, box) => rect.left >= box.left - 1 && rect.right <= box.right + 1;
  const fault = (text, rect) => {
    const parent = text.parentElement;
    const svg = parent.closest("svg");
    if (svg) return within(rect, svg.getBoundingClientRect()) ? null : "left of its drawing";
    let block = parent;
    while (!isBlock(block)) block = block.parentElement;
    if (!within(rect, block.getBoundingClientRect())) return "wider than its block";
    for (let at = parent; at !== root; at = at.parentElement) {
      const { overflowX, overflowY, display } = getComputedStyle(at);
      const box = at.getBoundingClientRect();
      if (display.startsWith("inline") || at.matches(".cells")) continue;
      const isOut = rect.right < box.left + 1 || rect.left > box.right - 1;
      if (overflowX === "auto" && isOut) return null; // of a card in another place of the row
      if (overflowX !== "visible" && !within(rect, box)) return `cut by ${at.className}`;
      const isHigh = rect.top < box.top - 2 || rect.bottom > box.bottom + 2;
      if (overflowY === "hidden" && isHigh) return `cut below by ${at.className}`;
    }
    const page = { left: 0, right: innerWidth };
    return parent.closest(".cells") || within(rect, page) ? null : "out of the window";
  };
  while (walker.nextNode()) {
    const text = walker.currentNode, parent = text.parentElement, words = text.data.trim();
    if (!words || !parent.checkVisibility() || parent.closest("option, .unseen")) continue;
    if (parent.closest("[title]")?.title.includes(words)) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const faults = [...range.getClientRects()].map((rect) => rect.width && fault(text, rect));
    const first = faults.find(Boolean);
    if (first) all.push(`${words.slice(0, 40)}: ${first}`);
  }
  return all;
}"""
SHOWN: dict[str, str] = {
    "head": "headwise.app.set({ token: 40 })",
    "zoomed": "headwise.app.set({ zoom: [4, 0, 0] })",
    "values": "headwise.app.set({ order: 'value', zoom: [1, 0, 0] })",
    "maps": "headwise.app.set({ order: 'maps' })",
    "links": "headwise.app.set({ order: 'links' })",
    "pair": "headwise.app.set({ second: 3 })",
    "strongest": "headwise.app.set({ order: 'strongest', second: null })",
    "search": "headwise.app.set({ order: 'layers', search: 'a' })",
    "layer": "headwise.app.chooseLayer(1)",
    "layers": "headwise.app.compareLayers(2)",
    "difference": "headwise.app.compareWith({ scan: 0, layer: 2, head: 3 })",
    "both": "headwise.app.set({ mode: 'both' })",
    "choosing": "headwise.app.choosing(true)",
    "about": "document.querySelector('.about').open = true",
    "export": "document.querySelector('[data-part=export-opener]').click()",
}
SIZES = [(1440, 900), (900, 700), (390, 844)]


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scan with every statistic and with long words."""
    model, ids = tiny.load(), tiny.encode("the quick brown fox jumps over the lazy dog. " * 2)[None]
    scan = scan_model(model, ids, statistics=["standard", Map(128), TopKeysOfEveryQuery()])
    words = ("conversations", "“", "Alice", "considering", ",", "daisy", "it", "waistcoat")
    report = ScanReport.of(scan, name_of=lambda token: words[token % len(words)])
    page = tmp_path_factory.mktemp("worded") / "page.html"
    return save_scan_page(page, replace(report, title="all-MiniLM-L6-v2-of-a-long-name"))


@pytest.mark.parametrize(("width", "height"), others_extra(SIZES, (390, 844)))
def test_no_text_is_cut(browser: Chromium, worded: Path, width: int, height: int) -> None:
    tabs = ("heads", "map", "facts", "text") if width < 700 else ("map",)
    faults = set()
    with browser.open(worded, width=width, height=height) as opened:
        for name, script in SHOWN.items():
            opened.page.evaluate(script)
            for tab in tabs:
                opened.do(f"headwise.app.set({{ tab: '{tab}' }}, 'replace')", f"s.tab === '{tab}'")
                opened.settle()
                cut = opened.page.evaluate(CUT_TEXTS)
                faults |= {f"{name}, {tab}: {each}" for each in cut}
        assert opened.complaints == []
    assert sorted(faults) == []


@pytest.mark.parametrize("width", others_slow([390, 900, 1280, 1440]))
def test_what_is_chosen_is_not_cut(browser: Chromium, large: Path, width: int) -> None:
    """A box is at least as wide as one that has room for what is chosen alone."""
    with browser.open(large, width=width, height=844, address="#t=9000&v=links") as opened:
        opened.do("headwise.app.set({ tab: 'heads' })", "s.tab === 'heads'")
        for box_ in opened.page.locator("[data-part=grid] select").all():
            cut = """(box) => {
              const free = box.cloneNode(true);
              free.value = box.value;
              free.style.cssText = "position: absolute; max-width: none; flex: none";
              box.parentElement.append(free);
              const wide = free.getBoundingClientRect().width;
              free.remove();
              return wide - box.getBoundingClientRect().width;
            }"""
            assert box_.evaluate(cut) < 1
