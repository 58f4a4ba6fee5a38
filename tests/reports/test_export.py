"""Figures for print and the lines of Python that draw the same, in a real browser."""

import csv
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor

from headwise import scan as scan_model
from headwise.models import tiny
from headwise.reports.images import viridis_colour
from headwise.reports.page import save_scan_page
from headwise.scanning.result import HeadScan
from tests.quick import others_extra, others_slow
from tests.reports.browser import Chromium, Opened, needs_a_browser
from tests.reports.viewer_scans import WORDS, turned, viewer_report, viewer_scan

pytestmark = needs_a_browser

SVG = "{http://www.w3.org/2000/svg}"
HREF = "{http://www.w3.org/1999/xlink}href"
DENSITY = 3  # pixels of a PNG for each of the figure
STOPS = ["0 %", "1.0 %", "10 %", "25 %", "50 %", "100 %"]
LENGTH = 640
CELLS = 80  # on each side of its map, in blocks of 8 tokens
SHORT = 32  # tokens, of which a map holds each
EXPORT = "[data-part=export-opener]"


class Figure:
    """An SVG that was saved: its texts, and where its parts stand."""

    def __init__(self, content: str) -> None:
        self.root = ElementTree.fromstring(content)
        self.parts = list(self._walk(self.root, 0.0, 0.0))

    def _walk(
        self, element: ElementTree.Element, x: float, y: float
    ) -> Iterator[tuple[ElementTree.Element, float, float]]:
        moved = re.match(r"translate\(([-\d.]+),([-\d.]+)\)", element.get("transform", ""))
        if moved:
            x, y = x + float(moved[1]), y + float(moved[2])
        yield element, x, y
        for child in element:
            yield from self._walk(child, x, y)

    def all(self, tag: str) -> list[ElementTree.Element]:
        return [element for element, _, _ in self.parts if element.tag == SVG + tag]

    @property
    def texts(self) -> list[str]:
        return [element.text or "" for element in self.all("text")]

    @property
    def title(self) -> str:
        title = self.root.find(f"{SVG}title")
        assert title is not None
        return title.text or ""

    @property
    def scale(self) -> tuple[list[str], list[tuple[float, Any]]]:
        """The words beside the colour bar, and the colours of its gradient from 0 to 1."""
        (bar,) = [part for part in self.all("g") if part.get("data-part") == "scale"]
        words = [text.text or "" for text in bar.iter(f"{SVG}text")]
        stops = [
            (float(stop.get("offset", "")), ImageColor.getrgb(stop.get("stop-color", "")))
            for stop in bar.iter(f"{SVG}stop")
        ]
        return words, stops

    @property
    def marks(self) -> list[float]:
        """Where the marks of the colour bar stand, from 0 to 1."""
        (bar,) = [part for part in self.all("g") if part.get("data-part") == "scale"]
        box = next(bar.iter(f"{SVG}rect"))
        lines = [float(line.get("y1", 0)) for line in bar.iter(f"{SVG}line")]
        return [1 - y / float(box.get("height", 0)) for y in lines]

    @property
    def images(self) -> list[tuple[float, float, float, float]]:
        """Where each map stands: x, y, width, height."""
        found = [part for part in self.parts if part[0].tag == f"{SVG}image"]
        return [(x, y, float(e.get("width", 0)), float(e.get("height", 0))) for e, x, y in found]


def assert_is_viridis(stops: Any) -> None:
    assert (stops[0][0], stops[-1][0]) == (0, 1)
    for position, colour in stops:
        expected = viridis_colour(position)
        assert max(abs(a - b) for a, b in zip(colour, expected, strict=True)) <= 6


# A picture is encoded between two frames; where nothing moves, after a second.
FRAMES = "(function frame() { requestAnimationFrame(frame); })()"


def save(opened: Opened, subject: str, form: str, folder: Path) -> Path:
    """Open the dialog, save a file, and close the dialog."""
    opened.page.click(EXPORT)
    opened.page.evaluate(FRAMES)
    with opened.page.expect_download() as download:
        opened.page.click(f"[data-subject={subject}] [data-format={form}]")
    file = folder / f"{subject}.{form}"
    download.value.save_as(file)
    opened.page.keyboard.press("Escape")
    return file


