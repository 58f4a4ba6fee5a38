"""Numbers at random, read from the page as a reader reads them, against the attention matrix."""

import csv
import io
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwise import scan as scan_model
from headwise.models import tiny
from headwise.reports.page import save_scan_page
from headwise.reports.report import ScanReport
from headwise.scanning._scan import ExactRows
from headwise.scanning.statistics.maps import Map, TopKeysOfEveryQuery
from tests.reports.browser import Chromium, Opened, needs_a_browser

pytestmark = [needs_a_browser, pytest.mark.slow]

TEXT = "def attend(q, k, v):\n    return softmax(q @ k.T) @ v\n" * 2
STEP = 0.5 / 255 + 1e-6  # of the square root of a weight, as the page stores it
NAME = r"“[^”]*” at (\d+)"
SHARE = r"(under 0.01|[\d.]+) %"
CHANGE = r"(under 0.01|over −0.01|[+−]?[\d.]+) %"
DRAWS = [4, pytest.param(100, marks=pytest.mark.extra)]


@dataclass
class Read:
    """A page, and the weights (heads, queries, keys) of each layer: of A, and of B where it is."""

    path: Path
    weights: list[list[Tensor]]

    def draw(self, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Layers, heads and two tokens of which the second is not after the first."""
        heads, length = self.weights[0][0].shape[:2]
        generator = random.Random(5)
        for _ in range(count):
            query = generator.randrange(1, length)
            layer = generator.randrange(len(self.weights[0]))
            yield layer, generator.randrange(heads), query, generator.randrange(query)


def read(folder: Path, cells: int, *, isTwo: bool = False) -> Read:
    ids, scans, weights = tiny.encode(TEXT)[None], [], []
    for model in (tiny.load(), tiny.load())[: 1 + isTwo]:
        if scans:
            for block in model.blocks[1:3]:
                with torch.no_grad():
                    block.attention.q_proj.weight[: 2 * block.attention.head_dim] *= -0.5
        wanted = ["standard", Map(cells), TopKeysOfEveryQuery()]
        scans.append(scan_model(model, ids, statistics=wanted))
        rows = ExactRows(model, ids)
        heads = range(scans[0].layer_scans[0].num_heads)
        weights.append(
            [
                torch.stack(
                    [
                        torch.stack(
                            [rows.row(name, head, sequence=0, query=q) for q in range(ids.shape[1])]
                        )
                        for head in heads
                    ]
                ).double()
                for name in scans[0].layers
            ]
        )
    report = ScanReport.of(scans[0], title="the small model", name_of=chr)
    if isTwo:
        report = replace(report, second=scans[1], names=("before", "after"))
    return Read(save_scan_page(folder / "page.html", report), weights)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """A map of one token a cell."""
    return read(tmp_path_factory.mktemp("single"), 256)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """Maps of blocks, one key of every token of most heads, and four of some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwise.reports.blobs.MOST_ROWS", 0)
        return read(tmp_path_factory.mktemp("blocks"), 16)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Read:
    return read(tmp_path_factory.mktemp("two"), 256, isTwo=True)


def ends(shown: str) -> tuple[float, float]:
    """The shares that are written so: with as many digits as there are, or as "under"."""
    if shown.startswith("under"):
        return 0.0, 1e-4
    half = 0.5 * 10.0 ** -len(shown.partition(".")[2])
    return (float(shown) - half) / 100 - 1e-9, (float(shown) + half) / 100 + 1e-9


def is_share(shown: str, weight: float) -> bool:
    """True if a weight may be written so, stored as a byte of its square root."""
    low, high = (max(weight**0.5 + step, 0) ** 2 for step in (-STEP, STEP))
    least, most = ends(shown)
    return least <= high and low <= most


def set_state(opened: Opened, until: str = "true", **state: object) -> None:
    words = ", ".join(f"{name}: {value}" for name, value in state.items())
    opened.do(f"headwise.app.set({{ {words} }})", until)
    opened.load()
    opened.settle()


# ---- one model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", DRAWS)
def test_cells(browser: Chromium, single: Read, draws: int) -> None:
    length = single.weights[0][0].shape[1]
    with browser.open(single.path) as opened:
        for layer, head, query, key in single.draw(draws):
            set_state(opened, layer=layer, head=head)
            box = opened.page.locator("[data-part=map] canvas").first.bounding_box()
            assert box is not None
            opened.page.mouse.move(
                box["x"] + (key + 0.5) / length * box["width"],
                box["y"] + (query + 0.5) / length * box["height"],
            )
            place = rf"^query {query} “.*” → key {key} “.*”: {SHARE}$"
            opened.poll(
                f"document.querySelector('.readout').textContent.startsWith('query {query} ')"
            )
            said = re.search(place, opened.page.inner_text(".readout"))
            assert said, place
            assert is_share(said[1], float(single.weights[0][layer][head, query, key]))


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("direction", ["keys", "queries"])
def test_answers(browser: Chromium, single: Read, draws: int, direction: str) -> None:
    with browser.open(single.path) as opened:
        for layer, head, query, _ in single.draw(draws):
            set_state(opened, layer=layer, head=head, token=query, direction=f"'{direction}'")
            weights = single.weights[0][layer][head]
            row = weights[query] if direction == "keys" else weights[:, query]
            said = re.findall(rf"{NAME} \({SHARE}\)", opened.page.inner_text(".text .summary"))
            assert said
            for place, share in said:
                assert is_share(share, float(row[int(place)]))
            # The first is the largest, but for a step.
            assert float(row.max()) ** 0.5 - float(row[int(said[0][0])]) ** 0.5 <= 2 * STEP


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("page", ["single", "blocks"])
def test_pairs_and_words_of_all_heads(
    browser: Chromium, draws: int, page: str, request: pytest.FixtureRequest
) -> None:
    """An exact number is the weight; a bound is said to be one, and holds."""
    given: Read = request.getfixturevalue(page)
    bounds = 0
    with browser.open(given.path) as opened:
        for layer, head, query, key in given.draw(draws):
            weights = given.weights[0][layer][head]
            cell = opened.page.locator(f'[data-part=grid] [data-id="{layer}.{head}"]')
            until = f"s.parts.links?.token === {query} && s.parts.links.other === {key}"
            set_state(opened, until, order="'links'", token=query, second=key, direction="'keys'")
            said = re.search(rf"looks at {NAME}, (at least |under )?{SHARE}$", title(cell))
            assert said
            assert holds(said[2], said[3], float(weights[query, key])), title(cell)
            bounds += said[2] is not None and said[3] != "0.01"
            until = f"s.parts.links?.token === {key} && s.parts.links.other === null"
            set_state(
                opened,
                until + " && s.parts.links.direction === 'queries'",
                token=key,
                second="null",
                direction="'queries'",
            )
            if "no stored link" in title(cell) or "evenly" in title(cell):
                continue
            said = re.search(rf"^{NAME} looks at {NAME}, (at least |under )?{SHARE}$", title(cell))
            assert said, title(cell)
            named = float(weights[int(said[1]), key])
            assert is_share(said[4], named) or said[3] == "at least "
            assert holds(said[3], said[4], float(weights[:, key].max())), title(cell)
            bounds += said[3] is not None and said[4] != "0.01"
    assert bool(bounds) == (page == "blocks")


def title(cell: object) -> str:
    return str(cell.get_attribute("title"))  # type: ignore[attr-defined]


def holds(bound: str | None, shown: str, weight: float) -> bool:
    least, most = ends(shown)
    if bound == "at least ":
        return weight**0.5 + STEP >= max(least, 0) ** 0.5
    if bound == "under ":
        return max(weight**0.5 - STEP, 0) ** 2 <= most
    return is_share(shown, weight)


# ---- two models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", DRAWS)
def test_changes(browser: Chromium, two: Read, draws: int) -> None:
    with browser.open(two.path) as opened:
        for layer, head, query, key in two.draw(draws):
            a, b = (weights[layer][head, query] for weights in two.weights)
            slack = 2 * STEP * (a.sqrt() + b.sqrt()) + 2 * STEP**2
            cell = opened.page.locator(f'[data-part=grid] [data-id="{layer}.{head}"]')
            for second in ("null", str(key)):
                until = f"s.parts.links?.token === {query} && s.parts.links.other === {second}"
                set_state(opened, until, mode="'diff'", order="'links'", token=query, second=second)
                words = title(cell)
                if second == "null":
                    said = re.findall(rf"{NAME} {CHANGE}", words)
                else:
                    said = [(key, *re.findall(rf"from A to B {CHANGE}$", words))]
                    assert len(said[0]) == 2, words
                for place, shown in said:
                    low, high = ends_of_change(shown)
                    change, error = float((b - a)[int(place)]), float(slack[int(place)])
                    assert low - error <= change <= high + error, words


def ends_of_change(shown: str) -> tuple[float, float]:
    if "0.01" in shown and shown[0] in "uo":
        return -1e-4, 1e-4
    low, high = ends(shown.lstrip("+−"))
    return (-high, -low) if shown[0] == "−" else (low, high)


@pytest.mark.parametrize("draws", DRAWS)
def test_tables(browser: Chromium, single: Read, blocks: Read, two: Read, draws: int) -> None:
    """Each number of a CSV lies between its ends, and so does the weight."""
    generator = random.Random(3)
    for given, mode in ((single, "A"), (blocks, "A"), (two, "A"), (two, "B"), (two, "diff")):
        sides = {"A": [0], "B": [1], "diff": [0, 1]}[mode]
        with browser.open(given.path) as opened:
            layer, head, query = 1, 0, 70  # of a head that changed
            until = f"s.parts.links?.token === {query}"
            set_state(opened, until, layer=layer, head=head, order="'links'", token=query)
            set_state(
                opened,
                other=f"headwise.app.partner({{ layer: {layer}, head: {head} }})",
                mode=f"'{mode}'",
            )
            opened.wait(until)

            def of(
                layer: int,
                head: int,
                query: int,
                key: int,
                sides: list[int] = sides,
                given: Read = given,
            ) -> float:
                values = [float(given.weights[side][layer][head, query, key]) for side in sides]
                return values[-1] - values[0] if len(values) > 1 else values[0]

            tables = {name: table(opened, name) for name in ("map", "token", "word")}
        rows = generator.sample(tables["map"], min(draws, len(tables["map"])))
        for first, last, start, end, value, low, high in rows:
            if first == last and start == end:
                assert float(low) <= of(layer, head, int(first), int(start)) <= float(high)
            assert float(low) <= float(value) <= float(high)
        for first, last, _, value, low, high in tables["token"][:draws]:
            assert float(low) <= float(value) <= float(high)
            if first == last:
                assert float(low) <= of(layer, head, query, int(first)) <= float(high)
        for row in generator.sample(tables["word"], min(draws, len(tables["word"]))):
            place = re.findall(NAME, row[-1])
            value, low, high = map(float, row[3:6])
            assert low <= high
            if row[-2] != "at most":
                assert low <= value <= high
            if mode != "diff" and place[1:] and "evenly" not in row[-1]:
                assert low <= of(int(row[0]), int(row[1]), query, int(place[-1])) <= high, row


def table(opened: Opened, subject: str) -> list[list[str]]:
    """The rows of a CSV without its head."""
    opened.page.click("[data-part=export-opener]")
    with opened.page.expect_download() as download:
        opened.page.click(f"[data-subject={subject}] [data-format=csv]")
    opened.page.keyboard.press("Escape")
    return list(csv.reader(io.StringIO(Path(download.value.path()).read_text("utf-8"))))[1:]
