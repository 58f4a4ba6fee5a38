"""What the viewer answers about a token, against the dense weights of the attention matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwise import AttentionMatrix, Mask
from headwise import scan as scan_model
from headwise.reports.page import save_scan_page
from headwise.reports.report import ScanReport
from headwise.scanning.statistics.maps import Map, TopKeysOfEveryQuery
from tests.reports.browser import Chromium, Opened, needs_a_browser
from tests.reports.viewer_scans import viewer_report, viewer_scan

pytestmark = needs_a_browser

HEADS, LENGTH, RANKS = 3, 104, 4
HALF = 0.5 / 255 + 1e-6  # of a step of the stored square root, and rounding of float32
LEAST = 0.01  # the least weight that is marked
DIRECTIONS = ("keys", "queries")


@dataclass
class Read:
    """A page of one layer, and the weights that it was made of."""

    path: Path
    weights: Tensor  # (heads, queries, keys) in float64


def causal_matrix(length: int, heads: int = HEADS) -> AttentionMatrix:
    generator = torch.Generator().manual_seed(length)
    q, k = (3 * torch.randn(1, heads, length, 7, generator=generator) for _ in range(2))
    return AttentionMatrix(q, k, mask=Mask.causal())


def page_of_matrix(folder: Path, length: int, *, cells: int) -> Read:
    matrix = causal_matrix(length)
    wanted = ["standard", Map(cells), TopKeysOfEveryQuery(ranks=RANKS)]
    read = scan_model(matrix, torch.zeros_like(matrix.q), statistics=wanted)
    report = ScanReport.of(read, name_of=lambda token: f"w{token}")
    return Read(save_scan_page(folder / "page.html", report), matrix.dense()[0].double())


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """With a map of one token a cell, and with stored top keys."""
    return page_of_matrix(tmp_path_factory.mktemp("single"), LENGTH, cells=128)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """With a map of blocks, and with stored top keys."""
    return page_of_matrix(tmp_path_factory.mktemp("blocks"), LENGTH, cells=16)


@pytest.fixture
def opened(browser: Chromium, single: Read) -> Iterator[Opened]:
    with browser.open(single.path, address="#s=entropy&h=0.1&o=none") as opened:
        yield opened
        assert opened.complaints == []


def ask(opened: Opened, token: int, direction: str) -> dict[int, float]:
    """Pin a token; return the weight of each token that is lit."""
    opened.do(
        f"headwise.app.set({{ token: {token}, direction: '{direction}' }})",
        f"s.lit.what === '{direction}' && headwise.app.light.lights.token === {token}",
    )
    return {each["first"]: each["weight"] for each in opened.state()["lit"]["entries"]}


def percent(share: float) -> str:
    """A share of at least 1 % as the page writes it."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.95 else f"{value:.1f} %"


# ---- a map of single tokens ----------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("token", [0, 17, 52, LENGTH - 1])
def test_the_map_answers_with_every_weight(
    opened: Opened, single: Read, token: int, direction: str
) -> None:
    weights = single.weights[1]
    row = weights[token] if direction == "keys" else weights[:, token]
    lit = ask(opened, token, direction)
    assert opened.state()["lit"]["exact"] == "map"
    shown = torch.zeros(LENGTH, dtype=torch.float64)
    shown[list(lit)] = torch.tensor(list(lit.values()), dtype=torch.float64)
    assert (shown.sqrt() - row.sqrt()).abs().max() <= HALF
    assert list(lit.values()) == sorted(lit.values(), reverse=True)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_answer_says_how_much_it_shows(opened: Opened, direction: str) -> None:
    lit = list(ask(opened, 30, direction).values())
    large = [weight for weight in lit if weight >= LEAST]
    assert 1 < len(large) < len(lit)
    whole = "all" if direction == "keys" else "all that it receives"
    share = sum(large) / (1.0 if direction == "keys" else sum(lit))
    words = f"Token: its {len(large)} largest weights, {percent(share)} of {whole}."
    assert opened.page.inner_text("[data-part=badge]") == f"Map: one token a cell. {words}"


def test_the_sentence_names_the_largest(opened: Opened, single: Read) -> None:
    for direction, verb in zip(DIRECTIONS, ("looks at", "is looked at by"), strict=True):
        ask(opened, 30, direction)
        column = single.weights[1, :, 30] if direction == "queries" else single.weights[1, 30]
        best = int(column.argmax())
        said = opened.page.inner_text(".summary")
        assert said.startswith(f"0.1: token 30 {verb} token {best} ({percent(column[best])}), ")
        assert "top" not in said


