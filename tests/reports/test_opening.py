"""The link that a page opens with: the strongest one of two words, lit, with both in sight."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import AttentionMatrix, ScoreBias
from headwise import scan as scan_model
from headwise.reports.page import save_scan_page, viewer_data
from headwise.reports.report import ScanReport
from headwise.scanning.links import FUNCTION_WORDS, SIGHT, find_strongest_link
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.maps import TopKeysOfEveryQuery
from headwise.scanning.written import WrittenText
from tests.quick import others_slow
from tests.reports.browser import NOTHING_LIT, Chromium, needs_a_browser
from tests.reports.viewer_scans import viewer_report, viewer_scan

HEADS = 3
STATISTICS: dict[str, Any] = {
    "map": ["entropy", "map"],
    "top": ["entropy", TopKeysOfEveryQuery(ranks=64)],
}
WORDS = ["", "The", "trophy", "did", "not", "fit", ",", "since", "it", "was", "large", ".", ""]
PLAIN = 1 / 40  # a small weight


def text_of(words: list[str]) -> WrittenText:
    """Words with blanks between them; an empty one is a special token."""
    spans, text = [], ""
    for word in words:
        text += " " if word and text else ""
        spans.append((len(text), len(text) + len(word)))
        text += word
    return WrittenText(text, torch.tensor(spans))


def scan_of(weights: Tensor, words: list[str] | None, kind: str = "map") -> HeadScan:
    """A scan of heads with these weights (heads, queries, keys)."""
    heads, queries, _ = weights.shape
    q, k, v = torch.zeros(3, 1, heads, queries, 7)
    bias = ScoreBias.dense(weights.log().float(), axes="heads queries keys")
    matrix = AttentionMatrix(q, k, score_bias=bias)
    written = None if words is None else text_of(words)
    return scan_model(matrix, v, statistics=STATISTICS[kind], written=written)


def spread(links: dict[tuple[int, int, int], float], length: int = len(WORDS)) -> Tensor:
    """Weights (heads, queries, keys) with these; a row's rest is on its own key."""
    weights = torch.full((HEADS, length, length), PLAIN / length, dtype=torch.float64)
    for link, weight in links.items():
        weights[link] = weight
    own = torch.eye(length, dtype=torch.bool)
    rest = 1 - weights.masked_fill(own, 0).sum(-1)
    return torch.where(own, rest[..., None], weights)


