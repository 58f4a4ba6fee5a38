"""What the viewer answers about a token, against the dense weights of the attention matrix."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwise import AttentionMatrix, Mask
from headwise import scan as scan_model
from headwise.reports.images import viridis_colour
from headwise.reports.page import save_scan_page
from headwise.reports.report import ScanReport
from headwise.scanning.layer import ScannedText
from headwise.scanning.statistics.maps import Map, TopKeysOfEveryQuery
from tests.quick import others_extra, others_slow
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


def page_of_matrix(folder: Path, length: int, *, cells: int, named: bool = False) -> Read:
    """With ``named`` the tokens are known, so the page has their text."""
    matrix = causal_matrix(length)
    wanted = ["standard", Map(cells), TopKeysOfEveryQuery(ranks=RANKS)]
    read = scan_model(matrix, torch.zeros_like(matrix.q), statistics=wanted)
    if named:
        read = replace(read, texts=(ScannedText(torch.arange(length).int(), (length,)),))
    report = ScanReport.of(read, name_of=lambda token: f"w{token}")
    return Read(save_scan_page(folder / "page.html", report), matrix.dense()[0].double())


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """With a map of one token a cell, and with stored top keys."""
    return page_of_matrix(tmp_path_factory.mktemp("single"), LENGTH, cells=128)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """The same with the words of the tokens: w0, w1, w2."""
    return page_of_matrix(tmp_path_factory.mktemp("named"), LENGTH, cells=128, named=True)


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


@pytest.mark.parametrize("direction", others_slow(DIRECTIONS))
@pytest.mark.parametrize("token", others_extra([0, 17, 52, LENGTH - 1], quick=[17]))
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


@pytest.mark.parametrize("direction", others_slow(DIRECTIONS))
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


@pytest.mark.slow
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


@pytest.mark.parametrize("direction", others_slow(DIRECTIONS))
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
    most = 512 if length <= 512 else 160
    size = next(2**power for power in range(20) if length <= most * 2**power)
    return size, -(-length // size)


def mean_of_block(matrix: AttentionMatrix, row: int, size: int) -> Tensor:
    """(heads, blocks) of a block of queries, from the rows of the matrix."""
    length = matrix.shape[2]
    queries = torch.arange(row * size, min(length, (row + 1) * size))
    rows = matrix.rows(queries)[0].double().mean(1)
    return torch.nn.functional.pad(rows, (0, -length % size)).unflatten(1, (-1, size)).sum(2)


@pytest.mark.parametrize(
    "length", others_extra([129, 200, 511, 512, 513, 1000, 16_384], quick=[513])
)
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


@pytest.mark.slow
def test_a_shorter_last_block_is_marked(browser: Chromium, tmp_path: Path) -> None:
    for length, badge, last in (
        (512, "one token a cell", "query 511 → key 511: "),
        (
            513,
            "blocks of 4 tokens, the last of 1",
            "query 512 (the last block, shorter) → key 512 (the last block, shorter): ",
        ),
        (1024, "blocks of 8 tokens", "query 1,016 to 1,023 → key 1,016 to 1,023: "),
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
        opened.load()
        badge = opened.page.inner_text("[data-part=badge]")
        assert badge == "Map: one token a cell, of the first 41 tokens of both."
        state = opened.state()
        head = state["head"], state["other"]["head"]
        values = torch.tensor(opened.page.evaluate("[...headwise.app.loaded.map.values]"))
    dense = [m.dense()[0, h].double() for m, h in zip(matrices, head, strict=True)]
    expected = (dense[1] - dense[0][:41, :41]).flatten()
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


# ---- emphasis, and its scale ---------------------------------------------------------------------

RADII = """
window.rings = [];
const { arc } = CanvasRenderingContext2D.prototype;
CanvasRenderingContext2D.prototype.arc = function (x, y, radius, ...rest) {
  rings.push(radius);
  return arc.call(this, x, y, radius, ...rest);
};
"""


@pytest.fixture
def written(browser: Chromium, named: Read) -> Iterator[Opened]:
    with browser.open(named.path, address="#s=entropy&h=0.1&o=none") as opened:
        yield opened
        assert opened.complaints == []


def colour(text: str) -> list[float]:
    """The channels of a computed colour, from 0 to 255."""
    numbers = [float(each) for each in re.findall(r"[\d.]+", text.partition("(")[2])]
    return [round(255 * each) for each in numbers[:3]] if "srgb" in text else numbers[:3]


def swatches(opened: Opened, kind: str) -> list[tuple[list[float], str]]:
    """The colour and the words of each stop of a scale."""
    stops = opened.page.locator(f"[data-part={kind}-legend] .stop")
    found = stops.evaluate_all(
        "(all) => all.map((stop) => "
        "[getComputedStyle(stop.firstChild).backgroundColor, stop.textContent])"
    )
    return [(colour(background), words) for background, words in found]


@pytest.mark.slow
def test_marks_are_as_large_as_the_weights(browser: Chromium, named: Read) -> None:
    with browser.open(named.path, address="#s=entropy&h=0.1&o=none", init=RADII) as opened:
        opened.page.evaluate("rings.length = 0")
        lit = ask(opened, 30, "keys")
        large = [weight for weight in lit.values() if weight >= LEAST]
        assert 1 < len(large) < len(lit)
        drawn = sorted(set(opened.page.evaluate("rings")))
        assert drawn == pytest.approx(sorted({10 * weight**0.5 for weight in large}))
        classes = {
            token: opened.page.locator(f'[data-t="{token}"]').get_attribute("class") or ""
            for token in lit
        }
        for token, weight in lit.items():
            step = f" lit-{round(10 * weight**0.5)}" if weight >= LEAST else ""
            assert classes[token].removesuffix(" pinned") == f"t{step}"


@pytest.mark.slow
def test_a_scale_has_the_colours_of_what_is_drawn(written: Opened) -> None:
    opened = written
    lit = ask(opened, 60, "keys")
    stops = swatches(opened, "text")
    assert [words for _, words in stops] == ["1", "10", "50", "100"]
    steps = {
        round(10 * share**0.5): swatch
        for share, (swatch, _) in zip((0.01, 0.1, 0.5, 1.0), stops, strict=True)
    }
    seen = 0
    for token, weight in lit.items():
        if weight >= LEAST and (step := round(10 * weight**0.5)) in steps:
            span = opened.page.locator(f'[data-t="{token}"]')
            assert (
                colour(span.evaluate("(t) => getComputedStyle(t).backgroundColor")) == steps[step]
            )
            seen += 1
    assert seen
    assert opened.page.inner_text("[data-part=text-legend]").endswith("no tint under 1 %")
    # The colours of the map are those of the weights at its stops.
    for (swatch, _), share in zip(swatches(opened, "map"), (0, 0.01, 0.1, 0.5, 1.0), strict=True):
        expected = viridis_colour(share**0.5)
        assert max(abs(a - b) for a, b in zip(swatch, expected, strict=True)) <= 6


# ---- B - A ---------------------------------------------------------------------------------------


@pytest.fixture
def compared(browser: Chromium, named: Read) -> Iterator[Opened]:
    with browser.open(named.path, address="#s=entropy&h=0.1&o=0.0.2&m=diff") as opened:
        yield opened
        assert opened.complaints == []


@pytest.mark.parametrize("direction", others_slow(DIRECTIONS))
def test_changes_are_sorted_by_their_size(compared: Opened, named: Read, direction: str) -> None:
    change = named.weights[2] - named.weights[1]
    lines = change if direction == "keys" else change.T
    # Each of the two is right to half a step of the square root, so a value w to about √w / 255.
    bound = 2 * (1 / 255 + 0.25 / 255**2)
    # The token whose largest change is a fall, also as stored, and the largest of these.
    sizes = lines.abs().amax(1) * (lines.amax(1) < -lines.amin(1) - 2 * bound)
    token = int(sizes.argmax())
    lit = ask(compared, token, direction)
    assert compared.state()["lit"]["exact"] == "map"
    shown = list(lit.values())
    assert shown == sorted(shown, key=abs, reverse=True)
    assert shown[0] == min(shown) < 0
    shares = torch.zeros(LENGTH, dtype=torch.float64)
    shares[list(lit)] = torch.tensor(shown, dtype=torch.float64)
    assert (shares - lines[token]).abs().max() <= bound
    said = compared.page.inner_text(".summary")
    assert f"at {int(lines[token].argmin())} (−" in said.partition(", ")[0]
    badge = compared.page.inner_text("[data-part=badge]")
    large = [weight for weight in shown if abs(weight) >= LEAST]
    share = percent(sum(map(abs, large)) / sum(map(abs, shown)))
    assert badge.endswith(f"Token: its {len(large)} largest changes, {share} of all change.")


@pytest.mark.parametrize("scheme", others_slow(["light", "dark"]))
def test_a_change_has_one_colour_in_text_map_and_scales(
    browser: Chromium, named: Read, scheme: str
) -> None:
    address = "#s=entropy&h=0.1&o=0.0.2&m=diff"
    with browser.open(named.path, address=address, color_scheme=scheme) as opened:
        values = opened.page.evaluate("[...headwise.app.loaded.map.values]")
        most = max(values, key=abs)
        token, other = divmod(values.index(most), LENGTH)
        ask(opened, token, "keys")
        text, whole = swatches(opened, "text"), swatches(opened, "map")
        assert text == [stop for stop in whole if float(stop[1]) >= 100 * LEAST]
        end = text[0 if most < 0 else -1][0]
        span = opened.page.locator(f'[data-t="{other}"]')
        assert colour(span.evaluate("(t) => getComputedStyle(t).backgroundColor")) == end
        place = [(each + 0.5) / LENGTH for each in (other, token)]
        drawn = opened.page.locator("[data-part=map] canvas").first.evaluate(
            """(map, [x, y]) => [...map.getContext("2d").getImageData(
              Math.floor(x * map.width), Math.floor(y * map.height), 1, 1).data].slice(0, 3)""",
            place,
        )
        assert drawn == end
        # No change has nearly the colour of the paper.
        paper = opened.page.locator(".headwise").evaluate(
            "(r) => getComputedStyle(r).backgroundColor"
        )
        assert max(abs(a - b) for a, b in zip(whole[2][0], colour(paper), strict=True)) < 25


def test_text_and_map_have_one_pair_of_colours(compared: Opened) -> None:
    lit = ask(compared, 60, "keys")
    for kind in ("text", "map"):
        stops = [swatch for swatch, _ in swatches(compared, kind)]
        for red, _, blue in (stops[0], stops[1]):
            assert red < blue  # teal: A has more
        for red, _, blue in (stops[-1], stops[-2]):
            assert red > blue  # brown: B has more
        words = compared.page.inner_text(f"[data-part={kind}-legend]")
        assert words.startswith("A more")
        assert words.index("B more") > words.index(swatches(compared, kind)[-1][1])
    ends = [swatches(compared, kind)[-1][1] for kind in ("text", "map")]
    most = compared.page.evaluate("Math.max(...headwise.app.loaded.map.values.map(Math.abs))")
    assert [float(end) for end in ends] == [pytest.approx(100 * most, abs=0.5)] * 2
    for token, weight in lit.items():
        name = compared.page.locator(f'[data-t="{token}"]').get_attribute("class") or ""
        step = round(10 * (abs(weight) / most) ** 0.5)
        mark = f" {'less' if weight < 0 else 'lit'}-{step}" if abs(weight) >= LEAST else ""
        assert name.removesuffix(" pinned") == f"t{mark}"


@pytest.mark.slow
def test_small_changes_have_the_whole_scale(browser: Chromium, tmp_path: Path) -> None:
    """The largest change is that of the last step; what is under 1 % has no mark and no stop."""
    matrix = causal_matrix(LENGTH, heads=1)
    other = AttentionMatrix(1.05 * matrix.q, matrix.k, mask=matrix.mask)
    most = float((other.dense() - matrix.dense()).abs().max())
    assert 2 * LEAST < most < 4 * LEAST
    text = ScannedText(torch.arange(LENGTH).int(), (LENGTH,))
    reads = [replace(scan_model(m, torch.zeros_like(m.q)), texts=(text,)) for m in (other, matrix)]
    report = ScanReport.of(reads[0], name_of=lambda token: f"w{token}")
    path = save_scan_page(tmp_path / "page.html", replace(report, second=reads[1]))
    with browser.open(path, address="#h=0.0&m=diff&t=none") as opened:
        end = opened.page.evaluate("headwise.app.light.end")
        assert end == pytest.approx(most, abs=2 * (1 / 255 + 0.25 / 255**2))
        assert len(swatches(opened, "text")) == 2
        assert len(swatches(opened, "map")) == 5
        values = opened.page.evaluate("[...headwise.app.loaded.map.values].map(Math.abs)")
        token = values.index(max(values)) // LENGTH
        lit = ask(opened, token, "keys")
        assert any(abs(weight) < LEAST for weight in lit.values())
        for at, weight in lit.items():
            name = opened.page.locator(f'[data-t="{at}"]').get_attribute("class") or ""
            step = f"{'less' if weight < 0 else 'lit'}-{round(10 * (abs(weight) / end) ** 0.5)}"
            mark = f" {step}" if abs(weight) >= LEAST else ""
            assert name.removesuffix(" pinned") == f"t{mark}"


def test_heads_are_ranked_by_the_size_of_their_change(browser: Chromium, tmp_path: Path) -> None:
    before, after = viewer_scan(), viewer_scan()
    after.layer_scans[1].summaries["induction"]["sum"][2] -= 0.5
    after.layer_scans[0].summaries["induction"]["sum"][1] += 0.2
    report = viewer_report(before, second=after, names=("before", "after"))
    path = save_scan_page(tmp_path / "page.html", report)
    with browser.open(path, address="#s=induction&h=0.1&m=diff&v=value") as opened:
        names = opened.page.locator("[data-part=grid] .cell b").all_inner_texts()
        assert names[:2] == ["1.2", "0.1"]
        assert "The largest change first." in opened.page.inner_text("[data-part=grid]")