def test_a_page_of_single_tokens_asks_for_no_other_scan(browser: Chromium, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, HEADS, 24, 7, generator=generator) for _ in range(2))
    read = scan_model(AttentionMatrix(q, k), torch.zeros_like(q))
    report = replace(ScanReport.of(read), command="headwise scan DIR --top-keys {heads}")
    with browser.open(save_scan_page(tmp_path / "page.html", report)) as opened:
        assert not opened.page.is_visible(".command")
        ask(opened, 5, "queries")
        assert opened.state()["lit"]["exact"] == "map"


# ---- stored top keys, and blocks -----------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_stored_lists_say_that_they_are_lists(
    browser: Chromium, blocks: Read, direction: str
) -> None:
    share, key = blocks.weights[1].topk(RANKS)
    if direction == "keys":
        expected = dict(zip(key[30].tolist(), share[30].tolist(), strict=True))
    else:
        rows, ranks = (key == 30).nonzero(as_tuple=True)
        expected = dict(zip(rows.tolist(), share[rows, ranks].tolist(), strict=True))
    with browser.open(blocks.path, address="#s=entropy&h=0.1&o=none") as opened:
        lit = ask(opened, 30, direction)
        assert opened.state()["lit"]["exact"] == "top"
        # A byte of zero is a weight that is not there.
        expected = {at: weight for at, weight in expected.items() if weight**0.5 > 0.5 / 255}
        assert lit.keys() == expected.keys() != set()
        for at, weight in expected.items():
            assert lit[at] ** 0.5 == pytest.approx(weight**0.5, abs=HALF)
        said, badge = (opened.page.inner_text(x) for x in (".summary", "[data-part=badge]"))
        if direction == "keys":
            assert f"looks at, among its top {RANKS}: " in said
            part = percent(sum(lit.values()))
            assert f"its 4 largest weights among its top {RANKS}, {part} of all." in badge
        else:
            assert f"is looked at by, among their top {RANKS}: " in said
            assert f"the queries that have it among their top {RANKS}." in badge


def test_a_token_in_no_list_is_not_looked_at_by_nothing(browser: Chromium, blocks: Read) -> None:
    key = blocks.weights[1].topk(RANKS)[1]
    token = next(n for n in range(LENGTH) if not (key == n).any())
    assert blocks.weights[1, :, token].sum() > 0
    with browser.open(blocks.path, address="#s=entropy&h=0.1&o=none") as opened:
        assert ask(opened, token, "queries") == {}
        said = f"0.1: token {token} is among the top {RANKS} of no query"
        assert opened.page.inner_text(".summary") == said


# ---- values of the map ---------------------------------------------------------------------------


