"""Comparing heads and layers in a browser: by mouse, by keyboard and by touch."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.reports.page import save_scan_page
from headwise.scanning.layer import HEAD_DISTANCE
from headwise.scanning.result import HeadScan
from tests.quick import others_extra, others_slow
from tests.reports.accessibility import small_targets, violations
from tests.reports.browser import Chromium, Opened, needs_a_browser
from tests.reports.viewer_scans import RANKS, viewer_report, viewer_scan

pytestmark = needs_a_browser

HEAD = "s.layer === {} && s.head === {}"
FOCUS = "document.activeElement.dataset.{} === '{}'"
HINT = "document.querySelector('.hint span').innerText === '{}'"


@pytest.fixture
def opened(browser: Chromium, path: Path) -> Iterator[Opened]:
    with browser.open(path, address="#s=previous_token&h=1.2") as opened:
        yield opened
        assert opened.complaints == []


@pytest.fixture
def phone(browser: Chromium, path: Path) -> Iterator[Opened]:
    with browser.open(
        path, address="#s=previous_token&h=1.2", width=390, height=844, has_touch=True
    ) as opened:
        yield opened
        assert opened.complaints == []


def table_of(opened: Opened, part: str) -> list[list[str]]:
    """The cells of a table on the right, row by row."""
    rows = opened.page.locator(f"[data-part={part}] table tbody tr")
    return [row.locator("th, td").all_inner_texts() for row in rows.all()]


def number(words: str) -> float:
    """A value as the page writes it."""
    plain = words.replace("under 0.01 %", "0.01 %").replace("over −0.01 %", "−0.01 %")
    return float(plain.replace("−", "-").replace("+", "").replace(" %", "e-2").replace(",", ""))


def is_shown(words: str, value: float) -> bool:
    """True if words are a value: per cent to the written digit, else three digits."""
    if "0.01 %" in words and ("under" in words or "over" in words):
        return abs(value) < 1e-4
    if words.endswith(" %"):
        decimals = len(words.removesuffix(" %").partition(".")[2])
        step = 10.0 ** (-2 - decimals)
    else:
        step = 10.0 ** (math.floor(math.log10(abs(value))) - 2) if value else 0.0
    return abs(number(words) - value) <= 0.5 * step + 1e-5 * abs(value) + 1e-12


def spans(scan: HeadScan, names: Sequence[str]) -> dict[str, float]:
    """The span of the scale of each statistic: 1 for shares, ln of the length, else the range."""
    lengths = {"entropy": float(torch.tensor(float(scan.tokens)).log())}
    ranges = {name: float(scan[name].max() - scan[name].min()) for name in names}
    return {
        name: lengths.get(name, 1.0 if "_" in name or name == "induction" else ranges[name])
        for name in names
    } | {"effective_keys": ranges["effective_keys"]}


def require_sorted_changes(rows: list[list[str]], scan: HeadScan, pairs: dict[str, Any]) -> None:
    """Require both values and the change of each statistic, the largest part of a scale first."""
    span = spans(scan, list(pairs))
    sizes = []
    for name, a, b, change in rows:
        key = name.split(",")[0].replace(" ", "_")
        first, second = pairs[key]
        assert is_shown(a, first)
        assert is_shown(b, second)
        assert is_shown(change, second - first)
        sizes.append(abs(first - second) / span[key])
    assert len(rows) == len(pairs)
    assert sizes == sorted(sizes, reverse=True)


# ---- heads ---------------------------------------------------------------------------------------


def test_a_head_is_compared_by_keyboard_alone(opened: Opened, scan: HeadScan) -> None:
    page = opened.page
    page.focus("[data-part=compare-with]")
    page.keyboard.press("Enter")
    opened.poll(FOCUS.format("id", "1.2"))
    opened.poll(HINT.format("Choose a head to compare with 1.2."))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    opened.poll(FOCUS.format("id", "2.3"))
    assert (opened.state()["layer"], opened.state()["head"]) == (1, 2)  # the keys chose nothing
    page.keyboard.press("Enter")
    opened.wait("s.mode === 'diff' && s.other.layer === 2 && s.other.head === 3")
    opened.poll("document.querySelector('.facts h2').textContent === '1.2 and 2.3'")
    assert not page.is_visible(".hint")
    pairs = {name: (float(scan[name][1, 2]), float(scan[name][2, 3])) for name in scan.scalars}
    require_sorted_changes(table_of(opened, "facts"), scan, pairs)
    heads = page.locator("[data-part=facts] thead th").all_inner_texts()
    assert heads == ["statistic", "A", "B", "change"]
    # The arrow keys choose again.
    page.keyboard.press("ArrowLeft")
    opened.wait(HEAD.format(2, 2))


def test_c_begins_and_escape_leaves(opened: Opened) -> None:
    page = opened.page
    page.click('[data-id="0.1"]')
    opened.wait(HEAD.format(0, 1))
    page.keyboard.press("c")
    opened.wait("headwise.app.isChoosing")
    assert page.get_attribute("[data-part=compare-with]", "aria-pressed") == "true"
    page.keyboard.press("ArrowRight")
    opened.poll(FOCUS.format("id", "0.2"))
    page.keyboard.press("Escape")
    opened.wait("!headwise.app.isChoosing")
    assert opened.state()["other"] is None
    page.keyboard.press("c")
    opened.wait("headwise.app.isChoosing")
    page.click('[data-id="2.4"]')
    opened.wait("s.other !== null && s.other.layer === 2 && s.other.head === 4")
    assert (opened.state()["layer"], opened.state()["head"]) == (0, 1)


@pytest.mark.slow
def test_a_head_is_compared_by_touch(phone: Opened) -> None:
    page = phone.page
    page.tap("[data-part=compare-with]")
    phone.wait("s.tab === 'heads'")
    page.tap(".hint button")
    phone.poll("!headwise.app.isChoosing")
    page.tap('.tabs [data-tab="map"]')
    page.tap("[data-part=compare-with]")
    phone.wait("s.tab === 'heads'")
    page.tap('[data-id="0.4"]')
    phone.wait("s.mode === 'diff' && s.other.layer === 0 && s.other.head === 4 && s.tab === 'map'")
    page.tap('[data-mode="both"]')
    phone.wait("s.mode === 'both'")
    sizes = [box.bounding_box() for box in page.locator("[data-part=map] .box").all()]
    assert all(box is not None and box["x"] + box["width"] <= 390 for box in sizes)


# ---- layers --------------------------------------------------------------------------------------


def test_the_margin_is_the_mean_and_the_spread_of_each_layer(
    opened: Opened, scan: HeadScan
) -> None:
    page = opened.page
    layers = scan.by_layer("previous_token")
    strips = page.evaluate(
        "[...document.querySelectorAll('.row .spread:not(.ends)')].map((strip) => "
        "[...strip.children].flatMap((e) => [e.style.left, e.style.width]).map(parseFloat))"
    )
    assert len(strips) == len(layers)
    for (left, width, dot, _), layer in zip(strips, layers, strict=True):
        # The scale of weights is that of the colours: the square root.
        low, high, mean = (100 * value**0.5 for value in (layer.low, layer.high, layer.mean))
        assert (left, left + width, dot) == pytest.approx((low, high, mean), abs=1e-3)
    assert page.inner_text(".spread.ends").split() == ["0", "100"]
    for number_of, layer in enumerate(layers):
        words = page.get_attribute(f'[data-layer="{number_of}"]', "aria-label") or ""
        match = re.fullmatch(rf"layer {number_of}: mean (.*), from (.*) to (.*)", words)
        assert match is not None
        assert all(map(is_shown, match.groups(), (layer.mean, layer.low, layer.high)))


@pytest.mark.slow
def test_a_layer_opens_beside_all_layers(opened: Opened, scan: HeadScan) -> None:
    page = opened.page
    page.click('[data-layer="2"]')
    opened.wait("s.subject === 'layer' && s.layer === 2 && s.head === 2")
    assert page.inner_text(".of-layer h2") == "Layer 2"
    rows = {row[0].split(",")[0]: row[1:] for row in table_of(opened, "layer")}
    assert set(rows) == {name.replace("_", " ") for name in scan.scalars}
    for name in scan.scalars:
        layer, whole = (re.split(r"\n| to ", cell) for cell in rows[name.replace("_", " ")])
        for cells, values in ((layer, scan[name][2]), (whole, scan[name])):
            expected = [float(x) for x in (values.mean(), values.min(), values.max())]
            assert all(map(is_shown, cells, expected)), (name, cells, expected)
    heads = page.locator(".pairs button b").all_inner_texts()
    order = scan["previous_token"][2].argsort(descending=True).tolist()
    assert heads == [f"2.{head}" for head in order]
    page.click(".pairs button >> nth=1")
    opened.wait(f"s.subject === 'head' && s.head === {order[1]}")
    page.go_back()
    opened.wait("s.subject === 'layer'")


@pytest.mark.slow
def test_two_layers_are_compared_by_keyboard(opened: Opened, scan: HeadScan) -> None:
    page = opened.page
    page.focus('[data-id="1.0"]')
    page.keyboard.press("ArrowLeft")
    opened.wait("s.subject === 'layer' && s.layer === 1")
    page.keyboard.press("ArrowUp")
    opened.wait("s.subject === 'layer' && s.layer === 0")
    page.keyboard.press("c")
    opened.poll(HINT.format("Choose a layer to compare with layer 0."))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    opened.poll(FOCUS.format("layer", "2"))
    page.keyboard.press("Enter")
    opened.wait("s.against === 2 && s.layer === 0")
    means = {
        name: tuple(scan.by_layer(name)[layer].mean for layer in (0, 2)) for name in scan.scalars
    }
    said = page.locator(".dots p:not(.ends)").all_inner_texts()
    rows = [re.split(r" (?=[−\d.]+[^→]* → )| → | \(\+?|\)", words)[:4] for words in said]
    require_sorted_changes(rows, scan, means)
    for name, dots in zip(scan.scalars, page.locator(".dots svg").all(), strict=True):
        key = rows[scan.scalars.index(name)][0].split(",")[0].replace(" ", "_")
        for row, layer in (("a", 0), ("b", 2)):
            words = dots.locator(f"circle.{row}").evaluate_all(
                "(all) => all.map((x) => x.ariaLabel)"
            )
            for head, label in enumerate(words):
                place, value = label.split(": ")
                assert place == f"{layer}.{head}"
                assert is_shown(value, float(scan[key][layer, head]))
    page.focus('[data-layer="0"]')
    page.keyboard.press("ArrowRight")
    opened.wait("s.subject === 'head' && s.layer === 0 && s.head === 0")
    opened.poll(FOCUS.format("id", "0.0"))
    page.go_back()
    opened.wait("s.against === 2")
    page.locator(".dots circle.b[aria-label^='2.3: ']").first.dispatch_event("click")
    opened.wait("s.subject === 'head' && s.layer === 2 && s.head === 3")


@pytest.mark.slow
def test_two_layers_are_compared_by_mouse_and_by_touch(opened: Opened, phone: Opened) -> None:
    opened.page.click('[data-layer="1"]')
    opened.page.click('[data-layer="0"]', modifiers=["Shift"])
    opened.wait("s.against === 0 && s.layer === 1")
    assert "Layer 1 and layer 0" in opened.page.inner_text(".of-layer")
    page = phone.page
    page.tap('.tabs [data-tab="heads"]')
    page.tap('[data-layer="2"]')
    phone.wait("s.tab === 'facts' && s.subject === 'layer'")
    page.tap("[data-part=compare-layer]")
    phone.wait("s.tab === 'heads'")
    page.tap('[data-layer="1"]')
    phone.wait("s.tab === 'facts' && s.against === 1 && s.layer === 2")
    assert "Layer 2 and layer 1" in page.inner_text(".of-layer")


@pytest.mark.slow
def test_an_address_is_a_pair_of_layers(browser: Chromium, path: Path) -> None:
    with browser.open(path, address="#h=1.0&l=layer&k=2") as opened:
        assert (opened.state()["subject"], opened.state()["against"]) == ("layer", 2)
        assert "Layer 1 and layer 2" in opened.page.inner_text(".of-layer")
    with browser.open(path, address="#h=1.0&l=layer&k=7") as opened:
        assert opened.state()["against"] is None
        assert opened.complaints == []


VIEWS = {
    "choosing": "headwise.app.choosing(true)",
    "layer": "headwise.app.chooseLayer(2)",
    "layers": "headwise.app.compareLayers(0)",
    "both": "headwise.app.set({ mode: 'both', other: { scan: 0, layer: 0, head: 1 } })",
}


@pytest.mark.slow
@pytest.mark.parametrize("view", others_slow(VIEWS, "layers"))
@pytest.mark.parametrize("scheme", others_extra(["light", "dark"], quick=["light"]))
def test_axe_finds_nothing(browser: Chromium, path: Path, scheme: str, view: str) -> None:
    with browser.open(path, color_scheme=scheme) as opened:
        opened.page.evaluate(VIEWS[view])
        opened.settle()
        assert violations(opened) == []


@pytest.mark.parametrize(("touch", "least"), others_slow([(False, 24), (True, 44)], (True, 44)))
def test_targets_are_large_enough(browser: Chromium, path: Path, touch: bool, least: int) -> None:
    width = 390 if touch else 1400
    with browser.open(path, width=width, has_touch=touch, is_mobile=touch) as opened:
        for view, tab in (("choosing", "heads"), ("layers", "facts")):
            opened.page.evaluate(VIEWS[view])
            opened.do(f"headwise.app.set({{ tab: '{tab}' }})", f"s.tab === '{tab}'")
            assert small_targets(opened, least) == []


@pytest.mark.slow
def test_cards_out_of_sight_are_a_button_away(browser: Chromium, tmp_path: Path) -> None:
    before, after = viewer_scan(), viewer_scan()
    for layer in after.layer_scans:
        layer.summaries["previous_token"]["sum"] += 0.3
    report = viewer_report(before, second=after, names=("before", "after"))
    with browser.open(save_scan_page(tmp_path / "page.html", report), width=1440) as opened:
        page = opened.page
        every = page.locator("[data-part=all-cards]")
        cards = page.locator(".way")
        below = page.locator("[data-part=map] canvas").first.bounding_box()

        def seen() -> int:
            row = page.locator(".ways").bounding_box()
            boxes = [box for card in cards.all() if (box := card.bounding_box())]
            assert row is not None
            return sum(
                row["x"] <= box["x"]
                and box["x"] + box["width"] <= row["x"] + row["width"] + 1
                and box["y"] + box["height"] <= row["y"] + row["height"] + 1
                for box in boxes
            )

        assert 0 < seen() < cards.count()
        every.click()
        assert seen() == cards.count()
        assert page.locator("[data-part=map] canvas").first.bounding_box() == below
        page.keyboard.press("Escape")
        assert 0 < seen() < cards.count()
        every.click()
        cards.last.click()
        opened.poll("[...document.querySelectorAll('.way')].at(-1).ariaPressed === 'true'")
        assert 0 < seen() < cards.count()
        # Nothing is out of sight in a wide window.
        page.set_viewport_size({"width": 2700, "height": 900})
        opened.poll("document.querySelector('[data-part=all-cards]').hidden")


@pytest.mark.slow
def test_the_way_back_from_a_card_is_beside_the_cards(browser: Chromium, tmp_path: Path) -> None:
    before, after = viewer_scan(), viewer_scan()
    after.layer_scans[1].summaries["induction"]["sum"][2] -= 0.5
    report = viewer_report(before, second=after, names=("before", "after"))
    with browser.open(save_scan_page(tmp_path / "page.html", report)) as opened:
        total = opened.page.locator("[data-part=total-change]")
        first = opened.state()["statistic"]
        assert total.get_attribute("aria-pressed") == "true"
        opened.page.locator("[data-part=standouts] button").first.click()
        opened.wait("s.statistic === 'induction'")
        assert total.get_attribute("aria-pressed") == "false"
        assert total.evaluate("button => button.tabIndex") == 0
        total.click()
        opened.wait(f"s.statistic === '{first}'")
    with browser.open(save_scan_page(tmp_path / "one.html", viewer_report(before))) as opened:
        assert opened.page.locator("[data-part=total-change]").is_hidden()


# ---- the sign of a change ------------------------------------------------------------------------


def two_scans() -> tuple[HeadScan, HeadScan]:
    """Two scans of 4 tokens: head 0.1 looks at its own token before, and at token 0 after."""
    own, first = torch.eye(4), torch.zeros(4, 4)
    first[:, 0] = 1
    scans = []
    for weights, share in ((own, 0.25), (first, 0.75)):
        scan = viewer_scan(layers=2, heads=3, length=4, cells=4, top=0)
        summaries = scan.layer_scans[0].summaries
        summaries["map"]["sum"][1] = weights
        summaries["map"]["count"][1] = 1
        summaries["induction"]["sum"][1] = share
        summaries["induction"]["count"][1] = 1
        scans.append(scan)
    return scans[0], scans[1]


@pytest.mark.slow
def test_the_scan_named_first_is_a_and_a_change_is_b_less_a(
    browser: Chromium, tmp_path: Path
) -> None:
    before, after = two_scans()
    path = before.diff(after).save_page(tmp_path / "page.html", names=("epoch 1", "epoch 2"))
    with browser.open(path) as opened:
        page = opened.page
        assert "A is epoch 1, B is epoch 2" in page.inner_text(".top")
        assert page.inner_text(".way").startswith("0.1 induction 25 % to 75 % (total ")
        pixels = """(canvas) => [...canvas.getContext('2d').getImageData(0, 0, 16, 16).data]"""
        one, two = (each.evaluate(pixels) for each in page.locator(".way canvas").all())
        assert one != two
        captions = page.locator(".frame p").all_inner_texts()
        assert captions == ["A: 0.1 epoch 1", "B: 0.1 epoch 2"]
        values = "[...headwise.app.{}.map.values]"
        left, right = (page.evaluate(values.format(x)) for x in ("loaded", "beside.loaded"))
        assert left == torch.eye(4).flatten().tolist()
        assert right == [1, 0, 0, 0] * 4
        heads = page.locator("[data-part=facts] thead th").all_inner_texts()
        assert heads == ["statistic", "A", "B", "change"]
        rows = {row[0]: row[1:] for row in table_of(opened, "facts")}
        assert rows["induction"] == ["25 %", "75 %", "+50 %"]
        modes = page.locator("[data-mode]:is(button)").all_inner_texts()
        assert modes == ["A", "B", "A and B", "B − A"]
        page.click('button[data-mode="diff"]')
        opened.wait("s.mode === 'diff'")
        opened.load()
        change = [a - b for a, b in zip(right, left, strict=True)]
        assert page.evaluate(values.format("loaded")) == change
        page.select_option('[aria-label="statistic"]', "induction")
        opened.poll("document.querySelector('[data-id=\"0.1\"]').textContent === '50'")
        assert page.inner_text('[data-id="1.1"]') == "0"
        opened.do("headwise.app.pin(3)", "s.token === 3")
        summary = page.inner_text(".summary")
        assert summary.startswith("0.1 epoch 2 − 0.1 epoch 1: ")
        assert "(+100 %)" in summary.partition("at 0")[2].partition(",")[0]
        assert "(−100 %)" in summary.partition("at 3")[2].rpartition("at 3")[2]
        assert opened.complaints == []


# ---- the room of two ---------------------------------------------------------------------------

# The least map of a pair, in pixels.
WINDOWS = [(1440, 900, 360), (900, 700, 150), (390, 844, 125)]
# The room of a map's box, less that of its axes: the sides of the map fill one of the two.
ROOM = """[...document.querySelectorAll('.frame .box')].map((box) => {
    const [map, axes] = [box.querySelector('canvas'), box.querySelector('svg')];
    const [across, down] = ['width', 'height'].map((side) => axes.getAttribute(side));
    return [map.clientWidth, map.clientHeight, box.clientWidth - across, box.clientHeight - down];
})"""


def open_two(browser: Chromium, folder: Path, width: int, height: int, **names: Any) -> Any:
    before, after = viewer_scan(length=60, cells=60), viewer_scan(length=60, cells=60)
    after.layer_scans[1].summaries["induction"]["sum"][2] -= 0.5
    report = viewer_report(before, second=after, **names)
    path = save_scan_page(folder / "page.html", report)
    return browser.open(path, width=width, height=height, address="#p=map")


@pytest.mark.parametrize(("width", "height", "least"), others_extra(WINDOWS, quick=WINDOWS[:2]))
def test_two_maps_are_as_large_as_their_room(
    browser: Chromium, tmp_path: Path, width: int, height: int, least: int
) -> None:
    with open_two(browser, tmp_path, width, height, names=("before", "after")) as opened:
        maps = opened.page.evaluate(ROOM)
        assert len(maps) == 2
        for across, down, free, below in maps:
            assert across == down >= least
            assert 0 <= min(free, below) <= 1
        frames = [frame.bounding_box() for frame in opened.page.locator(".frame").all()]
        assert frames[0]["y"] == frames[1]["y"]
        assert frames[0]["x"] + frames[0]["width"] <= frames[1]["x"]
        assert frames[1]["x"] + frames[1]["width"] <= width
        assert opened.complaints == []


@pytest.mark.parametrize(("width", "height"), others_slow([(1440, 900), (900, 700), (390, 844)]))
def test_names_in_the_menu_of_others_are_whole(
    browser: Chromium, tmp_path: Path, width: int, height: int
) -> None:
    names = ("a scan of the first checkpoint", "a scan of the last one")
    with open_two(browser, tmp_path, width, height, names=names) as opened:
        menu = opened.page.locator("[data-part=compare] select")
        for other in ("{ scan: 1, layer: 1, head: 2 }", "{ scan: 1, layer: 2, head: 4 }"):
            opened.do(f"headwise.app.compareWith({other})")
            opened.poll("document.querySelector('[data-part=compare] select').value !== ''")
            shown = menu.evaluate("(menu) => menu.getBoundingClientRect().width")
            whole = menu.evaluate(
                "(menu) => { menu.style.maxWidth = menu.style.minWidth = 'max-content'; "
                "const { width } = menu.getBoundingClientRect(); menu.style = ''; return width; }"
            )
            assert shown == pytest.approx(whole, abs=1)
        assert menu.evaluate("(menu) => menu.selectedOptions[0].text") == (
            "layer 2, head 4, a scan of the last one"
        )


def test_facts_of_two_heads_name_both(opened: Opened) -> None:
    page = opened.page
    assert page.inner_text(".facts h2 >> nth=0") == "Layer 1, head 2"
    assert page.locator(".facts h2:visible").count() == 1
    opened.do("headwise.app.compareWith({ scan: 0, layer: 2, head: 3 })", "s.mode === 'diff'")
    opened.poll("document.querySelector('.facts h2').textContent === '1.2 and 2.3'")
    # What is of the first alone comes below its own name.
    assert page.locator(".facts h2:visible").all_inner_texts() == ["1.2 and 2.3", "A: 1.2"]
    tops = [
        page.locator(f".facts {part}").first.bounding_box()["y"]
        for part in ("table", "h2 >> nth=1", ".profile", ".similar")
    ]
    assert tops == sorted(tops)


@pytest.mark.parametrize(("width", "height"), others_slow([(1440, 900), (900, 700)]))
def test_a_list_of_heads_leaves_a_third_to_the_text(
    browser: Chromium, tmp_path: Path, width: int, height: int
) -> None:
    page = save_scan_page(
        tmp_path / "page.html", viewer_report(viewer_scan(layers=9, heads=8, top=8))
    )
    address = "#h=8.7&t=300&u=299&v=strongest"
    with browser.open(page, width=width, height=height, address=address) as opened:
        opened.wait("s.parts.links.other === 299")
        # One word in all heads stands beside the text, and not over it.
        left, right = (opened.page.locator(f".{x}").first.bounding_box() for x in ("text", "heads"))
        assert left["x"] + left["width"] <= right["x"]
        cells = opened.page.locator(".cells")
        assert cells.evaluate("(cells) => cells.scrollHeight > cells.clientHeight")
        # The list begins with the strongest link, wherever the chosen head stands.
        assert cells.evaluate("(cells) => cells.scrollTop") == 0
        assert opened.page.locator(".cell").last.get_attribute("data-id") is not None
        opened.page.locator(".cell").nth(60).click()
        opened.poll("document.querySelector('.cells').scrollTop > 0")
        opened.do("headwise.app.set({ order: 'value' })", "s.order === 'value'")
        opened.poll("document.querySelector('.cells').scrollTop === 0")
        opened.settle()
        top, end = (opened.page.locator(f".{x}").first.bounding_box() for x in ("heads", "text"))
        column = min(height, end["y"] + end["height"]) - top["y"]
        text = opened.page.locator(".panes").bounding_box()
        assert text["height"] >= column / 3
        assert text["y"] + text["height"] <= height
        assert cells.evaluate("(cells) => cells.scrollHeight > 2 * cells.clientHeight")


@pytest.mark.slow
def test_a_list_of_heads_fills_a_phone(browser: Chromium, tmp_path: Path) -> None:
    page = save_scan_page(tmp_path / "page.html", viewer_report(viewer_scan(layers=9, heads=8)))
    with browser.open(page, width=390, height=844, address="#v=value&p=heads") as opened:
        cells, heads = (
            opened.page.locator(f".{x}").first.bounding_box() for x in ("cells", "heads")
        )
        assert cells["y"] + cells["height"] == pytest.approx(heads["y"] + heads["height"], abs=4)


# ---- what a scan may lack ------------------------------------------------------------------------


def uneven() -> HeadScan:
    """Layers of other numbers of heads, one of them scanned in part; a head without numbers."""
    scan = viewer_scan()
    first, _, last = scan.layer_scans
    two = viewer_scan(heads=2).layer_scans[1]
    some = replace(two, num_heads=7, heads=(1, 6), kind="cross")
    del some.summaries["effective_keys"]
    some.missing["effective_keys"] = "it was not asked for"
    last.summaries["entropy"]["sum"][3] = torch.nan
    assert last.summaries["top_keys_of_every_query"]["key"].shape[-1] == RANKS
    layers = (first, some, last)
    for layer in layers:  # what is measured between heads is made up for equal layers
        layer.summaries.pop(HEAD_DISTANCE, None)
    statistics = tuple(x for x in scan.statistics if x.definition.name != HEAD_DISTANCE)
    return replace(scan, statistics=statistics, layer_scans=layers)


@pytest.mark.slow
def test_uneven_layers_have_strips_and_pairs(browser: Chromium, tmp_path: Path) -> None:
    scan = uneven()
    page = save_scan_page(tmp_path / "page.html", viewer_report(scan))
    with browser.open(page, address="#s=entropy&h=1.6") as opened:
        assert opened.page.locator(".row .spread .dot").count() == 3
        layer = scan.by_layer("entropy")[2]
        words = opened.page.get_attribute('[data-layer="2"]', "aria-label") or ""
        assert words.startswith(f"layer 2: mean {float(f'{layer.mean:.3g}'):g} nats, from ")
        assert opened.page.inner_text('[data-layer="1"]') == "1×"
        opened.page.click('[data-layer="1"]')
        opened.page.click('[data-layer="0"]', modifiers=["Shift"])
        opened.wait("s.against === 0 && s.layer === 1 && s.head === 6")
        # Of a statistic that one of the layers lacks there is no row.
        names = opened.page.locator(".dots p:not(.ends)").all_inner_texts()
        assert any(name.startswith("entropy, nats ") for name in names)
        assert not any(name.startswith("effective keys") for name in names)
        first = opened.page.locator(".dots svg").first
        assert (first.locator(".a").count(), first.locator(".b").count()) == (2, 5)
        opened.page.select_option('[aria-label="statistic"]', "effective_keys")
        opened.poll(
            "document.querySelector('[data-layer=\"1\"]').ariaLabel === 'layer 1: no value'"
        )
        opened.page.click('[data-id="2.3"]')
        opened.wait(HEAD.format(2, 3))
        opened.page.click('[data-id="2.1"]', modifiers=["Shift"])
        opened.wait("s.mode === 'diff'")
        opened.poll("document.querySelector('.facts h2').textContent === '2.3 and 2.1'")
        rows = {row[0]: row[1:] for row in table_of(opened, "facts")}
        assert rows["entropy, nats"][0] == "no value"
        assert table_of(opened, "facts")[-1][0] == "entropy, nats"  # of which only one has a value
        assert opened.complaints == []


@pytest.mark.slow
def test_a_single_layer_has_a_view(browser: Chromium, tmp_path: Path) -> None:
    page = save_scan_page(tmp_path / "page.html", viewer_report(viewer_scan(layers=1, heads=1)))
    with browser.open(page) as opened:
        opened.page.click('[data-layer="0"]')
        opened.wait("s.subject === 'layer'")
        assert opened.page.locator(".pairs button").count() == 1
        opened.page.click('[data-layer="0"]', modifiers=["Shift"])
        assert opened.state()["against"] is None
        assert opened.complaints == []


@pytest.fixture
def texts(browser: Chromium, tmp_path: Path) -> Iterator[Opened]:
    """A page of two texts of other lengths; of the second no induction was measured."""
    long, short = viewer_scan(length=640), viewer_scan(length=100, cells=64)
    measured = tuple(x for x in short.statistics if x.definition.name != "induction")
    short = replace(short, statistics=measured)
    for layer in short.layer_scans:
        del layer.summaries["induction"]
        layer.summaries["entropy"]["sum"] += 0.5
    report = viewer_report(long, second=short, names=("long", "short"))
    with browser.open(save_scan_page(tmp_path / "two.html", report)) as opened:
        yield opened
        assert opened.complaints == []


def test_two_texts_pair_heads_by_number_and_every_sentence_names_both(texts: Opened) -> None:
    page, state = texts.page, texts.state()
    ways = page.locator(".way").all_inner_texts()
    assert len(ways) == 8
    heads = [way.split()[0] for way in ways]
    assert len({*heads}) == 8
    assert page.inner_text("[data-part=total-change]").startswith("Total change ")
    assert (state["mode"], state["other"]["scan"]) == ("both", 1)
    assert (state["other"]["layer"], state["other"]["head"]) == (state["layer"], state["head"])
    name = f"{state['layer']}.{state['head']}"
    texts.do("headwise.app.pin(50)", "s.token === 50")
    summary = page.locator(".summary").inner_text()
    assert summary.startswith(f"{name} long: ")
    assert summary.splitlines()[1].startswith(f"{name} short: ")
    page.click('[data-mode="diff"]')
    texts.wait("s.mode === 'diff'")
    texts.load()
    assert page.inner_text("[data-part=compare] h2") == f"{name} short − {name} long"
    assert "short − long" not in page.inner_text("[data-part=grid]")  # the total change
    page.select_option('[aria-label="statistic"]', "entropy")
    texts.poll("document.querySelector('.heads').innerText.includes('Entropy, short − long:')")


@pytest.mark.slow
def test_what_one_of_two_texts_lacks_comes_last(texts: Opened) -> None:
    assert table_of(texts, "facts")[-1][0] == "induction"
    assert table_of(texts, "facts")[-1][2] == "no value"
    texts.page.click('[data-layer="2"]')
    texts.wait("s.subject === 'layer' && s.layer === 2")
    names = texts.page.locator(".dots p:not(.ends)").all_inner_texts()
    assert not any(name.startswith("induction") for name in names)
    assert "A is long, B is short." in texts.page.inner_text(".of-layer")
    texts.page.locator(".dots circle.b").nth(3).dispatch_event("click")
    texts.wait("s.subject === 'head' && s.mode === 'B' && s.other.layer === 2 && s.head === 3")


@pytest.mark.slow
def test_maps_of_two_texts_keep_their_tokens(texts: Opened) -> None:
    state, readout = texts.state(), "headwise.state().parts.readout"
    name = f"{state['layer']}.{state['head']}"
    box = texts.page.locator("[data-part=map] .box canvas").first.bounding_box()
    assert box is not None
    # Query 602 of the long text: the short one ends before.
    for query, shown in (
        (602.5, f"startsWith('{name} long, query 600 to 607')"),
        (52.5, f"includes('; {name} short, query 48 to 49')"),
    ):
        texts.page.mouse.move(box["x"] + 1, box["y"] + query / 640 * box["height"])
        texts.poll(f"{readout}.{shown}")
        assert (texts.state()["parts"]["cells"][1] is None) == (query > 100)
