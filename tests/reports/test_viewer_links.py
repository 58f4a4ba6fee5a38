"""One word in all heads, in a real browser: the cells' answers against the attention matrix."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headwise import AttentionMatrix, Mask
from headwise import scan as scan_model
from headwise.errors import HeadwiseError
from headwise.models import minilm, tiny
from headwise.reports.page import save_scan_page
from headwise.reports.report import ScanReport
from headwise.scanning._scan import ExactRows
from headwise.scanning.links import Link
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import Map, TopKeysOfEveryQuery
from tests.reports.browser import Chromium, Opened, needs_a_browser
from tests.reports.viewer_scans import gpt2_sized, viewer_report, viewer_scan
from tests.scanning.models import BATCH, LENGTH, SOURCE, t5, tokens

pytestmark = needs_a_browser

HALF = 0.5 / 255 + 1e-6  # of a step of the stored square root, and rounding of float32
SENTENCE = "The trophy does not fit into the brown suitcase because it is too small."
IT, SUITCASE = 11, 9
SWITCH = "[data-part=every-head]"
LAYERS, HEADS, TOKENS = 3, 4, 104


@dataclass
class Read:
    """A page, its scan, and the weights that it was made of: (heads, queries, keys) by layer."""

    path: Path
    scan: HeadScan
    weights: list[Tensor]

    def __iter__(self) -> Iterator[tuple[int, int, Tensor]]:
        for layer, weights in enumerate(self.weights):
            for head, values in enumerate(weights):
                yield layer, head, values


def read_model(folder: Path, model: Any, inputs: Any, *, title: str, **options: Any) -> Read:
    name_of = options.pop("name_of")
    read = scan_model(model, inputs, **options)
    rows = ExactRows(model, inputs)
    length = read.texts[0].lengths[0]
    weights = [
        torch.stack(
            [
                torch.stack([rows.row(name, head, sequence=0, query=q) for q in range(length)])
                for head in read.layer_scans[layer].heads
            ]
        ).double()
        for layer, name in enumerate(read.layers)
    ]
    path = read.save_page(folder / "page.html", title=title, name_of=name_of)
    return Read(path, read, weights)


@pytest.fixture(scope="module")
def sentence(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """MiniLM on a sentence with "it" and "suitcase": a map of one token a cell, and 4 keys."""
    try:
        folder = minilm.model_folder()
    except HeadwiseError as missing:
        pytest.skip(str(missing))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(SENTENCE, return_tensors="pt", return_offsets_mapping=True)
    written = SENTENCE, encoded["offset_mapping"][0]
    return read_model(
        tmp_path_factory.mktemp("minilm"),
        transformers.AutoModel.from_pretrained(folder).eval(),
        {"input_ids": encoded["input_ids"]},
        title="MiniLM",
        name_of=tokenizer.convert_ids_to_tokens,
        statistics=["standard", TopKeysOfEveryQuery()],
        written=written,
    )


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """The model that ships, with maps of blocks, and one key of most heads on the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwise.reports.blobs.MOST_ROWS", 0)
        text = "def attend(q, k, v):\n    return softmax(q @ k.T) @ v\n" * 2
        return read_model(
            tmp_path_factory.mktemp("blocks"),
            tiny.load(),
            tiny.encode(text)[None],
            title="tiny",
            name_of=chr,
            statistics=["standard", Map(cells=16), TopKeysOfEveryQuery()],
        )


def answers(opened: Opened, token: int, other: int | None = None) -> dict[tuple[int, int], Any]:
    """The answers that the cells show, by layer and head, once they are those to a question."""
    opened.wait(f"s.parts.links.token === {token} && s.parts.links.other === {other or 'null'}")
    links = opened.state()["parts"]["links"]["all"]
    return {(each["layer"], each["head"]): each for each in links}


def is_near(shown: float, true: float, *, halves: int = 1) -> bool:
    return abs(shown**0.5 - true**0.5) <= halves * HALF


def label(opened: Opened, layer: int, head: int) -> str:
    return str(opened.page.get_attribute(f'[data-id="{layer}.{head}"]', "aria-label"))