def blocks_of(length: int) -> tuple[int, int]:
    """The tokens of a block, and the number of blocks."""
    most = 512 if length <= 512 else 256
    size = next(2**power for power in range(20) if length <= most * 2**power)
    return size, -(-length // size)


def mean_of_block(matrix: AttentionMatrix, row: int, size: int) -> Tensor:
    """(heads, blocks) of a block of queries, from the rows of the matrix."""
    length = matrix.shape[2]
    queries = torch.arange(row * size, min(length, (row + 1) * size))
    rows = matrix.rows(queries)[0].double().mean(1)
    return torch.nn.functional.pad(rows, (0, -length % size)).unflatten(1, (-1, size)).sum(2)


@pytest.mark.parametrize("length", [129, 200, 511, 512, 513, 1000, 16_384])
def test_200_places_of_the_map_are_those_of_the_matrix(
    browser: Chromium, tmp_path: Path, length: int
) -> None:
    matrix, (size, blocks) = causal_matrix(length, heads=1), blocks_of(length)
    read = scan_model(matrix, torch.zeros_like(matrix.q), statistics=["map"])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(blocks, (20,), generator=generator).tolist()
    rows[0] = blocks - 1
    places = [
        (row, int(torch.randint(row + 1, (), generator=generator)))
        for row in rows
        for _ in "ten by"
    ]
    with browser.open(save_scan_page(tmp_path / "page.html", ScanReport.of(read))) as opened:
        map_ = "headwise.app.loaded.map"
        assert opened.page.evaluate(f"[{map_}.rows, {map_}.cols]") == [blocks, blocks]
        shown = opened.page.evaluate(
            f"(places) => places.map(([r, c]) => {map_}.values[r * {map_}.cols + c])", places
        )
        facts = opened.page.evaluate(
            "(places) => places.map(([r, c]) => headwise.app.light.axes()"
            ".map((axis, n) => axis.tokens(n ? c : r)))",
            places,
        )
    expected = {row: mean_of_block(matrix, row, size) for row in set(rows)}
    for (row, col), value, tokens in zip(places, shown, facts, strict=True):
        exact = float(expected[row][0, col])
        assert value**0.5 == pytest.approx(exact**0.5, abs=HALF)
        ends = [[n * size, min(length, (n + 1) * size) - 1] for n in (row, col)]
        assert tokens == ends


def last_cell(opened: Opened) -> str:
    """Point at the last cell, and return what the page says of it."""
    box = opened.page.locator("[data-part=map] canvas").first.bounding_box()
    assert box is not None
    opened.page.mouse.move(box["x"] + box["width"] - 1, box["y"] + box["height"] - 1)
    opened.poll("headwise.state().parts.readout !== ''")
    return str(opened.state()["parts"]["readout"])


def test_a_shorter_last_block_is_marked(browser: Chromium, tmp_path: Path) -> None:
    for length, badge, last in (
        (512, "one token a cell", "query 511 → key 511: "),
        (
            513,
            "blocks of 4 tokens, the last of 1",
            "query 512 (the last block, shorter) → key 512 (the last block, shorter): ",
        ),
        (1024, "blocks of 4 tokens", "query 1,020 to 1,023 → key 1,020 to 1,023: "),
    ):
        matrix = causal_matrix(length)
        read = scan_model(matrix, torch.zeros_like(matrix.q), statistics=["map"])
        with browser.open(save_scan_page(tmp_path / "page.html", ScanReport.of(read))) as opened:
            assert opened.page.inner_text("[data-part=badge]") == f"Map: {badge}."
            assert last_cell(opened).startswith(last)
            mark = opened.page.locator(".short path").first.get_attribute("d") or ""
            box = opened.page.locator("[data-part=map] canvas").first.bounding_box()
            assert box is not None
            if length != 513:
                assert mark == ""
                continue
            # Beside the last of 129 blocks, below the map and to its right.
            across, down = mark.removeprefix("M").split("M")
            side = box["width"]
            assert float(across.split(",")[0]) == pytest.approx(side * 128 / 129, abs=1)
            assert float(across.split("H")[1]) == pytest.approx(side, abs=1)
            assert float(down.split("V")[1]) == pytest.approx(box["height"], abs=1)


def test_texts_of_other_lengths_are_compared_over_the_tokens_of_both(
    browser: Chromium, tmp_path: Path
) -> None:
    matrices = [causal_matrix(length) for length in (60, 41)]
    reads = [scan_model(m, torch.zeros_like(m.q), statistics=["entropy", "map"]) for m in matrices]
    report = replace(ScanReport.of(reads[0]), second=reads[1], names=("long", "short"))
    with browser.open(save_scan_page(tmp_path / "page.html", report)) as opened:
        opened.do("headwise.app.set({ mode: 'diff' })", "s.mode === 'diff'")
        badge = opened.page.inner_text("[data-part=badge]")
        assert badge == "Map: one token a cell, of the first 41 tokens of both."
        state = opened.state()
        head = state["head"], state["other"]["head"]
        values = torch.tensor(opened.page.evaluate("[...headwise.app.loaded.map.values]"))
    dense = [m.dense()[0, h].double() for m, h in zip(matrices, head, strict=True)]
    expected = (dense[0][:41, :41] - dense[1]).flatten()
    # Each of the two is right to half a step of the square root, so a value w to about √w / 255.
    assert (values - expected).abs().max() <= 2 * (1 / 255 + 0.25 / 255**2)


def test_a_map_by_shares_keeps_its_blocks(browser: Chromium, tmp_path: Path) -> None:
    """Of a scan of an earlier version: 200 tokens in 128 blocks of one or two."""
    read = viewer_scan(length=200, cells=128, by_shares=True, top=0)
    with browser.open(save_scan_page(tmp_path / "page.html", viewer_report(read))) as opened:
        assert opened.page.inner_text("[data-part=badge]") == "Map: blocks of 1 to 2 tokens."
        tokens = opened.page.evaluate(
            "Array.from({ length: 128 }, (_, n) => headwise.app.light.axes()[0].tokens(n))"
        )
        found = opened.page.evaluate(
            "Array.from({ length: 200 }, (_, n) => headwise.app.light.axes()[0].block(n))"
        )
    block = [n * 128 // 200 for n in range(200)]
    assert found == block
    assert tokens == [[block.index(n), 199 - block[::-1].index(n)] for n in range(128)]