def figure(opened: Opened, subject: str, folder: Path) -> Figure:
    return Figure(save(opened, subject, "svg", folder).read_text("utf-8"))


def python_of(opened: Opened, subject: str) -> str:
    opened.page.click(EXPORT)
    lines = opened.page.inner_text(f"[data-subject={subject}] code")
    opened.page.keyboard.press("Escape")
    return lines


def choose(opened: Opened, layer: int, head: int) -> None:
    opened.do(
        f"headwise.app.choose({{ layer: {layer}, head: {head} }})",
        f"s.layer === {layer} && s.head === {head}",
    )
    opened.load()


def pin(opened: Opened, token: int) -> None:
    opened.do(
        f"headwise.app.set({{ token: {token} }})", f"s.lit.entries.length && s.token === {token}"
    )


def short_scan() -> HeadScan:
    """A text of single tokens."""
    return viewer_scan(length=SHORT, cells=SHORT, top=0)


@pytest.fixture(scope="module")
def scans() -> dict[str, HeadScan]:
    return {"long": viewer_scan(length=LENGTH), "short": short_scan()}


@pytest.fixture(scope="module")
def paths(scans: dict[str, HeadScan], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("export")
    moved = viewer_scan(length=LENGTH)
    moved.layer_scans[1].summaries["induction"]["sum"][2] = 0.1
    moved.layer_scans[1].summaries["map"]["sum"][0] = moved["map"][1, 1] * 5
    scans["before"] = moved
    scans["turned"] = turned(scans["long"], torch.tensor([1, 2, 0, 4, 3]))
    reports = {
        "long": viewer_report(scans["long"]),
        "short": viewer_report(scans["short"]),
        "two": viewer_report(moved, second=scans["long"], names=("before", "after")),
        "matched": viewer_report(
            moved, second=scans["turned"], match=True, names=("before", "turned")
        ),
    }
    return {name: save_scan_page(folder / f"{name}.html", each) for name, each in reports.items()}


@pytest.fixture
def opens(browser: Chromium, paths: dict[str, Path]) -> Iterator[Callable[[str], Opened]]:
    """Open a page in the dark scheme; nothing is asked for but the page itself."""
    opened = []

    def open_page(name: str) -> Opened:
        context = browser.open(paths[name], color_scheme="dark")
        page = context.__enter__()
        opened.append((context, page, paths[name]))
        return page

    yield open_page
    for context, page, path in opened:
        complaints, requests = page.complaints, page.requests
        context.__exit__(None, None, None)
        assert complaints == []
        # Files that are saved are blobs of the page.
        asked = {address.partition("#")[0] for address in requests}
        assert {each for each in asked if not each.startswith(("blob:", "data:"))} == {
            path.as_uri()
        }


# ---- the map ------------------------------------------------------------------------------------


def test_a_map_has_its_title_its_scale_and_words(
    opens: Any, scans: dict[str, HeadScan], tmp_path: Path
) -> None:
    opened = opens("short")
    choose(opened, 1, 2)
    drawn = figure(opened, "map", tmp_path)
    assert drawn.title == "made-up: layer 1, head 2"
    ids = scans["short"].texts[0].ids.tolist()
    words = [WORDS[token].replace("\n", "⏎") for token in ids]
    assert "Weight from each query to each key; one token a cell." in drawn.texts
    first = drawn.texts.index(words[0])
    assert drawn.texts[first : first + 2 * SHORT] == [*words, *words]  # queries, then keys
    assert {"query", "key"} <= set(drawn.texts)
    names, stops = drawn.scale
    assert names == [*STOPS, "weight"]
    assert drawn.marks == pytest.approx([0, 0.1, 0.1**0.5, 0.5, 0.5**0.5, 1], abs=1e-3)
    assert_is_viridis(stops)
    (paper, *_) = drawn.all("rect")
    assert paper.get("fill") == "#fff"
    assert paper.get("width") == drawn.root.get("width")


def colours_of(png: Path, drawn: Figure, shape: tuple[int, int], places: Any) -> Any:
    """The colours in the middle of cells of the first map."""
    picture = np.asarray(Image.open(png).convert("RGB"), int)
    x, y, width, height = (DENSITY * each for each in drawn.images[0])
    rows = y + (places[:, 0] + 0.5) * height / shape[0]
    columns = x + (places[:, 1] + 0.5) * width / shape[1]
    return picture[rows.astype(int), columns.astype(int)]


@pytest.mark.slow
def test_a_picture_is_white_and_has_the_colours_of_the_weights(
    opens: Any, scans: dict[str, HeadScan], tmp_path: Path
) -> None:
    opened = opens("long")
    choose(opened, 2, 1)
    drawn, png = figure(opened, "map", tmp_path), save(opened, "map", "png", tmp_path)
    picture = np.asarray(Image.open(png).convert("RGB"))
    assert picture.shape == (
        DENSITY * int(drawn.root.get("height", 0)),
        DENSITY * int(drawn.root.get("width", 0)),
        3,
    )
    for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1]):
        assert (edge == 255).all()
    assert (picture == 255).all(-1).mean() > 0.25
    values = scans["long"]["map"][2, 1]
    generator = np.random.default_rng(3)
    places = np.concatenate(
        [generator.integers(CELLS, size=(100, 2)), (values > 0.05).nonzero().numpy()]
    )
    expected = [viridis_colour(float(values[row, column]) ** 0.5) for row, column in places]
    # Two tables of viridis, and the byte in which the weight is stored.
    assert np.abs(colours_of(png, drawn, (CELLS, CELLS), places) - expected).max() <= 6