# ---- by mouse ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pinned_word_answers_for_every_head(browser: Chromium, sentence: Read) -> None:
    """Which head links "it" to "suitcase"? Two clicks, and one more opens the head."""
    with browser.open(sentence.path, address="#s=entropy&h=0.2") as opened:
        page = opened.page
        page.click(f'[data-t="{IT}"]')
        page.click(SWITCH)
        shown = answers(opened, IT)
        assert len(shown) == 72
        words = page.evaluate("document.querySelector('[data-id=\"5.5\"]').innerText.split('\\n')")
        assert words == ["suitcase", "35 %"]
        assert label(opened, 5, 5) == "layer 5, head 5: “it” at 11 looks at “suitcase” at 9, 35 %"
        trophy = shown[3, 1]["other"]
        words = f"“it” at 11 looks at “trophy” at {trophy}, 57 %"
        assert label(opened, 3, 1) == f"layer 3, head 1: {words}"
        assert page.get_attribute('[data-id="3.1"]', "title") == words
        for layer, head, weights in sentence:
            link = shown[layer, head]
            assert is_near(link["weight"], float(weights[IT].max()))
            assert is_near(float(weights[IT, link["other"]]), float(weights[IT].max()), halves=2)
            assert link["bound"] == "exact"
        # The same answers in Python.
        for link in sentence.scan.links(IT):
            assert shown[link.layer_index, link.head]["other"] == link.key
        page.click('[data-id="5.5"]')
        opened.wait(f"s.layer === 5 && s.head === 5 && s.order === 'links' && s.token === {IT}")
        opened.poll(f"headwise.app.light.lights.entries[0]?.first === {SUITCASE}")
        assert "“suitcase” at 9 (35 %)" in page.inner_text(".summary")
        assert opened.complaints == []


@pytest.mark.slow
def test_a_pair_of_words_in_every_head(browser: Chromium, sentence: Read) -> None:
    with browser.open(sentence.path, address="#s=entropy&h=0.2") as opened:
        page = opened.page
        page.click(f'[data-t="{IT}"]')
        page.click(f'[data-t="{SUITCASE}"]', modifiers=["Shift"])
        opened.wait("s.order === 'links'")
        shown = answers(opened, IT, SUITCASE)
        for layer, head, weights in sentence:
            assert is_near(shown[layer, head]["weight"], float(weights[IT, SUITCASE]))
            assert shown[layer, head]["bound"] == "exact"
            cell = page.locator(f'[data-id="{layer}.{head}"]')
            has_colour = cell.evaluate("(cell) => cell.style.background !== ''")
            assert has_colour == (shown[layer, head]["weight"] >= 0.01)
        assert label(opened, 5, 5) == "layer 5, head 5: “it” at 11 looks at “suitcase” at 9, 35 %"
        assert page.inner_text('[data-id="0.2"]') == "<1 %"
        assert page.locator(f'[data-t="{SUITCASE}"]').get_attribute("class") == "t second cursor"
        page.select_option('[aria-label="order"]', "strongest")
        opened.poll("document.querySelector('.cells.strongest .cell .share') !== null")
        order = page.locator(".cells .cell").evaluate_all("(all) => all.map((c) => c.dataset.id)")
        ranked = [f"{x.layer_index}.{x.head}" for x in sentence.scan.links(IT, SUITCASE)]
        weights = [shown[tuple(map(int, name.split(".")))]["weight"] for name in order]
        assert weights == sorted(weights, reverse=True)
        assert order[:3] == ranked[:3]
        page.click(".second-token")
        opened.wait(f"s.second === null && s.token === {IT}")
        # Nor is the text selected between the two clicks.
        page.click(f'[data-t="{IT}"]')
        page.click(f'[data-t="{SUITCASE}"]', modifiers=["Shift"])
        opened.wait(f"s.second === {SUITCASE}")
        assert page.evaluate("getSelection().isCollapsed")
        assert opened.complaints == []


