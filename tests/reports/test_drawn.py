"""What is drawn: arcs and their rest, words at the axes, tints, dots, and cells with words."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise import scan as scan_model
from headwise.models import tiny
from headwise.reports.page import save_scan_page
from headwise.reports.report import ScanReport
from headwise.scanning.layer import ScannedText
from headwise.scanning.statistics.maps import Map
from headwise.scanning.written import WrittenText
from tests.reports.browser import Chromium, needs_a_browser
from tests.reports.viewer_scans import viewer_report, viewer_scan

pytestmark = needs_a_browser

SHORT = 30  # tokens
WORDS = ("suitcase", "[SEP]", "trophy", "large", "because", "it", "whatever", "said")


def page_of(folder: Path, *, length: int, heads: int = 12, **given: Any) -> Path:
    """A page with a map of one token a cell, all of whose weights are known."""
    scan = viewer_scan(layers=2, heads=heads, length=length, cells=length, top=0, words=WORDS)
    report = viewer_report(scan, **{"words": WORDS, **given})
    return save_scan_page(folder / "page.html", report)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(tmp_path_factory.mktemp("drawn"), length=SHORT)


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Head 0.0 looks at the first token from everywhere."""
    scan = viewer_scan(layers=2, heads=3, length=160, cells=160, top=0)
    values = scan.layer_scans[0].summaries["map"]["sum"]
    values[0] = 0
    values[0, :, 0] = torch.linspace(0.2, 0.9, 160)
    return save_scan_page(tmp_path_factory.mktemp("sink") / "page.html", viewer_report(scan))


# ---- arcs ----------------------------------------------------------------------------------------


def test_twelve_arcs_and_a_bar_for_the_rest_of_each_line(browser: Chromium, sink: Path) -> None:
    with browser.open(sink, address="#h=0.0&t=0&d=queries&p=text", height=900) as opened:
        page = opened.page
        opened.poll("document.querySelectorAll('.arcs path').length > 0")
        assert page.locator(".arcs path").count() == 12
        bars = page.locator(".arcs .rest")
        said = bars.locator("title").all_text_contents()
        drawn = page.evaluate(
            """[...document.querySelectorAll('.scroller .row')].map((row) =>
               [...row.querySelectorAll('.t')].map((each) => Number(each.dataset.t)))"""
        )
        inside = {token for row in drawn for token in row}
        lit = opened.state()["lit"]["entries"]
        rest = [e for e in lit if e["first"] in inside and e["first"] and e["weight"] >= 0.05][12:]
        assert sum(int(words.split()[1]) for words in said) == len(rest) > 20
        # The strongest arcs are the widest.
        widths = page.locator(".arcs path").evaluate_all(
            "(all) => all.map((x) => x.style.strokeWidth || x.getAttribute('stroke-width'))"
        )
        assert widths == sorted(widths, key=float, reverse=True)
        boxes = [box for bar in bars.all() if (box := bar.bounding_box())]
        top = min(boxes, key=lambda box: box["y"])
        page.mouse.move(top["x"] + top["width"] / 2, top["y"] + top["height"] / 2)
        opened.poll("document.querySelectorAll('.arcs path').length === 13")
        page.mouse.move(0, 0)
        opened.poll("document.querySelectorAll('.arcs path').length === 12")


def test_the_second_token_of_a_pair_has_its_arc_and_its_ring_under_one_per_cent(
    browser: Chromium, sink: Path
) -> None:
    with browser.open(sink, address="#h=1.0&t=40&p=map", height=900) as opened:
        weak = opened.page.evaluate(
            "headwise.app.light.lights.entries"
            ".filter((e) => e.weight < 0.01 && e.first > 20).at(-1).first"
        )
        pixels = """[...document.querySelector('.box .over').getContext('2d')
          .getImageData(0, 0, 2000, 2000).data].filter((x) => x).length"""
        before, arcs = opened.page.evaluate(pixels), opened.page.locator(".arcs path").count()
        opened.do(f"headwise.app.set({{ second: {weak} }})", f"s.second === {weak}")
        opened.settle()
        assert opened.page.evaluate(pixels) > before
        assert opened.page.locator(".arcs path").count() == arcs + 1


# ---- words at the axes ---------------------------------------------------------------------------