@pytest.mark.slow
def test_the_part_in_sight_is_drawn(opens: Any, scans: dict[str, HeadScan], tmp_path: Path) -> None:
    opened = opens("long")
    choose(opened, 2, 1)
    opened.do("headwise.app.set({ zoom: [8, 0.25, 0.5] })", "s.zoom[0] === 8")
    drawn, png = figure(opened, "map", tmp_path), save(opened, "map", "png", tmp_path)
    assert "In sight: queries 320 to 399 of 640, keys 160 to 239 of 640." in drawn.texts
    assert {"320", "160"} <= set(drawn.texts)
    values = scans["long"]["map"][2, 1][40:50, 20:30]
    places = np.argwhere(np.ones((10, 10)))
    expected = [viridis_colour(float(values[row, column]) ** 0.5) for row, column in places]
    assert values.max() > 0.05
    assert np.abs(colours_of(png, drawn, (10, 10), places) - expected).max() <= 6
    # 32 tokens: their words, and the stored weights of single ones as squares.
    choose(opened, 1, 0)
    opened.do("headwise.app.set({ zoom: [20, 0.9, 0.9] })", "s.zoom[0] === 20")
    near = figure(opened, "map", tmp_path)
    ids = scans["long"].texts[0].ids.tolist()
    words = [WORDS[token].replace("\n", "⏎") for token in ids[576:608]]
    first = near.texts.index(words[0])
    assert near.texts[first : first + 64] == [*words, *words]
    summary = scans["long"].layer_scans[1].summaries["top_keys_of_every_query"]
    keys, shares = (summary[name][0, 576:608] for name in ("key", "share"))
    inside = (keys >= 576) & (keys < 608) & ((255 * shares.clamp(min=0).sqrt()).round() > 0)
    squares = [each for each in near.all("rect") if each.get("stroke") == "#fff"]
    assert len(squares) == int(inside.sum()) > 5


@pytest.mark.slow
def test_a_difference_names_both_heads(
    opens: Any, scans: dict[str, HeadScan], tmp_path: Path
) -> None:
    opened = opens("long")
    choose(opened, 0, 1)
    opened.do("headwise.app.compareWith({ scan: 0, layer: 2, head: 3 })", "s.mode === 'diff'")
    opened.load()
    drawn, png = figure(opened, "map", tmp_path), save(opened, "map", "png", tmp_path)
    assert drawn.title == "made-up: layer 2, head 3 (B) − layer 0, head 1 (A)"
    change = scans["long"]["map"][2, 3] - scans["long"]["map"][0, 1]
    names, stops = drawn.scale
    most = f"{100 * float(change.abs().max()):.0f} %"
    assert (names[0], names[2], names[4], names[5]) == (f"−{most}", "0 %", most, "B − A")
    colours = np.array([colour for _, colour in stops])
    places = (change.abs() > 0.02).nonzero().numpy()
    shown = colours_of(png, drawn, (CELLS, CELLS), places)
    for (row, column), colour in zip(places, shown, strict=True):
        share = float(change[row, column] / change.abs().max())
        position = (1 + np.sign(share) * abs(share) ** 0.5) / 2
        expected = [np.interp(position, np.linspace(0, 1, len(stops)), each) for each in colours.T]
        # Between stops of the gradient, and the bytes in which both weights are stored.
        assert np.abs(colour - expected).max() <= 12


