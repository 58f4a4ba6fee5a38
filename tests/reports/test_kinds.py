"""What must hold in every view: nothing moves under the pointer, captions say what is drawn."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise import scan as scan_model
from headwise.models import tiny
from headwise.reports.page import save_scan_page
from headwise.reports.report import ScanReport
from headwise.scanning.statistics.maps import Map, TopKeysOfEveryQuery
from tests.quick import others_extra, others_slow
from tests.reports.browser import Chromium, Opened, needs_a_browser

pytestmark = needs_a_browser

TEXT = "the quick brown fox jumps over the lazy dog while it was asleep. " * 2
SIZES = [(1400, 900), (900, 700), (390, 844)]
NAMES = ("a-model-with-a-long-name", "a-model-with-a-long-name-changed")
VIEWS: dict[str, str] = {
    "A": "{ mode: 'A' }",
    "B": "{ mode: 'B' }",
    "both": "{ mode: 'both' }",
    "diff": "{ mode: 'diff' }",
    "maps": "{ mode: 'A', order: 'maps' }",
    "values": "{ mode: 'both', order: 'value' }",
    "links": "{ mode: 'A', order: 'links', token: 40 }",
    "moves": "{ mode: 'both', order: 'links', token: 40 }",
    "pair": "{ mode: 'both', order: 'links', token: 40, second: 16 }",
    "ranked": "{ mode: 'B', order: 'strongest', token: 40 }",
    "looked at": "{ mode: 'both', order: 'layers', direction: 'queries' }",
    "layer": "{ subject: 'layer' }",
}
RESET = (
    "{ mode: 'both', order: 'layers', token: null, second: null, direction: 'keys', "
    "subject: 'head', statistic: 'apart' }"
)


def scans(layer: int = 2, head: int = 0) -> tuple[Any, Any]:
    """The small model, and a copy of which one head attends evenly."""
    read = []
    for changed in (False, True):
        model = tiny.load()
        if changed:
            width = model.blocks[layer].attention.head_dim
            with torch.no_grad():
                weight = model.blocks[layer].attention.q_proj.weight
                weight[head * width : (head + 1) * width] = 0
        wanted = ["standard", Map(256), TopKeysOfEveryQuery()]
        read.append(scan_model(model, tiny.encode(TEXT)[None], statistics=wanted))
    return read[0], read[1]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    before, after = scans()
    report = ScanReport.of(before, title="the small model", name_of=chr)
    folder = tmp_path_factory.mktemp("kinds")
    return save_scan_page(folder / "two.html", replace(report, second=after, names=NAMES))


def show(opened: Opened, view: str, tab: str = "text") -> None:
    opened.do(f"headwise.app.set({{ ...{RESET}, ...{VIEWS[view]}, tab: '{tab}' }})")
    opened.load()
    if "token" in VIEWS[view]:
        opened.wait("s.parts.links.token === s.token || !['links', 'strongest'].includes(s.order)")
    opened.settle()


# ---- nothing moves under the pointer -------------------------------------------------------------

BOXES = """() => Object.fromEntries([
  ".summary", ".ranking", ".text .scroller", ".text .pane", ".cells", ".map .box", ".facts",
  ".readout", ".badge", ".ways", ".unit"].flatMap((name) => {
    const each = document.querySelector(name);
    if (!each?.checkVisibility()) return [];
    const { left, top, width, height } = each.getBoundingClientRect();
    return [[name, [left, top, width, height].map(Math.round)]];
  }))"""


@pytest.mark.parametrize("scheme", others_extra(["light", "dark"], quick=["light"]))
@pytest.mark.parametrize(("width", "height"), others_extra(SIZES, SIZES[-1], quick=[SIZES[0]]))
def test_nothing_grows_under_the_pointer(
    browser: Chromium, two: Path, width: int, height: int, scheme: str
) -> None:
    options = {"width": width, "height": height, "color_scheme": scheme}
    moved = set()
    with browser.open(two, address="", **options) as opened:
        page = opened.page
        for view in VIEWS:
            show(opened, view, "text" if width < 700 else "map")
            before = page.evaluate(BOXES)
            tokens = page.locator(".scroller .t")
            for place in range(0, min(60, tokens.count()), 13):
                box = tokens.nth(place).bounding_box()
                assert box is not None
                page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
                opened.settle()
                after = page.evaluate(BOXES)
                moved |= {f"{view}: {name}" for name in before if before[name] != after.get(name)}
            page.mouse.move(0, 0)
        assert opened.complaints == []
    assert sorted(moved) == []


@pytest.mark.parametrize("view", others_slow(["both", "A", "diff", "moves", "links", "looked at"]))
def test_ten_clicks_pin_ten_tokens(browser: Chromium, two: Path, view: str) -> None:
    """The pointer rests on a token, and a click a little later pins that one."""
    with browser.open(two, address="", width=1400, height=900) as opened:
        show(opened, view)
        hits = 0
        for token in range(2, 52, 5):
            box = opened.page.locator(f'.scroller [data-t="{token}"]').bounding_box()
            assert box is not None
            at = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
            opened.page.mouse.move(*at)
            opened.settle()
            opened.page.mouse.click(*at)
            opened.settle()
            hits += opened.state()["token"] == token
            opened.page.mouse.move(0, 0)
        assert hits == 10


@pytest.mark.slow
def test_the_second_token_of_a_pair_moves_nothing(browser: Chromium, two: Path) -> None:
    with browser.open(two, address="", width=1400, height=900) as opened:
        show(opened, "links")
        before = opened.page.evaluate(BOXES)
        opened.page.locator('.scroller [data-t="16"]').click(modifiers=["Shift"])
        opened.wait("s.second === 16")
        opened.settle()
        after = opened.page.evaluate(BOXES)
        assert after[".text .scroller"] == before[".text .scroller"]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), others_slow(SIZES[:2]))
def test_asking_what_to_compare_moves_nothing(
    browser: Chromium, two: Path, width: int, height: int
) -> None:
    with browser.open(two, address="", width=width, height=height) as opened:
        show(opened, "A")
        before = opened.page.evaluate(BOXES)
        opened.do("headwise.app.choosing(true)")
        opened.settle()
        after = opened.page.evaluate(BOXES)
        assert opened.page.is_visible(".hint")
        assert {name: after[name] for name in after} == {
            name: box for name, box in before.items() if name != ".unit"
        }


# ---- a caption belongs to what is drawn ----------------------------------------------------------


@pytest.mark.parametrize("statistic", others_slow(["entropy", "apart"]))
@pytest.mark.parametrize("order", others_slow(["layers", "maps", "value", "links", "strongest"]))
def test_a_caption_says_what_is_drawn(
    browser: Chromium, two: Path, order: str, statistic: str
) -> None:
    """Of A, of B or of B − A; and of the statistic only where the cells show it."""
    a, b = NAMES
    with browser.open(two, address="") as opened:
        for mode in ("A", "B", "both", "diff"):
            given = f"mode: '{mode}', order: '{order}', statistic: '{statistic}', token: 40"
            opened.do(f"headwise.app.set({{ ...{RESET}, {given} }})")
            opened.load()
            opened.settle()
            is_word = order in ("links", "strongest")
            if is_word:
                opened.wait("s.parts.links.token === 40")
            caption = opened.page.inner_text(".unit")
            is_total = statistic == "apart" and not is_word and order != "maps"
            is_shown = statistic == "entropy" and not (is_word or order == "maps")
            assert ("Entropy" in caption) == is_shown, (mode, caption)
            assert caption.startswith("Total change") == is_total, (mode, caption)
            side = {"A": f"of A, {a}", "B": f"of B, {b}"}.get(mode, f"{b} − {a}")
            assert (side in caption) == (not is_total), (mode, caption)
            # Strips and the choice of a statistic stand where the cells show it.
            shown = "document.querySelector('.cells .spread .bar') !== null"
            assert opened.page.evaluate(shown) == (order == "layers")


# ---- the word grid of two scans ------------------------------------------------------------------


@pytest.mark.parametrize("direction", others_slow(["keys", "queries"]))
def test_the_word_grid_is_of_a_of_b_and_of_the_change(
    browser: Chromium, two: Path, direction: str
) -> None:
    token, seen = 40, {}
    before, after = scans()
    maps = [[layer.double() for layer in read["map"]] for read in (before, after)]
    with browser.open(two, address="") as opened:
        for mode in ("A", "B", "diff"):
            given = f"mode: '{mode}', order: 'links', token: {token}, direction: '{direction}'"
            opened.do(f"headwise.app.set({{ {given} }})")
            opened.wait(
                f"s.parts.links.token === {token} && s.parts.links.direction === '{direction}'"
            )
            opened.settle()
            opened.load()
            links = opened.state()["parts"]["links"]["all"]
            seen[mode] = {(each["layer"], each["head"]): each for each in links}
        evens = opened.page.inner_text('[data-id="2.0"]')
    assert evens.splitlines()[-1] != ""
    for layer, head in product(range(4), range(8)):
        a, b = (
            (values[layer][head, token] if direction == "keys" else values[layer][head, :, token])
            for values in maps
        )
        for mode, row in (("A", a), ("B", b)):
            link = seen[mode][layer, head]
            assert abs(link["weight"] ** 0.5 - float(row.max()) ** 0.5) < 1.01 / 255
            assert abs(float(row[link["other"]]) ** 0.5 - float(row.max()) ** 0.5) < 1.01 / 255
        link, change = seen["diff"][layer, head], b - a
        step = 2 * 1.01 / 255
        assert abs(link["weight"] - float(change[link["other"]])) < step
        assert abs(link["weight"]) >= 0.9 * float(change.abs().max()) - step


def test_an_even_head_has_no_target(browser: Chromium, two: Path) -> None:
    with browser.open(two, address="") as opened:
        given = "mode: 'B', layer: 2, head: 0, order: 'links', token: 60"
        opened.do(f"headwise.app.set({{ ...{RESET}, {given} }})")
        opened.load()
        opened.wait("s.parts.links.token === 60 && s.head === 0")
        opened.settle()
        assert opened.page.inner_text('[data-id="2.0"]').startswith("evenly\n")
        assert "looks evenly at its tokens" in str(
            opened.page.get_attribute('[data-id="2.0"]', "aria-label")
        )
        assert opened.state()["parts"]["links"]["all"] is not None
        summary = opened.page.inner_text(".summary")
        assert "evenly" in summary
        assert opened.page.locator(".summary b").count() == 0
        opened.do("headwise.app.set({ mode: 'diff' })", "s.mode === 'diff'")
        opened.poll("document.querySelector('[data-id=\"2.0\"]').textContent.includes('→ evenly')")


# ---- two scans: one card a head ------------------------------------------------------------------


def test_a_card_has_the_maps_of_both(browser: Chromium, two: Path) -> None:
    with browser.open(two, address="") as opened:
        page = opened.page
        heads = page.locator(".way").evaluate_all("(all) => all.map((x) => x.dataset.head)")
        assert heads[0] == "2.0"
        assert len({*heads}) == len(heads)
        assert "2.0 now attends" in page.inner_text(".way >> nth=0")
        assert page.locator(".way >> nth=0").locator("canvas").count() == 2
        assert page.locator(".way >> nth=0").locator("canvas").first.bounding_box()["width"] == 40  # type: ignore[index]
        assert "of 32 heads changed by more than 1" in page.inner_text("[data-part=total-change]")
        table = page.locator("[data-part=facts] table")
        assert table.locator("thead th").all_inner_texts() == ["statistic", "A", "B", "change"]
        assert "no value" not in table.locator("tbody tr").first.inner_text()
        # The column of changes is in sight, whatever the models are called.
        box, pane = table.locator("th").last.bounding_box(), page.locator(".facts").bounding_box()
        assert box is not None
        assert pane is not None
        assert box["x"] + box["width"] <= pane["x"] + pane["width"]


# ---- Escape, and layers during a comparison ------------------------------------------------------


def test_escape_leaves_a_comparison_before_it_unpins(browser: Chromium, path: Path) -> None:
    with browser.open(path, address="#h=1.0&o=0.2.3&m=both&t=7") as opened:
        opened.page.keyboard.press("Escape")
        opened.wait("s.other === null && s.mode === 'A' && s.token === 7")
        opened.page.keyboard.press("Escape")
        opened.wait("s.token === null")
        opened.do("headwise.app.compareLayers(2)", "s.against === 2")
        opened.page.focus(".scroller")
        opened.page.keyboard.press("Escape")
        opened.wait("s.against === null")


def test_a_head_is_not_compared_with_itself(browser: Chromium, path: Path) -> None:
    with browser.open(path, address="#h=0.2&o=0.1.2&m=diff") as opened:
        opened.page.click('[data-layer="1"]')
        opened.wait("s.layer === 1 && s.head === 2 && s.other === null && s.mode === 'A'")
        assert opened.page.inner_text("[data-part=compare] h2") == "layer 1, head 2"