def test_a_short_text_has_its_words_at_rest(browser: Chromium, short: Path) -> None:
    with browser.open(short, width=1400, height=900) as opened:
        opened.poll("document.querySelectorAll('.map .axis text').length > 0")
        words = opened.page.locator(".map .axis text").all_text_contents()
        shown = [
            opened.page.evaluate(f"headwise.app.loaded.keys.word(0, {n})") for n in range(SHORT)
        ]
        whole = [str(word).strip() for word in shown]
        assert words[SHORT:] == whole
        # At the right end a word has the room of the box.
        assert words[: SHORT - 4] == whole[: SHORT - 4]
        pairs = zip(words[:SHORT], whole, strict=True)
        assert all(full.startswith(word.rstrip("…")) for word, full in pairs)
        outside = """[...document.querySelectorAll('.map .axis text')].filter((each) => {
          const [own, box] = [each, each.ownerSVGElement].map((x) => x.getBoundingClientRect());
          return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1;
        }).length"""
        assert opened.page.evaluate(outside) == 0


@pytest.mark.slow
def test_a_zoomed_map_has_words_at_both_sides(browser: Chromium, sink: Path) -> None:
    with browser.open(sink, address="#h=0.0&z=8,0,0", width=1400, height=900) as opened:
        opened.poll("document.querySelectorAll('.map .turned text').length > 10")
        words = opened.page.locator(".map .turned text").all_text_contents()
        assert any(any(map(str.isalpha, word)) for word in words)


# ---- tints, the strip of heads, offsets ----------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_tint_of_one_per_cent_is_seen(browser: Chromium, short: Path, scheme: str) -> None:
    """Apart from the paper by more than 1.1 in contrast, and each step from the one before."""
    with browser.open(short, color_scheme=scheme) as opened:
        colours = opened.page.evaluate(
            """[null, 1, 2, 4, 7, 10].map((step) => {
              const each = document.createElement("span");
              each.className = step ? `lit-${step}` : "";
              const pane = document.querySelector(".pane");
              each.style.color = step ? "" : getComputedStyle(pane).backgroundColor;
              pane.append(each);
              const style = getComputedStyle(each);
              const colour = step ? style.backgroundColor : style.color;
              const canvas = document.createElement("canvas").getContext("2d");
              canvas.fillStyle = colour;
              canvas.fillRect(0, 0, 1, 1);
              each.remove();
              return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
            })"""
        )
        lights = [luminance(colour) for colour in colours]
        ratios = [(max(a, b) + 0.05) / (min(a, b) + 0.05) for a, b in pairwise(lights)]
        assert ratios[0] >= (1.25 if scheme == "dark" else 1.03)
        assert min(ratios[1:]) > 1.02