@pytest.mark.slow
def test_maps_side_by_side_are_two(opens: Any, tmp_path: Path) -> None:
    opened = opens("long")
    choose(opened, 0, 1)
    opened.do(
        "headwise.app.set({ other: { scan: 0, layer: 2, head: 3 }, mode: 'both' })",
        "s.mode === 'both'",
    )
    opened.poll("headwise.app.beside.loaded !== null")
    drawn = figure(opened, "map", tmp_path)
    assert drawn.title == "made-up: layer 0, head 1 (A) and layer 2, head 3 (B)"
    (first, second) = drawn.images
    assert second[0] > first[0] + first[2]
    assert {"A", "B"} <= set(drawn.texts)


# ---- all heads, and a token ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "statistic", others_extra(["previous_token", "entropy"], quick=["entropy"])
)
def test_all_heads_have_their_values_and_the_scale(
    opens: Any, scans: dict[str, HeadScan], tmp_path: Path, statistic: str
) -> None:
    opened = opens("long")
    opened.do(f"headwise.app.set({{ statistic: '{statistic}' }})", f"s.statistic === '{statistic}'")
    opened.poll(f"document.querySelector('[aria-label=statistic]').value === '{statistic}'")
    drawn = figure(opened, "heads", tmp_path)
    values = scans["long"][statistic]
    definition = scans["long"].definition(statistic)
    assert drawn.title == f"made-up: {definition.heading}"
    cells = [rect for rect in drawn.all("rect") if rect.get("stroke") == "#fff"]
    assert len(cells) == values.numel()
    names, stops = drawn.scale
    is_share = statistic == "previous_token"
    high = 1.0 if is_share else float(np.log(LENGTH))
    for cell, value in zip(cells, values.flatten().tolist(), strict=True):
        position = (value / high) ** (0.5 if is_share else 1)
        expected = viridis_colour(position)
        colour = ImageColor.getrgb(cell.get("fill", ""))
        assert max(abs(a - b) for a, b in zip(colour, expected, strict=True)) <= 6
    numbers = [f"{100 * v:.0f}" if is_share else f"{v:.1f}" for v in values.flatten().tolist()]
    first = drawn.texts.index(numbers[0])
    # In each row the numbers of the heads, then the names of heads and layers.
    assert drawn.texts[first : first + 23] == [*numbers, *"01234", *"012"]
    assert (names[0], names[-2]) == (("0 %", "100 %") if is_share else ("0", "6.46"))
    assert_is_viridis(stops)
    values_of_marks = [
        float(name.removesuffix(" %")) / (100 if is_share else high) for name in names[:-1]
    ]
    roots = [value ** (0.5 if is_share else 1) for value in values_of_marks]
    assert drawn.marks == pytest.approx(roots, abs=1e-2)
    assert any(definition.formula in text for text in [" ".join(drawn.texts)])


@pytest.mark.slow
def test_a_change_of_all_heads_is_centred(opens: Any, tmp_path: Path) -> None:
    opened = opens("two")
    opened.do(
        "headwise.app.set({ statistic: 'induction', mode: 'diff' })", "s.statistic === 'induction'"
    )
    opened.poll("document.querySelector('[data-id=\"1.2\"]').textContent === '82'")
    drawn = figure(opened, "heads", tmp_path)
    assert drawn.title.endswith(", after (B) − before (A)")
    names, _ = drawn.scale
    assert names == ["−82 %", "−41 %", "0 %", "41 %", "82 %", "B − A"]
    assert "82" in drawn.texts