@pytest.mark.slow
def test_what_looks_at_a_word(browser: Chromium, sentence: Read) -> None:
    with browser.open(sentence.path, address="#s=entropy&h=0.2") as opened:
        opened.page.click('[data-direction="queries"]')
        opened.page.click(f'[data-t="{SUITCASE}"]')
        opened.page.click(SWITCH)
        shown = answers(opened, SUITCASE)
        for layer, head, weights in sentence:
            column = weights[:, SUITCASE]
            link = shown[layer, head]
            assert is_near(link["weight"], float(column.max()))
            assert is_near(float(column[link["other"]]), float(column.max()), halves=2)
            assert link["bound"] == "exact"  # the map holds every weight
        first = sentence.scan.links(SUITCASE, direction="queries")[0]
        words = label(opened, first.layer_index, first.head)
        assert words.endswith(
            f"“{first.word}” at {first.query} looks at “suitcase” at 9, {first.weight:.0%}".replace(
                "%", " %"
            )
        )


@pytest.mark.slow
def test_bounds_where_the_page_holds_the_first_key(browser: Chromium, blocks: Read) -> None:
    """Python holds four keys of all heads, and the page one of most."""
    token = 99
    with browser.open(blocks.path, address=f"#s=entropy&h=0.0&t={token}&v=links") as opened:
        shown = answers(opened, token)
        links = {(x.layer_index, x.head): x for x in blocks.scan.links(token)}
        for layer, head, _ in blocks:
            link: Link = links[layer, head]
            assert shown[layer, head]["other"] == link.key
            assert is_near(shown[layer, head]["weight"], link.weight)
        bounds = set()
        for other in (93, 98, 40):
            opened.do(f"headwise.app.set({{ second: {other} }})")
            shown = answers(opened, token, other)
            for layer, head, weights in blocks:
                true, link_ = float(weights[token, other]), shown[layer, head]
                bounds.add(link_["bound"])
                if link_["bound"] == "exact":
                    assert is_near(link_["weight"], true)
                else:
                    assert link_["bound"] == "at most"
                    assert true**0.5 <= link_["weight"] ** 0.5 + HALF
        assert bounds == {"exact", "at most"}
        assert "<: not among the stored keys" in opened.page.inner_text("[data-part=grid]")
        opened.do("headwise.app.set({ second: null, direction: 'queries' })", "s.second === null")
        opened.wait("s.parts.links.all.some(({ bound }) => bound === 'at least')")
        shown = answers(opened, token)
        for (layer, head), link_ in shown.items():
            column = blocks.weights[layer][head, :, token]
            assert is_near(link_["weight"], float(column[link_["other"]]))
            is_most = is_near(link_["weight"], float(column.max()), halves=2)
            assert is_most or link_["bound"] == "at least"
        assert "≥: another token may give more" in opened.page.inner_text("[data-part=grid]")
        assert opened.complaints == []