def luminance(colour: list[int]) -> float:
    red, green, blue = (
        x / 255 / 12.92 if x / 255 <= 0.04045 else ((x / 255 + 0.055) / 1.055) ** 2.4
        for x in colour
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_strip_of_heads_has_a_label_and_offsets_fill_their_axis(
    browser: Chromium, short: Path
) -> None:
    with browser.open(short, address="#s=entropy&h=1.3") as opened:
        assert opened.page.inner_text(".place-name") == "entropy of all 24 heads"
        heights = opened.page.locator(".profile rect").evaluate_all(
            "(all) => all.map((bar) => Number(bar.getAttribute('height')))"
        )
        assert max(heights) >= 0.4 * (84 - 14 - 2)  # of an axis that ends at most 2.5 times higher


# ---- layers as distributions ---------------------------------------------------------------------


def test_a_dot_of_a_layer_is_a_head_and_opens_it(browser: Chromium, short: Path) -> None:
    scan = viewer_scan(layers=2, heads=12, length=SHORT, cells=SHORT, top=0, words=WORDS)
    with browser.open(short, address="#s=entropy&h=0.2&l=layer&k=1") as opened:
        page = opened.page
        for row, layer in enumerate(("a", "b")):
            dots = page.locator(f".dots circle.{layer}")
            assert dots.count() % 12 == 0
            first = page.locator(f".dots circle.{layer}").first
            assert str(first.get_attribute("aria-label")).startswith(f"{row}.0: ")
        shifts = [abs(float(scan[name].mean(1).diff())) for name in ("previous_token", "induction")]
        names = page.locator(".dots p:not(.ends)").all_text_contents()
        order = [
            next(n for n, x in enumerate(names) if x.startswith(w))
            for w in ("previous token", "induction")
        ]
        assert (order[0] < order[1]) == (shifts[0] > shifts[1])
        page.locator(".dots circle.b").nth(5).click()
        opened.wait("s.subject === 'head' && s.layer === 1 && s.head === 5")


@pytest.mark.slow
def test_dots_are_reached_by_keyboard(browser: Chromium, short: Path) -> None:
    with browser.open(short, address="#s=entropy&h=0.2&l=layer&k=1") as opened:
        opened.page.focus(".dots [tabindex='0']")
        opened.page.keyboard.press("ArrowRight")
        opened.page.keyboard.press("Enter")
        opened.wait("s.subject === 'head' && s.layer === 0 && s.head === 1")


# ---- cells, pairs, phones ------------------------------------------------------------------------


CUT = """(all) => all.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent)"""


def test_words_in_all_heads_are_whole_in_the_place_of_the_map(
    browser: Chromium, short: Path
) -> None:
    with browser.open(short, address="#h=0.0&t=20", width=1400, height=900) as opened:
        page = opened.page
        was = page.locator(".map").bounding_box(), page.locator(".scroller").first.bounding_box()
        page.click("[data-part=every-head]")
        opened.wait("s.parts.links.all?.length === 24")
        opened.settle()
        cells = page.locator(".cells .cell")
        assert cells.locator(".word").evaluate_all(CUT) == []
        assert {round(box["height"]) for c in cells.all() if (box := c.bounding_box())} == {38}
        assert min(box["width"] for c in cells.all() if (box := c.bounding_box())) >= 70
        grid, text = (
            page.locator(".heads").bounding_box(),
            page.locator(".scroller").first.bounding_box(),
        )
        assert was[0] is not None
        assert grid is not None
        assert abs(grid["x"] - was[0]["x"]) < 16
        assert text == was[1]
        small = page.locator(".map canvas").first.bounding_box()
        assert small is not None
        assert 40 <= small["width"] <= 260


def test_the_strongest_heads_are_named_and_a_press_opens_one(
    browser: Chromium, short: Path
) -> None:
    with browser.open(short, address="#h=0.0&t=none", width=1400, height=900) as opened:
        page = opened.page
        page.click('.scroller [data-t="20"]')
        page.click('.scroller [data-t="10"]', modifiers=["Shift"])
        opened.wait("s.parts.links.other === 10")
        opened.poll("document.querySelectorAll('.ranking button').length === 3")
        opened.settle()
        links = opened.state()["parts"]["links"]["all"]
        known = [x for x in links if x["bound"] != "at most"]
        best = sorted(known, key=lambda x: -x["weight"])[:3]
        said = page.locator(".ranking button").evaluate_all(
            "(all) => all.map((b) => b.dataset.head)"
        )
        assert said == [f"{x['layer']}.{x['head']}" for x in best]
        page.locator(".ranking button").first.click()
        opened.wait(
            f"s.layer === {best[0]['layer']} && s.head === {best[0]['head']} && s.second === 10"
        )


def test_special_tokens_can_be_left_out(browser: Chromium, short: Path) -> None:
    scan = viewer_scan(layers=2, heads=12, length=SHORT, cells=SHORT, top=0, words=WORDS)
    special = torch.tensor([WORDS[each] == "[SEP]" for each in scan.texts[0].ids.tolist()])
    rows = torch.stack([*scan["map"]])
    token = next(n for n in range(8, SHORT) if special[rows[:, :, n].argmax(-1)].any())
    with browser.open(short, address=f"#h=0.0&t={token}&v=links") as opened:
        opened.wait("s.parts.links.all?.length === 24")
        shown = ".cells .word"
        assert "[SEP]" in opened.page.locator(shown).all_text_contents()
        opened.page.get_by_label("without special tokens").check()
        opened.wait("s.isPlain")
        opened.poll(
            "![...document.querySelectorAll('.cells .word')].some((x) => x.textContent === '[SEP]')"
        )
        links = opened.state()["parts"]["links"]["all"]
        for link in links:
            row = rows[link["layer"], link["head"], token].masked_fill(special, 0)
            assert abs(float(row.max()) ** 0.5 - link["weight"] ** 0.5) < 1.01 / 255


def test_a_lower_bound_under_one_per_cent_is_one(browser: Chromium, tmp_path: Path) -> None:
    """Not "<1 %", which would be the contrary."""
    scan = viewer_scan(layers=2, heads=5, length=2500, top=5)
    top = scan.layer_scans[0].summaries["top_keys_of_every_query"]
    top["share"][0] = torch.where(top["key"][0] == 7, 0.0081, top["share"][0].clamp(max=0.2))
    page = save_scan_page(tmp_path / "p.html", viewer_report(scan, top_keys="all"))
    with browser.open(page, address="#t=7&d=queries&v=links") as opened:
        opened.wait("s.parts.links.all !== null")
        links = {(x["layer"], x["head"]): x for x in opened.state()["parts"]["links"]["all"]}
        assert links[0, 0]["bound"] == "at least"
        assert links[0, 0]["weight"] < 0.01
        said = opened.page.inner_text('[data-id="0.0"] .share')
        assert said.startswith("≥0.")
        shown = float(said.removeprefix("≥").removesuffix("%").strip()) / 100
        assert 0.95 * links[0, 0]["weight"] < shown <= links[0, 0]["weight"]
        assert f"at least {said[1:].replace('%', ' %').replace('  ', ' ')}" in str(
            opened.page.get_attribute('[data-id="0.0"]', "aria-label")
        )


@pytest.mark.slow
def test_a_phone_shows_every_head_and_two_maps_in_line(browser: Chromium, tmp_path: Path) -> None:
    scan = viewer_scan(layers=2, heads=12, length=60, cells=60, top=12)
    moved = viewer_scan(layers=2, heads=12, length=60, cells=60, top=12)
    moved.layer_scans[0].summaries["entropy"]["sum"][3] += 1
    names = ("short", "another name that is long enough to take two lines")
    page = save_scan_page(tmp_path / "p.html", viewer_report(scan, second=moved, names=names))
    phone: dict[str, Any] = {"width": 390, "height": 844, "has_touch": True, "is_mobile": True}
    with browser.open(page, address="#p=heads", **phone) as opened:
        cells = "document.querySelector('.cells')"
        opened.settle()
        assert opened.page.evaluate(f"{cells}.scrollWidth - {cells}.clientWidth") <= 0
        last = opened.page.locator('[data-id="0.11"]').bounding_box()
        assert last is not None
        assert last["x"] + last["width"] <= 390
        opened.do("headwise.app.set({ tab: 'map', mode: 'both' })", "s.tab === 'map'")
        opened.settle()
        tops = {
            round(b["y"])
            for c in opened.page.locator(".box canvas:not(.over)").all()
            if (b := c.bounding_box())
        }
        assert len(tops) == 1


def test_a_hit_of_several_bytes_is_one_box(browser: Chromium, tmp_path: Path) -> None:
    """The edge of a hit stands at its ends alone."""
    scan = viewer_scan(layers=1, heads=2, length=40, cells=40)
    page = save_scan_page(tmp_path / "p.html", viewer_report(scan, words=[*"the word of bytes "]))
    with browser.open(page) as opened:
        opened.do("headwise.app.set({ search: 'e wo' })", "s.search === 'e wo'")
        opened.page.focus(".search input")
        opened.page.keyboard.press("Enter")
        opened.poll("document.querySelectorAll('[data-found=here]').length > 1")
        shadows = opened.page.locator("[data-found=here]").evaluate_all(
            "(all) => all.map((x) => getComputedStyle(x).boxShadow)"
        )
        # Lines above and below, none at the sides.
        assert all(
            " 0px 0px 1px" not in shadow and "0px 0px 0px 1px" not in shadow for shadow in shadows
        )
        assert len({*shadows}) == 1


# ---- text ----------------------------------------------------------------------------------------


def test_names_with_their_blanks_are_the_text(browser: Chromium, tmp_path: Path) -> None:
    """Letters stand together, lines are not broken within words, and what is copied is the text."""
    text = "def attend(q, k, v): return softmax(q @ k.T) @ v. " * 4
    read = scan_model(tiny.load(), tiny.encode(text)[None], statistics=["standard", Map(256)])
    page = save_scan_page(tmp_path / "p.html", ScanReport.of(read, name_of=chr))
    with browser.open(page, width=900, height=700) as opened:
        opened.poll("document.querySelectorAll('.scroller .row').length > 1")
        shown = opened.page.locator(".scroller .run").all_text_contents()
        assert "".join(shown).strip("\x00 Ā") in text
        assert all(line.endswith(" ") for line in shown[:-1])
        assert opened.page.evaluate("headwise.app.loaded.keys.of(0).isMade") is False


@pytest.mark.slow
def test_a_mark_at_the_end_of_a_text_is_whole(browser: Chromium, tmp_path: Path) -> None:
    """However full the last line is."""
    spans, text = [], ""
    for word in ["ab"] * 39:
        text += " " if text else ""
        spans.append((len(text), len(text) + len(word)))
        text += word
    spans.append((len(text), len(text)))
    scan = viewer_scan(layers=1, heads=2, length=40, cells=40, top=0)
    ids = torch.tensor([0] * 39 + [1], dtype=torch.int32)
    written = (WrittenText(text, torch.tensor(spans)),)
    scan = replace(scan, texts=(ScannedText(ids, (40,), written),))
    page = save_scan_page(tmp_path / "p.html", viewer_report(scan, words=("word", "[SEP]")))
    over = """[...document.querySelectorAll('.scroller .t')].filter((each) =>
      each.getBoundingClientRect().right >
      document.querySelector('.scroller').getBoundingClientRect().right).length"""
    with browser.open(page, address="#p=text", width=390, height=844) as opened:
        for width in range(360, 460):
            opened.page.set_viewport_size({"width": width, "height": 844})
            opened.settle()
            opened.page.wait_for_timeout(30)
            assert opened.page.evaluate(over) == 0, width