@pytest.mark.slow
def test_one_word_in_all_heads_has_its_words_and_its_table(opens: Any, tmp_path: Path) -> None:
    opened = opens("short")
    opened.page.click(EXPORT)
    assert opened.page.locator("[data-subject=word]").count() == 0
    opened.page.keyboard.press("Escape")
    pin(opened, 20)
    opened.do("headwise.app.toggleLinks()", "s.parts.links?.token === 20")
    opened.settle()
    shown = opened.page.locator("[data-part=grid] [data-id]")
    cells = [re.split(r"\s+(?=[<≥\d][^ ]* ?%$)", cell.strip()) for cell in shown.all_inner_texts()]
    drawn = figure(opened, "word", tmp_path)
    for word, share in cells:
        assert any(word in text for text in drawn.texts), word
        assert any(share.replace(" ", "") in text.replace(" ", "") for text in drawn.texts), share
    rows = list(csv.DictReader(io.StringIO(save(opened, "word", "csv", tmp_path).read_text())))
    links = opened.state()["parts"]["links"]["all"]
    assert len(rows) == len(links) == len(cells)
    for row, link in zip(rows, links, strict=True):
        assert (int(row["layer"]), int(row["head"])) == (link["layer"], link["head"])
        assert float(row["at least"]) <= link["weight"] <= float(row["at most"])
        assert row["bound"] == link["bound"]
        title = shown.and_(opened.page.locator(f'[data-id="{row["layer"]}.{row["head"]}"]'))
        assert row["sentence"] == title.get_attribute("title")


@pytest.mark.slow
def test_numbers_of_all_heads_are_of_both_scans(
    opens: Any, scans: dict[str, HeadScan], tmp_path: Path
) -> None:
    rows = list(
        csv.DictReader(io.StringIO(save(opens("two"), "heads", "csv", tmp_path).read_text()))
    )
    for side, scan in (("A", "before"), ("B", "long")):
        values = [float(row[f"induction {side}"]) for row in rows]
        assert values == pytest.approx(scans[scan]["induction"].flatten().tolist(), rel=1e-5)


@pytest.mark.slow
def test_a_link_is_the_address_of_what_is_shown(opens: Any, paths: dict[str, Path]) -> None:
    opened = opens("short")
    choose(opened, 1, 0)
    pin(opened, 20)
    opened.page.evaluate(
        "Object.defineProperty(navigator, 'clipboard',"
        " { value: { writeText: async (text) => { window.copied = text; } } })"
    )
    opened.page.click(EXPORT)
    opened.page.click("[data-part=copy-link]")
    opened.poll("document.querySelector('[data-part=copy-link]').textContent === 'copied'")
    link = opened.page.evaluate("copied")
    assert link.startswith(paths["short"].as_uri() + "#")
    shown = {name: opened.state()[name] for name in ("layer", "head", "token", "statistic")}
    opened.page.keyboard.press("Escape")
    opened.do("headwise.app.set({ layer: 0, head: 2, token: null })", "s.token === null")
    opened.do(f"location.hash = {link.partition('#')[2]!r}", "s.token === 20")
    assert {name: opened.state()[name] for name in shown} == shown


@pytest.mark.slow
def test_the_answer_of_a_token(opens: Any, scans: dict[str, HeadScan], tmp_path: Path) -> None:
    opened = opens("long")
    choose(opened, 1, 0)
    pin(opened, 300)
    drawn = figure(opened, "token", tmp_path)
    ids = scans["long"].texts[0].ids.tolist()
    assert drawn.title == f"made-up: layer 1, head 0: what “{WORDS[ids[300]]}” at 300 looks at"
    lit = [entry for entry in opened.state()["lit"]["entries"] if entry["weight"] >= 0.01]
    bars = [rect for rect in drawn.all("rect") if rect.get("data-weight")]
    assert [float(bar.get("data-weight", 0)) for bar in bars] == [e["weight"] for e in lit]
    widths = [float(bar.get("width", 0)) for bar in bars]
    assert [w / widths[0] for w in widths] == pytest.approx(
        [e["weight"] / lit[0]["weight"] for e in lit], abs=1e-3
    )
    for entry in lit:
        assert f"“{WORDS[ids[entry['first']]]}” at {entry['first']}" in drawn.texts
    assert any("among its top 4" in text for text in drawn.texts)
    png = np.asarray(Image.open(save(opened, "token", "png", tmp_path)).convert("RGB"))
    assert (png[0] == 255).all()
    opened.do("headwise.app.set({ direction: 'queries', token: 3 })", "s.direction === 'queries'")
    assert "what looks at" in figure(opened, "token", tmp_path).title