@pytest.mark.slow
def test_what_gives_most_and_what_may_give_more(
    browser: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All queries, by brute force: the stored steps say what is known of each."""
    monkeypatch.setattr("headwise.reports.blobs.MOST_ROWS", 0)
    scan = viewer_scan(layers=2, heads=5, length=2500, top=5)
    ties = scan.layer_scans[0].summaries["top_keys_of_every_query"]
    ties["key"][0, [40, 2000], 0], ties["share"][0, [40, 2000], 0] = 7, 0.99
    page = save_scan_page(tmp_path / "page.html", viewer_report(scan))
    bounds = set()
    with browser.open(page, address="#t=7&d=queries&v=links") as opened:
        counts = opened.page.evaluate("headwise.app.scan.layers.map(({ top }) => top)")
        assert {count for layer in counts for count in layer} == {1, 4}
        for token in (7, 1290, 2400):
            opened.do(f"headwise.app.set({{ token: {token} }})")
            shown = answers(opened, token)
            for (layer, head), link_ in shown.items():
                top = scan.layer_scans[layer].summaries["top_keys_of_every_query"]
                ranks = counts[layer][head]
                keys = top["key"][head, :, :ranks]
                shares = top["share"][head, :, :ranks].double().clamp(min=0)
                steps = (255 * shares.sqrt()).round()
                given = torch.where((keys == token) & (steps > 0), steps, 0).amax(-1)
                assert link_["other"] == int(given.argmax())
                assert link_["weight"] == pytest.approx((float(given.max()) / 255) ** 2)
                low, high = ((steps + end).clamp(0, 255) / 255 for end in (-0.5, 0.5))
                rest = torch.minimum(high[:, -1] ** 2, 1 - (low**2).sum(-1)).clamp(min=0)
                rest = torch.where((steps[:, -1] > 0) & (keys != token).all(-1), rest, 0)
                bound = "at least" if float(rest.max()) > link_["weight"] else "exact"
                assert link_["bound"] == bound
                bounds.add((ranks, bound))
    assert len(bounds) >= 3


@pytest.mark.slow
def test_answers_are_inflated_while_nothing_is_asked(browser: Chromium, blocks: Read) -> None:
    """A quiet page needs its blobs no more."""
    token = 99
    with browser.open(blocks.path, address=f"#s=entropy&h=0.0&t={token}") as opened:
        opened.poll("headwise.app.ahead.has(0)")
        opened.page.evaluate("headwise.app.ahead.get(0).then(() => null)")
        gone = (
            "document.querySelectorAll('[data-blob^=\"0/top\"]').forEach((each) => each.remove())"
        )
        opened.page.evaluate(gone)
        opened.page.click(SWITCH)
        assert len(answers(opened, token)) == len(blocks.scan.links(token))


# ---- by keyboard, by touch, by address -----------------------------------------------------------


@pytest.mark.slow
def test_by_keyboard(browser: Chromium, sentence: Read) -> None:
    with browser.open(sentence.path, address=f"#s=entropy&h=5.5&t={IT}") as opened:
        page = opened.page
        page.keyboard.press("l")
        opened.wait("s.order === 'links'")
        page.focus(".scroller")
        for _ in range(IT - SUITCASE):
            page.keyboard.press("ArrowLeft")
        page.keyboard.press("Shift+Enter")
        shown = answers(opened, IT, SUITCASE)
        assert is_near(shown[5, 5]["weight"], float(sentence.weights[5][5, IT, SUITCASE]))
        page.keyboard.press("d")
        opened.wait("s.direction === 'queries'")
        shown = answers(opened, IT, SUITCASE)
        opened.poll(f"{is_turned(sentence, opened)}")
        page.keyboard.press("Escape")
        opened.wait("s.token === null && s.second === null")
        opened.poll(
            "document.querySelector('[data-part=grid]').innerText.includes('Choose a token')"
        )
        page.keyboard.press("l")
        opened.wait("s.order === 'layers'")
        page.keyboard.press("?")
        assert "this word in all heads" in page.inner_text("dialog")


def is_turned(sentence: Read, opened: Opened) -> str:
    """Once the pair is turned: "suitcase" looks at "it"."""
    opened.wait("s.parts.links.all.length === 72")
    shown = answers(opened, IT, SUITCASE)
    near = is_near(shown[5, 5]["weight"], float(sentence.weights[5][5, SUITCASE, IT]))
    return str(near).lower()


@pytest.mark.slow
def test_by_touch(browser: Chromium, sentence: Read) -> None:
    """A long press pins the second word, and the press is no tap."""
    options: dict[str, Any] = {"width": 390, "height": 844, "has_touch": True, "is_mobile": True}
    with browser.open(sentence.path, address="#s=entropy&h=5.5", **options) as opened:
        page = opened.page
        page.locator(f'[data-t="{IT}"]').tap()
        opened.wait(f"s.token === {IT}")
        box = page.locator(f'[data-t="{SUITCASE}"]').bounding_box()
        assert box is not None
        point = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        session = page.context.new_cdp_session(page)
        touch = {"type": "touchStart", "touchPoints": [point]}
        session.send("Input.dispatchTouchEvent", touch)
        # The heads take the place of the map, and the strongest are named.
        opened.wait(f"s.second === {SUITCASE} && s.order === 'links' && s.tab === 'heads'")
        session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        opened.poll("document.querySelectorAll('.ranking button').length === 3")
        assert page.locator(".ranking button").first.is_visible()
        shown = answers(opened, IT, SUITCASE)
        assert opened.state()["token"] == IT
        assert is_near(shown[5, 5]["weight"], float(sentence.weights[5][5, IT, SUITCASE]))
        assert opened.complaints == []


@pytest.mark.slow
def test_an_address_keeps_the_pair(browser: Chromium, sentence: Read) -> None:
    with browser.open(sentence.path, address="#s=entropy&h=5.5&t=11&u=9&v=strongest") as opened:
        shown = answers(opened, IT, SUITCASE)
        assert len(shown) == 72
        opened.page.click(f'[data-t="{SUITCASE}"]')  # a word alone is another question
        opened.wait(f"s.token === {SUITCASE} && s.second === null")
        opened.page.go_back()
        opened.wait(f"s.token === {IT} && s.second === {SUITCASE}")


@pytest.mark.slow
def test_a_filter_of_links_is_in_per_cent(browser: Chromium, sentence: Read) -> None:
    with browser.open(sentence.path, address="#s=entropy&h=5.5&t=11&u=9&v=links&f=>30") as opened:
        shown = answers(opened, IT, SUITCASE)
        opened.poll("document.querySelectorAll('.cell.faint').length > 0")
        clear = opened.page.locator(".cell:not(.faint)").evaluate_all(
            "(all) => all.map((c) => c.dataset.id)"
        )
        assert clear == [f"{n}.{h}" for (n, h), x in shown.items() if x["weight"] > 0.3]


# ---- other pages ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_tokens_without_words(browser: Chromium, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (3 * torch.randn(1, HEADS, TOKENS, 7, generator=generator) for _ in range(2))
    matrix = AttentionMatrix(q, k, mask=Mask.causal())
    wanted = ["standard", TopKeysOfEveryQuery()]
    read = scan_model(matrix, torch.zeros_like(q), statistics=wanted)
    path = save_scan_page(tmp_path / "page.html", ScanReport.of(read))
    with browser.open(path, address="#s=entropy&h=0.0&o=none&t=50&v=links") as opened:
        shown, dense = answers(opened, 50), matrix.dense()[0].double()
        for head in range(HEADS):
            key = int(dense[head, 50].argmax())
            assert shown[0, head]["other"] == key
            assert label(opened, 0, head).startswith(
                f"layer 0, head {head}: token 50 looks at token {key}, "
            )
            assert opened.page.inner_text(f'[data-id="0.{head}"]').startswith(f"#{key}\n")


@pytest.mark.slow
def test_cross_attention_and_several_sequences(browser: Chromium, tmp_path: Path) -> None:
    """A token of a text: layers in which it is no query show no link."""
    torch.manual_seed(3)
    inputs = {"input_ids": tokens(BATCH, SOURCE), "decoder_input_ids": tokens(BATCH, LENGTH)}
    read = scan_model(t5(), inputs, statistics=["standard", TopKeysOfEveryQuery()])
    report = ScanReport.of(read, name_of=lambda token: f"w{token}")
    path = save_scan_page(tmp_path / "page.html", report)
    for address, asked in {
        "#s=entropy&h=3.1&x=1&t=5&v=links": {"token": 5, "text": 1},
        "#s=entropy&h=3.1&x=1&t=5&d=queries&v=links": {
            "token": 5,
            "text": 0,
            "direction": "queries",
        },
        "#s=entropy&h=3.1&x=1&t=5&u=2&v=links": {"token": 5, "key": 2, "text": 1},
    }.items():
        with browser.open(path, address=address) as opened:
            shown = answers(opened, 5, asked.get("key"))  # type: ignore[arg-type]
            links = read.links(**asked, sequence=1)  # type: ignore[arg-type]
            found = {(x.layer_index, x.head): x for x in links}
            assert {*shown} == {*found}
            assert {3} < {layer for layer, _ in shown} < set(range(len(read.layers)))
            for place, link in found.items():
                # By its steps, the page may not know that a query gives most.
                is_most = "direction" in asked and shown[place]["bound"] == "at least"
                is_none = link.bound == "at most" and link.weight**0.5 < HALF
                assert is_most or is_none or shown[place]["bound"] == link.bound
                if link.bound == "at most" and not is_none:  # of rounded weights, never less
                    assert shown[place]["weight"] >= link.weight - 1e-6
                else:
                    assert is_near(shown[place]["weight"], link.weight)
                if asked == {
                    "token": 5,
                    "text": 1,
                }:  # of two queries, one step may hide which is more
                    assert shown[place]["other"] == link.key
            blank = next(n for n in range(len(read.layers)) if (n, 0) not in shown)
            assert opened.page.inner_text(f'[data-id="{blank}.0"]') == "·"
            assert opened.complaints == []


@pytest.mark.slow
def test_two_scans_answer_for_the_side_that_is_shown(browser: Chromium, tmp_path: Path) -> None:
    """Where one side holds the stored keys of a head, the change of the other is not known."""
    report = viewer_report(viewer_scan(top=5), second=viewer_scan(), names=("before", "after"))
    page = save_scan_page(tmp_path / "p.html", report)
    said = {"A": "Heads of A, before.", "B": "Heads of B, after.", "diff": "B − A: after − before."}
    for mode, count in (("A", 15), ("B", 3), ("diff", 3)):
        with browser.open(page, address=f"#t=300&v=links&m={mode}") as opened:
            assert len(answers(opened, 300)) == count
            assert said[mode] in opened.page.inner_text("[data-part=grid]")


@pytest.mark.slow
def test_a_change_of_stored_keys_is_never_more_than_the_true_one(
    browser: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of made-up stored keys: what is named moved at least so much, on any weights that fit."""
    monkeypatch.setattr("headwise.reports.blobs.MOST_ROWS", 0)
    before = viewer_scan(layers=2, length=2500, top=5)
    after = viewer_scan(layers=2, length=2500, top=5)
    for layer in after.layer_scans:
        top = layer.summaries["top_keys_of_every_query"]
        top["key"] = top["key"].roll(1, 0)
        top["share"] = top["share"].roll(1, 0)
    report = viewer_report(before, second=after, top_keys="all")
    page = save_scan_page(tmp_path / "p.html", report)
    with browser.open(page, address="#t=2400&v=links&m=diff") as opened:
        shown = answers(opened, 2400)
    assert len(shown) == 10
    for (layer, head), link in shown.items():
        key = link["other"]
        sides = []
        for scan in (before, after):
            top = scan.layer_scans[layer].summaries["top_keys_of_every_query"]
            keys, shares = (top[name][head, 2400] for name in ("key", "share"))
            stored = shares[keys == key]
            low = float(stored[0]) if len(stored) else 0.0
            least = float(shares[keys >= 0].min())
            sides.append((low, low if len(stored) else min(least, 1 - float(shares.sum()))))
        (a, a_most), (b, b_most) = sides
        ends = b - a_most, b_most - a
        assert ends[0] - 0.01 <= link["weight"] <= ends[1] + 0.01
        near = min(ends, key=abs) if ends[0] * ends[1] > 0 else 0.0
        assert abs(link["weight"]) <= abs(near) + 0.01
        assert (link["bound"] == "exact") <= (a == a_most and b == b_most)


@pytest.mark.slow
def test_a_page_without_single_tokens_says_so(browser: Chromium, tmp_path: Path) -> None:
    page = save_scan_page(tmp_path / "page.html", viewer_report(viewer_scan(top=0)))
    with browser.open(page, address="#t=9&v=links") as opened:
        opened.wait("s.parts.links.token === 9")
        assert opened.state()["parts"]["links"]["all"] is None
        assert "holds no single tokens" in opened.page.inner_text("[data-part=grid]")
        opened.page.click(".command summary")
        assert "--top-keys" in opened.page.inner_text(".command code")


@pytest.mark.slow
def test_a_large_page(browser: Chromium, tmp_path: Path) -> None:
    """144 heads and 16,384 tokens: every head answers, with the nodes of a page."""
    report = gpt2_sized()
    page = save_scan_page(tmp_path / "page.html", replace(report, title="large"))
    with browser.open(page, address="#t=9000&v=links") as opened:
        shown = answers(opened, 9000)
        assert len(shown) == 144
        for index, layer in enumerate(report.scan.layer_scans):
            summary = layer.summaries["top_keys_of_every_query"]
            for head in range(12):
                assert shown[index, head]["other"] == int(summary["key"][head, 9000, 0])
                assert is_near(shown[index, head]["weight"], float(summary["share"][head, 9000, 0]))
        assert opened.page.evaluate("document.querySelectorAll('*').length") <= 3500
