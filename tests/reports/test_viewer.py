"""The viewer in a real browser: what is clicked, typed and pointed at, and what it then shows."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.reports.images import viridis_colour
from headwise.reports.page import save_scan_page
from headwise.scanning.result import HeadScan
from tests.quick import others_extra, others_slow
from tests.reports.browser import Chromium, Opened, needs_a_browser
from tests.reports.viewer_scans import WORDS, viewer_report, viewer_scan

pytestmark = needs_a_browser

MAP = "[data-part=map] canvas"
LENGTH = 512
LEAST = 0.01  # that is lit
HEAD = "s.layer === {} && s.head === {}"


@pytest.fixture(scope="module")
def scan() -> HeadScan:
    return viewer_scan(length=LENGTH)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, scan: HeadScan) -> Path:
    return save_scan_page(tmp_path_factory.mktemp("viewer") / "page.html", viewer_report(scan))


@pytest.fixture
def opened(browser: Chromium, path: Path) -> Iterator[Opened]:
    with browser.open(path) as opened:
        yield opened
        assert opened.complaints == []
        assert [address.partition("#")[0] for address in opened.requests] == [path.as_uri()]


def choose(opened: Opened, layer: int, head: int) -> None:
    opened.page.click(f'[data-id="{layer}.{head}"]')
    opened.wait(HEAD.format(layer, head))


# ---- the ways in ---------------------------------------------------------------------------------


def test_the_first_view_is_the_first_head_that_stands_out(opened: Opened) -> None:
    page, state = opened.page, opened.state()
    first = page.locator("[data-part=standouts] button").first
    assert first.get_attribute("aria-pressed") == "true"
    assert first.get_attribute("data-head") == f"{state['layer']}.{state['head']}"
    assert first.get_attribute("data-statistic") == state["statistic"]
    page.click('[data-part=standouts] button:has-text("induction")')
    opened.wait("s.statistic === 'induction' && s.layer === 1 && s.head === 2")
    opened.poll("document.querySelector('[data-id=\"1.2\"]').ariaPressed === 'true'")
    assert "92 %" in page.inner_text("[data-part=facts]")


def test_one_screen_without_scrolling(opened: Opened) -> None:
    sizes = opened.page.evaluate(
        "[document.documentElement.scrollHeight, innerHeight, document.documentElement.scrollWidth,"
        " innerWidth]"
    )
    assert sizes == [900, 900, 1400, 1400]
    definition = opened.page.locator("[data-part=definition]").bounding_box()
    assert definition is not None
    assert definition["y"] + definition["height"] <= 900
    names = opened.page.locator("[data-part=map] .axis-name").all_text_contents()
    assert sorted(names) == ["keys →", "queries ↓"]


@pytest.mark.slow
@pytest.mark.parametrize("head", others_slow([0, 3], 3))
def test_offsets_have_an_axis_that_they_fill(opened: Opened, scan: HeadScan, head: int) -> None:
    choose(opened, 1, head)
    opened.load()
    page, most = opened.page, float(scan["offset_profile"][1, head].nan_to_num().max())
    heights = (
        "[...document.querySelectorAll('[data-part=profile] rect')]"
        ".map((bar) => Number(bar.getAttribute('height')))"
    )
    axis = page.locator("[data-part=profile] text").last
    end = float((axis.text_content() or "").removesuffix(" %")) / 100
    assert end == min(each for each in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if each >= most)
    assert max(page.evaluate(heights)) == pytest.approx(68 * most / end, rel=1e-2)
    assert "Outside these offsets: " in page.inner_text("[data-part=profile]")


def test_statistics_orders_and_filters(opened: Opened, scan: HeadScan) -> None:
    page = opened.page
    page.select_option('[aria-label="statistic"]', "entropy")
    opened.wait("s.statistic === 'entropy'")
    cells = page.locator("[data-part=grid] .cell").all_inner_texts()
    assert cells == [f"{value:.1f}" for value in scan["entropy"].flatten().tolist()]
    page.select_option('[aria-label="order"]', "value")
    opened.wait("s.order === 'value'")
    names = page.locator("[data-part=grid] .cell b").all_inner_texts()
    top = scan.top("entropy", 15)
    assert names == [f"{head.layer_index}.{head.head}" for head in top]
    page.fill('[aria-label="filter"]', "> 4")
    opened.wait("s.filter === '> 4'")
    assert page.locator("[data-part=grid] .cell").count() == int((scan["entropy"] > 4).sum())
    page.fill('[aria-label="filter"]', "??")
    opened.wait("s.filter === '??'")
    assert page.locator('[aria-label="filter"]').get_attribute("aria-invalid") == "true"
    page.fill('[aria-label="filter"]', "")
    page.select_option('[aria-label="order"]', "maps")
    opened.wait("s.order === 'maps'")
    assert page.locator("[data-part=grid] .cell canvas").count() == 15


# ---- a token and the map -------------------------------------------------------------------------


def lit_keys(scan: HeadScan, query: int) -> list[tuple[int, float]]:
    """The stored keys of a query of layer 1, head 0."""
    summary = scan.layer_scans[1].summaries["top_keys_of_every_query"]
    keys, shares = summary["key"][0, query].tolist(), summary["share"][0, query].tolist()
    return [(key, share) for key, share in zip(keys, shares, strict=True) if share > 0]


def test_a_pinned_token_lights_its_top_keys(opened: Opened, scan: HeadScan) -> None:
    choose(opened, 1, 0)
    opened.page.click('[data-t="7"]')
    opened.wait("s.token === 7")
    lit = opened.state()["lit"]
    assert lit["exact"] == "top"
    answer = opened.page.locator(".summary")
    assert answer.evaluate("(p) => p.scrollWidth <= p.clientWidth")
    assert answer.inner_text().startswith("1.0: ")
    seen = [(entry["first"], entry["weight"]) for entry in lit["entries"]]
    for (key, weight), (expected, share) in zip(seen, lit_keys(scan, 7), strict=True):
        assert key == expected
        assert abs(weight**0.5 - share**0.5) <= 0.5 / 255 + 1e-6
        classes = opened.page.locator(f'[data-t="{key}"]').get_attribute("class") or ""
        assert ("lit-" in classes) == (weight >= LEAST)
    assert "pinned" in (opened.page.locator('[data-t="7"]').get_attribute("class") or "")
    assert "largest weight" in opened.page.inner_text("[data-part=badge]")


def test_the_queries_that_look_at_a_token(opened: Opened, scan: HeadScan) -> None:
    choose(opened, 1, 0)
    opened.page.click('[data-direction="queries"]')
    opened.page.click('[data-t="3"]')
    opened.wait("s.token === 3 && s.direction === 'queries'")
    lit = {entry["first"] for entry in opened.state()["lit"]["entries"]}
    expected = {q for q in range(LENGTH) if 3 in [key for key, _ in lit_keys(scan, q)]}
    assert lit == expected != set()


@pytest.mark.slow
def test_a_head_without_top_keys_shows_blocks_and_the_command(opened: Opened) -> None:
    choose(opened, 1, 3)
    opened.page.click('[data-t="7"]')
    opened.wait("s.token === 7")
    state = opened.state()
    assert state["lit"]["exact"] == "block"
    assert opened.page.inner_text("[data-part=badge]").startswith("Map: blocks of 4 tokens.")
    opened.page.click(".command summary")
    assert opened.page.inner_text(".command code") == "headwise scan FOLDER --top-keys 1.3"


def test_pointing_previews_and_leaving_goes_back(opened: Opened) -> None:
    choose(opened, 1, 0)
    opened.page.click('[data-t="7"]')
    opened.wait("s.token === 7")
    opened.page.hover('[data-t="9"]')
    opened.poll("headwise.app.light.lights.token === 9")
    opened.page.hover("h1")
    opened.poll("headwise.app.light.lights.token === 7")


@pytest.mark.slow
def test_a_cell_of_the_map_says_its_tokens_and_value(opened: Opened, scan: HeadScan) -> None:
    choose(opened, 0, 1)
    box = opened.page.locator(MAP).first.bounding_box()
    assert box is not None
    row, col, cells = 90, 45, 128
    cell = box["width"] / cells
    opened.page.mouse.click(box["x"] + (col + 0.5) * cell, box["y"] + (row + 0.5) * cell)
    opened.wait("s.token !== null")
    state = opened.state()
    facts = state["parts"]["cell"]
    assert facts["queries"] == [360, 363]
    assert facts["keys"] == [180, 183]
    expected = float(scan["map"][0, 1, row, col])
    assert abs(facts["value"] ** 0.5 - expected**0.5) <= 0.5 / 255 + 1e-6
    assert state["token"] == 360
    assert "query 360 to 363" in state["parts"]["readout"]
    # The text has scrolled to the query.
    assert opened.page.locator('[data-t="360"]').is_visible()


def test_the_colours_of_the_map_are_the_weights(opened: Opened, scan: HeadScan) -> None:
    choose(opened, 0, 1)
    weights = scan["map"][0, 1]
    places = [(100, 50), (100, 100), (20, 110), (3, 2), (64, 0), (64, 64)]
    colours = opened.page.evaluate(
        """(places) => {
          const canvas = document.querySelector("[data-part=map] canvas");
          const { width, height } = canvas;
          const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
          const at = (n, size) => Math.floor(((n + 0.5) / 128) * size);
          return places.map(([row, col]) => {
            const start = 4 * (at(row, height) * width + at(col, width));
            return [...data.slice(start, start + 3)];
          });
        }""",
        places,
    )
    for (row, col), colour in zip(places, colours, strict=True):
        expected = viridis_colour(float(weights[row, col]) ** 0.5)
        # Two tables of viridis, and the byte in which the weight is stored.
        assert max(abs(a - b) for a, b in zip(colour, expected, strict=True)) <= 6


def test_zoom_shows_single_tokens(opened: Opened) -> None:
    choose(opened, 1, 0)
    opened.do("headwise.app.set({ zoom: [20, 0.9, 0.9] })", "s.zoom[0] === 20")
    assert "Squares: the 4 largest weights" in opened.state()["parts"]["resolution"]
    opened.page.dblclick(MAP, position={"x": 50, "y": 50})
    opened.wait("s.zoom[0] === 1")
    assert "Squares" not in opened.state()["parts"]["resolution"]


@pytest.mark.slow
def test_a_drawing_beside_the_wheel_keeps_the_zoom(opened: Opened) -> None:
    opened.do(
        """(() => {
          const canvas = document.querySelector("[data-part=map] canvas");
          const { left, top } = canvas.getBoundingClientRect();
          const turn = { deltaY: -400, cancelable: true, clientX: left + 90, clientY: top + 90 };
          canvas.dispatchEvent(new WheelEvent("wheel", turn));
          for (const part of headwise.app.parts) part.update(headwise.app.loaded);
        })()""",
        "s.zoom[0] > 1.5",
    )


# ---- search, addresses, keys ---------------------------------------------------------------------


def test_search(opened: Opened, scan: HeadScan) -> None:
    page = opened.page
    page.keyboard.press("/")
    page.keyboard.type("RABBIT")
    ids = scan.texts[0].ids.tolist()
    places = [n for n, token in enumerate(ids) if WORDS[token] == " rabbit"]
    opened.wait(f"s.parts.results === {len(places)}")
    page.keyboard.press("Enter")
    opened.wait(f"s.token === {places[0]}")
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    opened.wait(f"s.token === {places[1]}")
    page.keyboard.press("N")
    opened.wait(f"s.token === {places[0]}")
    page.fill("[data-part=search] input", "#321")
    opened.wait("s.parts.results === 1")
    page.keyboard.press("Enter")
    opened.wait("s.token === 321")
    page.click('[data-t="321"]')  # a click on what was found keeps it
    assert opened.state()["token"] == 321
    page.click('[data-t="321"]')
    opened.wait("s.token === null")
    page.fill("[data-part=search] input", "white whale")
    opened.page.wait_for_selector("text=not in the text")


@pytest.mark.slow
def test_an_address_is_a_view_and_back_goes_back(browser: Chromium, path: Path) -> None:
    address = "#s=entropy&h=2.4&t=17&d=queries&z=4,0.25,0.25"
    with browser.open(path, address=address) as opened:
        state = opened.state()
        assert (state["layer"], state["head"], state["statistic"]) == (2, 4, "entropy")
        assert (state["token"], state["direction"], state["zoom"]) == (
            17,
            "queries",
            [4, 0.25, 0.25],
        )
        choose(opened, 0, 1)
        choose(opened, 0, 2)
        opened.page.go_back()
        opened.wait(HEAD.format(0, 1))
        opened.page.go_back()
        opened.wait(HEAD.format(2, 4) + " && s.token === 17")
        opened.page.go_forward()
        opened.wait(HEAD.format(0, 1))
    with browser.open(path, address="#s=nothing&h=99.1&t=x&m=diff&z=0,1") as opened:
        assert opened.state()["layer"] < 3
        assert opened.complaints == []


def test_keys(opened: Opened) -> None:
    page = opened.page
    choose(opened, 1, 2)
    page.keyboard.press("ArrowRight")
    opened.wait(HEAD.format(1, 3))
    page.keyboard.press("ArrowUp")
    opened.wait(HEAD.format(0, 3))
    page.keyboard.press("]")
    opened.wait(HEAD.format(0, 4))
    page.keyboard.press("]")
    opened.wait(HEAD.format(1, 0))
    page.keyboard.press("d")
    opened.wait("s.direction === 'queries'")
    page.focus(MAP)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    opened.wait("s.token !== null")
    page.keyboard.press("Escape")
    opened.wait("s.token === null")
    page.keyboard.press("?")
    assert page.is_visible("dialog[open]")
    page.keyboard.press("Escape")
    assert not page.is_visible("dialog[open]")


@pytest.mark.slow
def test_escape_closes_what_is_said_about_the_page(opened: Opened) -> None:
    page = opened.page
    opened.do("headwise.app.set({ token: 7 })", "s.token === 7")
    page.click(".about summary")
    assert page.locator(".about[open]").count() == 1
    page.click(".about p >> nth=0")
    page.keyboard.press("Escape")
    assert page.locator(".about[open]").count() == 0
    assert page.evaluate("document.activeElement.matches('.about summary')")
    assert opened.state()["token"] == 7
    page.keyboard.press("Escape")
    opened.wait("s.token === null")


@pytest.mark.slow
def test_at_most_15_tab_stops_before_the_text(opened: Opened) -> None:
    stops = 0
    while not opened.page.evaluate("document.activeElement.closest('.scroller') !== null"):
        opened.page.keyboard.press("Tab")
        stops += 1
        assert stops <= 16
    assert stops > 5


# ---- comparing, and files ------------------------------------------------------------------------


@pytest.mark.slow
def test_two_heads_are_compared(opened: Opened, scan: HeadScan) -> None:
    choose(opened, 0, 1)
    opened.page.click('[data-id="2.3"]', modifiers=["Shift"])
    opened.wait("s.mode === 'diff'")
    state = opened.state()
    assert state["other"] == {"scan": 0, "layer": 2, "head": 3}
    opened.load()
    values = opened.page.evaluate("[...headwise.app.loaded.map.values]")
    expected = (scan["map"][2, 3] - scan["map"][0, 1]).flatten()
    # Each of the two is right to half a step of the square root, so a value w to about √w / 255.
    assert (torch.tensor(values) - expected).abs().max() <= 2 * (1 / 255 + 0.25 / 255**2)
    opened.page.click('[data-mode="B"]')
    opened.wait("s.shown === 'layer 2, head 3'")
    opened.page.keyboard.press("x")
    opened.wait("s.mode === 'both'")
    opened.page.keyboard.press("x")
    opened.wait("s.mode === 'diff'")


@pytest.mark.slow
def test_two_maps_share_their_cursor_their_zoom_and_the_token(
    opened: Opened, scan: HeadScan
) -> None:
    page = opened.page
    opened.do("headwise.app.choose({ layer: 0, head: 1 })")
    opened.do("headwise.app.compareWith({ scan: 0, layer: 2, head: 3 })", "s.mode === 'diff'")
    page.click('[data-mode="both"]')
    opened.wait("s.mode === 'both'")
    boxes = page.locator("[data-part=map] .box")
    places = [boxes.nth(n).locator("canvas").first.bounding_box() for n in (0, 1)]
    first, second = places
    assert first is not None
    assert second is not None
    assert first["x"] + first["width"] < second["x"]  # side by side
    assert (first["y"], first["width"]) == (second["y"], second["width"])
    row, col, cell = 100, 20, second["width"] / 128

    def place(box: Any) -> tuple[int, int]:
        """A whole pixel of the cell, since a click has no parts of pixels."""
        assert cell > 1
        return math.ceil(box["x"] + col * cell), math.ceil(box["y"] + row * cell)

    page.mouse.move(*place(second))
    opened.poll("headwise.state().parts.readout.includes(', 2.3 ')")
    cells = opened.state()["parts"]["cells"]
    for shown, (layer, head) in zip(cells, ((0, 1), (2, 3)), strict=True):
        assert (shown["queries"], shown["keys"]) == ([400, 403], [80, 83])
        expected = float(scan["map"][layer, head, row, col])
        assert abs(shown["value"] ** 0.5 - expected**0.5) <= 0.5 / 255 + 1e-6
    page.mouse.click(*place(first))
    opened.wait("s.token === 400")
    opened.poll("headwise.app.beside.light.lights.token === 400")
    opened.do("headwise.app.set({ zoom: [4, 0.25, 0.25] })", "s.zoom[0] === 4")
    zooms = "[...document.querySelectorAll('.box canvas:first-child')].map((c) => c.__zoom.x)"
    before = page.evaluate(zooms)
    # While the drag goes on, both maps move.
    page.mouse.move(first["x"] + 60, first["y"] + 60)
    page.mouse.down()
    page.mouse.move(first["x"] + 90, first["y"] + 60, steps=4)
    opened.poll(f"{zooms}[0] === {before[0]} + 30 && {zooms}[1] === {before[1]} + 30")
    page.mouse.up()
    page.mouse.wheel(0, -600)
    opened.wait("s.zoom[0] > 4")
    opened.poll(
        "(() => { const t = [...document.querySelectorAll('.box canvas:first-child')]"
        ".map((c) => c.__zoom); return t[0].k > 1 && t[0].k === t[1].k && t[0].x === t[1].x; })()"
    )


def test_two_scans_are_compared(browser: Chromium, scan: HeadScan, tmp_path: Path) -> None:
    moved = viewer_scan(length=LENGTH)
    moved.layer_scans[1].summaries["induction"]["sum"][2] = 0.1
    report = viewer_report(scan, second=moved, names=("before", "after"))
    with browser.open(save_scan_page(tmp_path / "two.html", report)) as opened:
        assert "15 heads · A is before, B is after · " in opened.page.inner_text(".top")
        # The page opens on the largest change, with the grid by total change.
        total = float(scan.diff(moved).apart[1, 2])
        card = f"1.2 induction 92 % to 10 % (total {total:.3g})"
        assert opened.page.inner_text(".way").strip() == card
        assert opened.page.locator(".way canvas").count() == 2
        assert opened.page.locator(".way").get_attribute("aria-pressed") == "true"
        state = opened.state()
        assert (state["statistic"], state["layer"], state["head"]) == ("apart", 1, 2)
        assert (state["mode"], state["other"]) == ("both", {"scan": 1, "layer": 1, "head": 2})
        cells = opened.page.locator("[data-part=grid] .cell").all_inner_texts()
        changed = scan.diff(moved).apart.flatten().tolist()
        assert [float(cell) for cell in cells] == pytest.approx(changed, abs=0.05)
        opened.page.click(".way")
        opened.wait("s.statistic === 'induction' && s.mode === 'both'")
        assert opened.page.inner_text('[data-id="1.2"]') == "−82"
        assert opened.page.inner_text('[data-id="1.3"]') == "0"
        choose(opened, 1, 2)
        assert opened.state()["other"]["scan"] == 1
        assert opened.page.inner_text("[data-part=compare] h2").endswith("after")
        assert opened.complaints == []


@pytest.mark.slow
@pytest.mark.parametrize("width", others_extra([1150, 800], quick=[1150]))
def test_a_lit_token_moves_nothing(browser: Chromium, path: Path, width: int) -> None:
    with browser.open(path, width=width) as opened:
        choose(opened, 1, 1)
        opened.page.locator('[data-t="7"]').scroll_into_view_if_needed()
        parts = [opened.page.locator(each).first for each in (MAP, '[data-t="7"]')]
        before = [part.bounding_box() for part in parts]
        opened.page.hover('[data-t="7"]')
        opened.poll("document.querySelector('[data-part=badge]').textContent.includes('Token:')")
        assert [part.bounding_box() for part in parts] == before


@pytest.mark.slow
def test_nearly_equal_scans_look_equal(browser: Chromium, scan: HeadScan, tmp_path: Path) -> None:
    moved = viewer_scan(length=LENGTH)
    moved.layer_scans[1].summaries["induction"]["sum"][2] -= 0.001
    page = save_scan_page(tmp_path / "two.html", viewer_report(scan, second=moved))
    with browser.open(page) as opened:
        opened.page.select_option('[aria-label="statistic"]', "induction")
        opened.wait("s.statistic === 'induction' && s.mode === 'both'")
        assert "colours from −5 to 5" in opened.page.inner_text("[data-part=grid]")