@pytest.mark.slow
def test_the_answers_of_two_heads_stand_side_by_side(
    opens: Any, scans: dict[str, HeadScan], tmp_path: Path
) -> None:
    opened = opens("long")
    choose(opened, 1, 0)
    opened.do("headwise.app.compareWith({ scan: 0, layer: 2, head: 0 })", "s.mode === 'diff'")
    opened.do("headwise.app.set({ mode: 'both', token: 300 })", "s.mode === 'both'")
    opened.poll("headwise.app.beside.light.lights.entries.length > 0")
    drawn = figure(opened, "token", tmp_path)
    ids = scans["long"].texts[0].ids.tolist()
    heads = "layer 1, head 0 (A) and layer 2, head 0 (B)"
    assert drawn.title == f"made-up: {heads}: what “{WORDS[ids[300]]}” at 300 looks at"
    entries = opened.page.evaluate(
        "[headwise.app, headwise.app.beside].map(({ light }) => light.lights.entries)"
    )
    lit = [entry["weight"] for side in entries for entry in side if entry["weight"] >= 0.01]
    placed = [(part, x) for part, x, _ in drawn.parts if part.get("data-weight")]
    assert [float(bar.get("data-weight", 0)) for bar, _ in placed] == lit
    # Of one scale, and B's right of A's.
    widths = [float(bar.get("width", 0)) for bar, _ in placed]
    assert [w / widths[0] for w in widths] == pytest.approx([w / lit[0] for w in lit], abs=1e-3)
    lefts = [x for _, x in placed]
    count = sum(entry["weight"] >= 0.01 for entry in entries[0])
    assert max(lefts[:count]) + max(widths[:count]) < min(lefts[count:])
    for entry in entries[1]:
        assert f"“{WORDS[ids[entry['first']]]}” at {entry['first']}" in drawn.texts
    assert {"A", "B"} <= {*drawn.texts}
    lines = python_of(opened, "token").splitlines()
    assert [line.rsplit("# ")[-1] for line in lines[1:]] == ["A", "B"]
    assert "layer=2, head=0, token=300" in lines[2]
    with save(opened, "token", "csv", tmp_path).open(encoding="utf-8", newline="") as file:
        names, *rows = csv.reader(file)
    assert names == ["head", "first", "last", "token", "weight", "at least", "at most"]
    sides = [(side, entry) for side, each in zip("AB", entries, strict=True) for entry in each]
    assert [row[0] for row in rows] == [side for side, _ in sides]
    shown = [entry["weight"] for _, entry in sides]
    assert [float(row[4]) for row in rows] == pytest.approx(shown, rel=1e-3)


@pytest.mark.slow
def test_there_is_no_choice_where_nothing_is_drawn(browser: Chromium, tmp_path: Path) -> None:
    scan = scan_model(tiny.load(), tiny.encode("a text")[None], statistics=["entropy"])
    with browser.open(save_scan_page(tmp_path / "few.html", viewer_report(scan))) as opened:
        opened.page.click(EXPORT)
        subjects = opened.page.locator("[data-subject]")
        names = subjects.evaluate_all("(all) => all.map((each) => each.dataset.subject)")
        assert names == ["heads"]


# ---- numbers, and Python ------------------------------------------------------------------------