# ---- which link ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STATISTICS)
@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_strongest_of_two_words_that_are_apart(kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length = len(WORDS)
    weights = torch.randn(HEADS, length, length, generator=generator).double().mul(2).softmax(-1)
    is_word = [
        place > 0 and word.isalnum() and word.lower() not in FUNCTION_WORDS
        for place, word in enumerate(WORDS)
    ]
    links = {
        (head, query, key): float(weights[head, query, key])
        for head, query, key in product(range(HEADS), range(length), range(length))
        if is_word[query] and is_word[key] and abs(query - key) > 1
    }
    head, query, _ = max(links, key=lambda link: links[link])
    scan = scan_of(weights, WORDS, kind)
    assert find_strongest_link(scan, None) == (0, head, query)
    opening = viewer_data(ScanReport.of(scan))[0]["opening"]
    assert opening == {"layer": 0, "head": head, "token": query}


@pytest.mark.parametrize(
    ("trivial", "what"),
    [
        ((1, 8, 8), "own"),
        ((1, 8, 7), "before"),
        ((1, 8, 9), "after"),
        ((1, 8, 0), "special"),
        ((1, 8, 12), "special"),
        ((1, 12, 5), "from a special one"),
        ((1, 8, 6), "a comma"),
        ((1, 11, 3), "from a full stop"),
    ],
)
def test_trivial_links_are_left_out(trivial: tuple[int, int, int], what: str) -> None:
    weights = spread({trivial: 0.9, (2, 8, 2): 0.4})
    assert find_strongest_link(scan_of(weights, WORDS), None) == (0, 2, 8), what


def test_the_first_token_is_left_out_if_it_is_a_word() -> None:
    words = ["Word", *WORDS[1:]]
    weights = spread({(1, 8, 0): 0.9, (2, 8, 2): 0.4})
    assert find_strongest_link(scan_of(weights, words), None) == (0, 2, 8)


@pytest.mark.parametrize("kind", STATISTICS)
def test_two_that_are_equal_are_none(kind: str) -> None:
    weights = spread({(0, 5, 2): 0.5, (2, 8, 2): 0.5})
    assert find_strongest_link(scan_of(weights, WORDS, kind), None) is None
    weights = spread({(0, 5, 2): 0.5, (0, 8, 2): 0.5})
    assert find_strongest_link(scan_of(weights, WORDS, kind), None) is None


def test_a_weak_link_or_no_words_are_none() -> None:
    assert find_strongest_link(scan_of(spread({(2, 8, 2): 0.04}), WORDS), None) is None
    strong = spread({(2, 8, 2): 0.4})
    assert find_strongest_link(scan_of(strong, None), None) is None
    assert find_strongest_link(scan_of(strong, WORDS, "map"), None) is not None


def test_letters_are_no_words() -> None:
    letters = ["", *"thetrophydidnotfit"]
    weights = spread({(2, 8, 2): 0.4}, len(letters))
    assert find_strongest_link(scan_of(weights, letters), None) is None
    doubled = scan_of(weights, [2 * letter for letter in letters])
    assert find_strongest_link(doubled, None) == (0, 2, 8)


def test_a_link_out_of_sight_comes_after_those_in_sight() -> None:
    words = ["x", *["word"] * 50, "x" * SIGHT, "end", "is", "here"]
    length, end = len(words), len(words) - 1
    far, near = {(0, end, 5): 0.9}, {(1, 30, 20): 0.3}
    assert find_strongest_link(scan_of(spread({**far, **near}, length), words), None) == (0, 1, 30)
    assert find_strongest_link(scan_of(spread(far, length), words), None) == (0, 0, end)


@pytest.mark.parametrize(
    ("between", "last", "opens"), [(SIGHT, "q" * 40, (0, 0, 5)), (SIGHT + 1, "q", (0, 1, 3))]
)
def test_sight_is_counted_from_begin_to_begin(
    between: int, last: str, opens: tuple[int, int, int]
) -> None:
    words = ["x", "key", "x" * (between - len("keyit,")), "it", ",", last]
    weights = spread({(0, 5, 1): 0.9, (1, 3, 1): 0.3}, len(words))
    assert find_strongest_link(scan_of(weights, words), None) == opens


def test_names_in_brackets_are_no_words() -> None:
    report = viewer_report(viewer_scan())
    names = {2: "[SEP]", 8: "it", 5: "<s>", 9: "was", 4: "noun"}
    weights = spread({(1, 8, 2): 0.9, (0, 9, 5): 0.8, (2, 8, 4): 0.4})
    scan = scan_of(weights, None)
    texts = tuple(text._replace(ids=torch.arange(len(WORDS)).int()) for text in scan.texts)
    object.__setattr__(scan, "texts", texts)
    assert find_strongest_link(scan, lambda token: names.get(token, ".")) == (0, 2, 8)
    assert viewer_data(ScanReport.of(scan))[0]["opening"] is None
    assert viewer_data(report)[0]["opening"] is not None


@pytest.mark.parametrize(
    ("word", "what"), [("the", "an article"), ("THAT", "a conjunction"), ("x", "a letter")]
)
def test_words_that_say_little_are_left_out(word: str, what: str) -> None:
    words = [word if place == 5 else each for place, each in enumerate(WORDS)]
    weights = spread({(1, 8, 5): 0.9, (2, 8, 2): 0.4})
    assert find_strongest_link(scan_of(weights, words), None) == (0, 2, 8), what


def test_pieces_of_words_are_left_out() -> None:
    """Written: the letters beside a token. By names: what continues a word, or has no blank."""
    weights = spread({(1, 8, 4): 0.5, (1, 8, 5): 0.3, (2, 8, 2): 0.25})
    scan = scan_of(weights, WORDS)
    written = text_of(WORDS)
    spans = written.spans.clone()
    spans[4, 1] -= 1  # "no", then "t fit" in two tokens
    spans[5, 0] -= 2
    whole = written.text.replace(" fit", "fit ")
    part = torch.tensor([[*pair] for pair in spans.tolist()])
    part[5] = torch.tensor([int(part[4, 1]), int(part[4, 1]) + 4])
    texts = (scan.texts[0]._replace(written=(WrittenText(whole, part),)),)
    object.__setattr__(scan, "texts", texts)
    assert find_strongest_link(scan, None) == (0, 2, 8)
    for names in ({4: "not", 5: "##fit"}, {4: " not", 5: "fit"}):
        scan = scan_of(weights, None)
        ids = scan.texts[0]._replace(ids=torch.arange(len(WORDS)).int())
        object.__setattr__(scan, "texts", (ids,))
        blank = "" if "##fit" in names.values() else " "
        given = {at: f"{blank}{word}" for at, word in enumerate(WORDS) if word.isalnum()}
        texts_of = {**given, **names}
        assert find_strongest_link(scan, lambda token, t=texts_of: t.get(token, ".")) == (0, 2, 8)


# ---- the page ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = spread({(2, 8, 2): 0.62, (2, 8, 10): 0.2, (2, 8, 3): 0.04, (1, 5, 3): 0.3})
    folder = tmp_path_factory.mktemp("opening")
    return save_scan_page(folder / "page.html", ScanReport.of(scan_of(weights, WORDS)))


@pytest.mark.slow
@needs_a_browser
def test_the_page_opens_with_its_link(browser: Chromium, page: Path) -> None:
    with browser.open(page, address="") as opened:
        state = opened.state()
        assert (state["head"], state["token"]) == (2, 8)
        summary = state["parts"]["summary"]
        assert summary.startswith(
            "0.2: “it” at 8 looks at “trophy” at 2 (62 %), “large” at 10 (20 %)"
        )
        opened.poll("document.querySelectorAll('.arcs path').length === 2")
        assert "lit-" in (opened.page.locator('[data-t="2"]').get_attribute("class") or "")
        # The arc ends over both words.
        ends = opened.page.evaluate(
            """() => {
              const path = document.querySelector(".arcs path"), box = path.ownerSVGElement;
              const left = box.getBoundingClientRect().left;
              const points = [0, path.getTotalLength()].map((at) => path.getPointAtLength(at).x);
              return points.map((x) => x + left).sort((a, b) => a - b);
            }"""
        )
        for end, token in zip(ends, (2, 8), strict=True):
            word = opened.page.locator(f'[data-t="{token}"]').bounding_box()
            assert word is not None
            assert word["x"] <= end <= word["x"] + word["width"]
        opened.page.keyboard.press("Escape")
        opened.wait("s.token === null")
        assert opened.page.locator(".arcs path").count() == 0
        address = opened.page.evaluate("location.hash")
        assert opened.complaints == []
    with browser.open(page, address=address) as opened:
        assert (opened.state()["head"], opened.state()["token"]) == (2, None)


@needs_a_browser
@pytest.mark.parametrize(
    ("address", "head", "token"),
    others_slow([(NOTHING_LIT, 0, None), ("#t=5", 0, 5), ("#h=0.1", 1, None)]),
)
def test_an_address_wins(
    browser: Chromium, page: Path, address: str, head: int, token: int | None
) -> None:
    with browser.open(page, address=address) as opened:
        assert (opened.state()["head"], opened.state()["token"]) == (head, token)


@pytest.mark.slow
@needs_a_browser
def test_both_words_are_in_sight(browser: Chromium, tmp_path: Path) -> None:
    words = ["x", *["word"] * 400]
    weights = spread({(1, 300, 250): 0.5}, len(words))
    path = save_scan_page(tmp_path / "page.html", ScanReport.of(scan_of(weights, words, "top")))
    with browser.open(path, address="") as opened:
        opened.wait("s.token === 300")
        for token in (250, 300):
            opened.poll(f"document.querySelector('[data-t=\"{token}\"]') !== null")
        pane = opened.page.locator(".scroller").first.bounding_box()
        assert pane is not None
        for token in (250, 300):
            box = opened.page.locator(f'[data-t="{token}"]').bounding_box()
            assert box is not None
            assert pane["y"] <= box["y"]
            assert box["y"] + box["height"] <= pane["y"] + pane["height"] + 1
        assert opened.page.locator(".arcs path").count() == 1
        # A token that is chosen in the text moves nothing.
        top = opened.page.evaluate("document.querySelector('.scroller').scrollTop")
        assert top > 0
        opened.page.click('[data-t="260"]')
        opened.wait("s.token === 260")
        assert opened.page.evaluate("document.querySelector('.scroller').scrollTop") == top


@pytest.mark.slow
@needs_a_browser
def test_two_scans_open_without_a_link(browser: Chromium, tmp_path: Path) -> None:
    report = viewer_report(viewer_scan(), second=viewer_scan(), names=("before", "after"))
    assert viewer_data(report)[0]["opening"] is None
    with browser.open(save_scan_page(tmp_path / "page.html", report), address="") as opened:
        assert opened.state()["token"] is None
