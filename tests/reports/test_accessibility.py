"""axe finds nothing; targets are large enough; colours can be told apart; paper and other modes."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from headwise.reports import diagnosis
from headwise.reports import page as scan_page
from headwise.reports.images import css_colour, viridis_colour
from tests.quick import others_extra, others_slow
from tests.reports.accessibility import small_targets, violations
from tests.reports.browser import Chromium, Opened, needs_a_browser
from tests.reports.diagnoses import report_of_model
from tests.reports.prunings import page_of_pruning, page_of_regrouping
from tests.reports.studies import recorded_study
from tests.reports.viewer_scans import viewer_report, viewer_scan
from tests.reports.written_pages import page_of, tokenized
from tests.scanning.written_texts import TEXTS

pytestmark = needs_a_browser

SCHEMES = ("light", "dark")
PAGES: dict[str, Callable[[], str]] = {
    "viewer": lambda: scan_page.render_scan_page(viewer_report(viewer_scan())),
    "two": lambda: scan_page.render_scan_page(viewer_report(viewer_scan(), second=viewer_scan())),
    "static": lambda: scan_page.render_static(viewer_report(viewer_scan())),
    "diagnosis": lambda: diagnosis.render_diagnosis_page(report_of_model()),
    "study": recorded_study,
    "pruning": page_of_pruning,
    "regrouping": page_of_regrouping,
}


@pytest.fixture(scope="module", params=others_slow(PAGES, "viewer", "static"))
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp(request.param) / f"{request.param}.html"
    page.write_text(PAGES[request.param](), "utf-8")
    return page


@pytest.mark.parametrize("scheme", others_extra(SCHEMES, quick=["light"]))
def test_axe_finds_nothing(browser: Chromium, page: Path, scheme: str) -> None:
    waits = page.stem in ("viewer", "two")
    with browser.open(page, waits=waits, color_scheme=scheme) as opened:
        if waits:
            opened.do("headwise.app.pin(7)", "s.token === 7")
        assert violations(opened) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", others_extra(SCHEMES, quick=["light"]))
@pytest.mark.parametrize("order", others_slow(["links", "strongest"], "links"))
def test_axe_finds_nothing_in_one_word(
    browser: Chromium, tmp_path: Path, order: str, scheme: str
) -> None:
    page = scan_page.save_scan_page(tmp_path / "page.html", viewer_report(viewer_scan(top=4)))
    for second in ("", "&u=290"):
        address = f"#t=300&v={order}{second}"
        with browser.open(page, address=address, color_scheme=scheme) as opened:
            opened.wait("s.parts.links.all?.length === 12")
            assert violations(opened) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", others_extra(SCHEMES, quick=["dark"]))
@pytest.mark.usefixtures("shapes_unchecked")
def test_axe_finds_nothing_in_a_text_as_it_was_written(
    browser: Chromium, tmp_path: Path, scheme: str
) -> None:
    """With marks, right-to-left lines, places of a search, lit tokens and arcs."""
    text = "\n".join(TEXTS.values())
    page = page_of(tmp_path, tokenized("byte-level", text))
    with browser.open(page, address="#t=200&q=o", color_scheme=scheme) as opened:
        opened.poll("document.querySelectorAll('[data-found]').length > 0")
        opened.poll("document.querySelector('.run[dir=rtl]') !== null")
        opened.poll("document.querySelectorAll('[data-mark]').length > 0")
        assert violations(opened) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", others_extra(SCHEMES, quick=["dark"]))
def test_axe_finds_nothing_where_files_are_chosen(
    browser: Chromium, path: Path, scheme: str
) -> None:
    with browser.open(path, address="#t=300", color_scheme=scheme) as opened:
        opened.page.click("[data-part=export-opener]")
        assert opened.page.locator("[data-subject]").count() == 3
        assert violations(opened) == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing_in_what_is_said_about_the_page(
    browser: Chromium, path: Path, scheme: str
) -> None:
    with browser.open(path, width=390, height=400, color_scheme=scheme) as opened:
        opened.page.click(".about summary")
        notes = opened.page.locator(".about .notes")
        assert notes.evaluate("(notes) => notes.scrollHeight > notes.clientHeight")
        assert violations(opened) == []


def test_axe_can_find_something(browser: Chromium, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><html><body><img src='data:,'><button></button></body></html>")
    with browser.open(page, waits=False) as opened:
        assert {each.split(":")[0] for each in violations(opened)} >= {"image-alt", "button-name"}


@pytest.mark.slow
@pytest.mark.parametrize(("touch", "least"), others_slow([(False, 24), (True, 44)], (True, 44)))
def test_targets_are_large_enough(
    browser: Chromium, tmp_path: Path, touch: bool, least: int
) -> None:
    width = 390 if touch else 1400
    page = scan_page.save_scan_page(tmp_path / "page.html", viewer_report(viewer_scan(heads=12)))
    with browser.open(page, width=width, has_touch=touch, is_mobile=touch) as opened:
        opened.do("headwise.app.set({ token: 300, second: 290 })", "s.second === 290")
        views = [(tab, "layers") for tab in ("heads", "map", "facts", "text")]
        for tab, order in (*views, ("heads", "links"), ("heads", "strongest")):
            opened.do(f"headwise.app.set({{ tab: '{tab}', order: '{order}' }})")
            opened.wait(f"s.tab === '{tab}' && s.order === '{order}'")
            opened.poll(f"document.querySelector('.cells.{order}') !== null")
            assert small_targets(opened, least) == []


EYES = ["protanopia", "deuteranopia", "tritanopia"]
PAINT = """(colours) => document.body.replaceChildren(...colours.map((colour) => {
  const cell = document.createElement("div");
  cell.style.cssText = `float:left;width:20px;height:20px;background:${colour}`;
  return cell;
}))"""


def seen(opened: Opened, colours: list[str], kind: str) -> list[tuple[int, ...]]:
    """Colours as an eye with a deficiency sees them."""
    session = opened.page.context.new_cdp_session(opened.page)
    session.send("Emulation.setEmulatedVisionDeficiency", {"type": kind})
    opened.page.evaluate(PAINT, colours)
    clip = {"x": 8, "y": 8, "width": 20 * len(colours), "height": 12}
    shown = _pixels(opened.page.screenshot(clip=clip))
    session.detach()  # with which the tab sees as before
    return [shown[n * 20 + 2] for n in range(len(colours))]


@pytest.mark.parametrize("kind", others_extra(EYES, quick=["deuteranopia"]))
def test_the_scale_is_ordered_for_every_eye(browser: Chromium, path: Path, kind: str) -> None:
    with browser.open(path) as opened:
        steps = [css_colour(viridis_colour(n / 8)) for n in range(9)]
        luminance = [_luminance(colour) for colour in seen(opened, steps, kind)]
        assert luminance == sorted(luminance)
        assert min(b - a for a, b in pairwise(luminance)) > 0.004


@pytest.mark.parametrize("scheme", others_extra(SCHEMES, quick=["light"]))
@pytest.mark.parametrize("kind", others_extra(EYES, quick=["deuteranopia"]))
def test_more_and_less_differ_for_every_eye(
    browser: Chromium, path: Path, kind: str, scheme: str
) -> None:
    """The scale of B − A: nearest to the paper at 0, farther to both ends, which differ."""
    with browser.open(path, color_scheme=scheme) as opened:
        opened.do("headwise.app.compareWith({ scan: 0, layer: 2, head: 3 })", "s.mode === 'diff'")
        opened.poll("document.querySelectorAll('.legend .swatch').length > 4")
        stops = opened.page.evaluate(
            "[...document.querySelectorAll('.map .legend .swatch')]"
            ".map((swatch) => getComputedStyle(swatch).backgroundColor)"
        )
        colours = seen(opened, stops, kind)
        luminance, middle = [_luminance(colour) for colour in colours], len(stops) // 2
        is_dark = scheme == "dark"
        assert luminance[: middle + 1] == sorted(luminance[: middle + 1], reverse=is_dark)
        assert luminance[middle:] == sorted(luminance[middle:], reverse=not is_dark)
        for n in range(middle):
            less, more = colours[n], colours[-1 - n]
            assert max(abs(a - b) for a, b in zip(less, more, strict=True)) > 40
            for end in (n, -1 - n):  # 3 is the least contrast of what is no text
                assert _contrast(luminance[end], luminance[middle]) >= (3 if n == 0 else 1.5)


def _contrast(a: float, b: float) -> float:
    """The contrast of two luminances, as WCAG 2 defines it."""
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


@pytest.mark.parametrize("mode", ["A", "diff"])
@pytest.mark.parametrize("scheme", others_extra(SCHEMES, quick=["light"]))
def test_arcs_are_seen_on_the_paper(browser: Chromium, path: Path, scheme: str, mode: str) -> None:
    with browser.open(path, color_scheme=scheme) as opened:
        opened.do(
            "headwise.app.compareWith({ scan: 0, layer: 2, head: 3 });"
            f"headwise.app.set({{ mode: '{mode}', token: 7 }})",
            f"s.mode === '{mode}' && s.token === 7",
        )
        kinds = {"A": [""], "diff": ["", "less"]}[mode]
        strokes = opened.page.locator(".text .arcs").first.evaluate(
            """(svg, kinds) => kinds.map((kind) => {
              const path = document.createElementNS(svg.namespaceURI, "path");
              path.setAttribute("class", kind);
              svg.append(path);
              const { stroke, strokeOpacity } = getComputedStyle(path);
              return [stroke, strokeOpacity];
            })""",
            kinds,
        )
        paper = opened.page.locator(".text .pane").first.evaluate(
            "(pane) => getComputedStyle(pane).backgroundColor"
        )
        for stroke, opacity in strokes:
            assert opacity == "1"
            assert _contrast(*(_luminance(_channels(each)) for each in (stroke, paper))) >= 3


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", colour)[:3])


def _pixels(png: bytes) -> list[tuple[int, ...]]:
    """The first row of a picture."""
    from io import BytesIO

    from matplotlib.image import imread

    row = imread(BytesIO(png), format="png")[6]
    return [tuple(int(255 * part) for part in pixel[:3]) for pixel in row]


def _luminance(colour: tuple[int, ...]) -> float:
    linear = [(c / 255 / 12.92) if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_forced_colours_keep_the_scale(browser: Chromium, path: Path) -> None:
    with browser.open(path, forced_colors="active") as opened:
        colours = opened.page.evaluate(
            "[...document.querySelectorAll('.cell')]"
            ".map((cell) => getComputedStyle(cell).backgroundColor)"
        )
        assert len({*colours}) > 5


def test_reduced_motion_moves_nothing(browser: Chromium, path: Path) -> None:
    with browser.open(path, reduced_motion="reduce") as opened:
        moving = opened.page.evaluate(
            """[...document.querySelectorAll("*")].filter((e) => {
              const style = getComputedStyle(e);
              return style.animationName !== "none" || parseFloat(style.transitionDuration) > 0 ||
                style.scrollBehavior === "smooth";
            }).length"""
        )
        assert moving == 0