@pytest.mark.slow
def test_numbers_are_tables(opens: Any, scans: dict[str, HeadScan], tmp_path: Path) -> None:
    opened = opens("long")
    choose(opened, 1, 0)
    pin(opened, 300)
    tables = {
        name: list(csv.reader(io.StringIO(save(opened, name, "csv", tmp_path).read_text("utf-8"))))
        for name in ("map", "heads", "token")
    }
    assert len(tables["map"]) == 1 + CELLS**2
    assert tables["map"][0][-3:] == tables["token"][0][-3:] == ["weight", "at least", "at most"]
    weights, low, high = np.array([[float(x) for x in row[-3:]] for row in tables["map"][1:]]).T
    values = scans["long"]["map"][1, 0].flatten().double().numpy()
    assert np.abs(np.sqrt(weights) - np.sqrt(values)).max() <= 0.5 / 255 + 1e-4
    assert (low <= values).all()
    assert (values <= high).all()
    # No more than half a step of the root around the stored one, and no digits beyond it.
    assert (np.sqrt(high) - np.sqrt(low.clip(0)) <= 1 / 255 + 1e-4).all()
    assert max(len(row[-3].lstrip("0.").replace(".", "")) for row in tables["map"][1:]) <= 7
    column = tables["heads"][0].index("entropy")
    entropy = [float(row[column]) for row in tables["heads"][1:]]
    assert entropy == pytest.approx(scans["long"]["entropy"].flatten().tolist(), rel=1e-5)
    assert len(tables["token"]) == 1 + len(opened.state()["lit"]["entries"])


@pytest.fixture
def saved(
    scans: dict[str, HeadScan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], list[Any]]:
    """Run lines of the page in the folder of the scans, and return the figures that they draw."""
    monkeypatch.chdir(tmp_path)

    def run(lines: str, scan: str) -> list[Any]:
        scans[scan].save("scan.safetensors")
        scans["long"].save("after.safetensors")
        for name in ("before", "turned"):
            scans[name].save(f"{name}.safetensors")
        names: dict[str, Any] = {}
        figures = []
        for line in lines.splitlines():
            if line.startswith("from "):
                exec(line, names)
            else:
                figures.append(eval(line, names))
        return figures

    return run


PLACES = "[...headwise.app.loaded.map.values]"


def map_of(drawn: Any) -> Any:
    return drawn.axes[0].images[0].get_array()


@pytest.mark.slow
def test_the_line_of_the_map_draws_it(opens: Any, saved: Any) -> None:
    opened = opens("long")
    choose(opened, 2, 1)
    page = np.array(opened.page.evaluate(PLACES)).reshape(CELLS, CELLS)
    (drawn,) = saved(python_of(opened, "map"), "long")
    assert np.abs(np.sqrt(map_of(drawn)) - np.sqrt(page)).max() <= 0.5 / 255 + 1e-6
    assert "layer 2, head 1" in drawn.get_suptitle()
    # A zoom that begins and ends within blocks.
    opened.do("headwise.app.set({ zoom: [7, 0.31, 0.32] })", "s.zoom[0] === 7")
    (part,) = saved(python_of(opened, "map"), "long")
    first, last = (
        [int(CELLS * 0.32), int(CELLS * 0.31)],
        [CELLS * (0.32 + 1 / 7), CELLS * (0.31 + 1 / 7)],
    )
    rows, columns = (slice(a, int(np.ceil(b))) for a, b in zip(first, last, strict=True))
    expected = page[rows, columns]
    assert expected.max() > 0.1
    assert np.abs(np.sqrt(map_of(part)) - np.sqrt(expected)).max() <= 0.5 / 255 + 1e-6


@pytest.mark.slow
def test_the_line_of_a_part_has_the_tokens_in_sight(opens: Any, saved: Any) -> None:
    opened = opens("short")
    choose(opened, 2, 1)
    opened.do("headwise.app.set({ zoom: [4, 0.25, 0.5] })", "s.zoom[0] === 4")
    page = np.array(opened.page.evaluate(PLACES)).reshape(SHORT, SHORT)
    (part,) = saved(python_of(opened, "map"), "short")
    assert map_of(part).shape == (8, 8)
    expected = page[16:24, 8:16]
    assert np.abs(np.sqrt(map_of(part)) - np.sqrt(expected)).max() <= 0.5 / 255 + 1e-6
    assert part.axes[0].images[0].get_extent() == [7.5, 15.5, 23.5, 15.5]


@pytest.mark.slow
def test_the_lines_of_a_difference_draw_its_two_maps(opens: Any, saved: Any) -> None:
    opened = opens("two")
    choose(opened, 1, 0)
    opened.do("headwise.app.set({ mode: 'diff' })", "s.mode === 'diff'")
    opened.load()
    page = np.array(opened.page.evaluate(PLACES)).reshape(CELLS, CELLS)
    a, b = saved(python_of(opened, "map"), "long")
    # Each is right to half a step of the square root, so a weight w to about √w / 255.
    assert np.abs(map_of(b) - map_of(a) - page).max() <= 2 * (1 / 255 + 0.25 / 255**2)
    assert np.abs(page).max() > 0.1


@pytest.mark.parametrize(
    "statistic", others_extra(["induction", "entropy", "effective_keys"], quick=["entropy"])
)
def test_the_line_of_all_heads_draws_them(opens: Any, saved: Any, statistic: str) -> None:
    opened = opens("long")
    opened.do(f"headwise.app.set({{ statistic: '{statistic}' }})", f"s.statistic === '{statistic}'")
    rows = "headwise.app.statistic.rows"
    (drawn,) = saved(python_of(opened, "heads"), "long")
    assert np.allclose(map_of(drawn), opened.page.evaluate(rows), rtol=1e-5)
    norm = drawn.axes[0].images[0].norm
    low, high = opened.page.evaluate("[headwise.app.statistic.low, headwise.app.statistic.high]")
    assert (norm.vmin, norm.vmax) == pytest.approx((low, high))


@pytest.mark.parametrize("page", others_slow(["two", "matched"]))
@pytest.mark.parametrize("statistic", ["induction", "apart"])
def test_the_line_of_a_change_draws_it(opens: Any, saved: Any, statistic: str, page: str) -> None:
    opened = opens(page)
    opened.do(
        f"headwise.app.set({{ statistic: '{statistic}', mode: 'diff' }})",
        f"s.statistic === '{statistic}'",
    )
    opened.poll(f"document.querySelector('[aria-label=statistic]').value === '{statistic}'")
    opened.page.click(EXPORT)
    lines = opened.page.inner_text("[data-subject=heads] code")
    opened.page.keyboard.press("Escape")
    (drawn,) = saved(lines, "long")
    labels = opened.page.locator("[data-part=grid] .cell").evaluate_all(
        "(cells) => cells.map((cell) => cell.getAttribute('aria-label'))"
    )
    shown = [float(re.findall(r": (−?[\d.]+)", label)[0].replace("−", "-")) for label in labels]
    scale = 100 if statistic == "induction" else 1
    assert np.allclose(scale * map_of(drawn).flatten(), shown, atol=0.5 * scale / 100)
    assert max(shown) > 0


ANSWERS = [
    ("long", 1, 0, 300, "keys"),
    ("long", 1, 0, 3, "queries"),
    ("short", 2, 4, 21, "keys"),
    ("short", 2, 4, 5, "queries"),
]


@pytest.mark.parametrize(
    ("page", "layer", "head", "token", "direction"),
    others_slow(ANSWERS),
)
def test_the_line_of_a_token_draws_its_answer(
    opens: Any, saved: Any, page: str, layer: int, head: int, token: int, direction: str
) -> None:
    opened = opens(page)
    choose(opened, layer, head)
    opened.do(f"headwise.app.set({{ direction: '{direction}' }})", f"s.direction === '{direction}'")
    pin(opened, token)
    entries = opened.state()["lit"]["entries"]
    assert opened.state()["lit"]["exact"] == ("top" if page == "long" else "map")
    (drawn,) = saved(python_of(opened, "token"), page)
    axes = drawn.axes[0]
    weights = {entry["first"]: entry["weight"] for entry in entries}
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert len(names) >= 2
    for name, bar in zip(names, axes.patches, strict=True):
        other = int(name.split()[-1])
        assert abs(bar.get_width() ** 0.5 - weights[other] ** 0.5) <= 0.5 / 255 + 1e-6
    shown = [each for each in entries if each["weight"] >= 0.012][:16]
    assert {each["first"] for each in shown} <= {int(name.split()[-1]) for name in names}
    # The sentence on how exact it is.
    answer = opened.page.evaluate("headwise.app.light.answer")
    assert " ".join(drawn.get_suptitle().split()).endswith(answer)


@pytest.mark.slow
def test_a_block_has_no_line(opens: Any) -> None:
    opened = opens("long")
    choose(opened, 1, 3)
    pin(opened, 300)
    opened.page.click(EXPORT)
    assert opened.page.locator("[data-subject=token]").count() == 1
    assert opened.page.locator("[data-subject=token] code").count() == 0
