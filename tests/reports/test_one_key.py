"""Heads that give much of the weight of all queries to one key: what is named, and where."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from headwise import AttentionMatrix, Mask, scan
from headwise.reports import terminal
from headwise.reports.page import render_static, save_scan_page
from headwise.reports.report import RULE, ScanReport
from headwise.scanning.result import HeadScan
from headwise.scanning.statistics.catalogue import find_standard_statistics
from headwise.scanning.statistics.statistic import Summary
from tests.reports.browser import Chromium, needs_a_browser
from tests.reports.html import Tree
from tests.reports.test_viewer_data import blobs_of
from tests.scanning.statistics.calls import assert_is

LENGTH = 40
NAMES = ["one_key", "most_received", "first_token", "effective_keys"]
ELSEWHERE = -1000.0  # a score that leaves no weight


def planted(shares: Sequence[tuple[int, float]], *, is_causal: bool = False) -> HeadScan:
    """A head for each (key, share): every query that sees the key gives it this share.

    The rest is even over the other keys that the query sees.
    """
    weights = torch.zeros(len(shares), LENGTH, LENGTH, dtype=torch.float64)
    for own, (key, share) in zip(weights, shares, strict=True):
        for query, row in enumerate(own):
            seen = query + 1 if is_causal else LENGTH
            row[:seen] = 1 / seen
            if key < seen and seen > 1:
                row[:seen] = (1 - share) / (seen - 1)
                row[key] = share
    return scan(matrix_of(weights, is_causal=is_causal), values(len(shares)), statistics=NAMES)


def matrix_of(weights: Tensor, *, is_causal: bool = False, **options: Any) -> AttentionMatrix:
    """The operator of these weights (heads, queries, keys): scores are their logarithms."""
    q = torch.eye(weights.shape[1], dtype=torch.float64).expand(1, len(weights), -1, -1)
    k = weights.log().clamp(min=ELSEWHERE).mT[None]
    mask = Mask.causal() if is_causal else Mask()
    return AttentionMatrix(q, k, mask=mask, scale=1.0, **options)


def values(heads: int) -> Tensor:
    return torch.zeros(1, heads, LENGTH, 3, dtype=torch.float64)


def exact(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def sentences(found: HeadScan, **options: Any) -> list[tuple[int, str]]:
    return [(one.head.head, one.sentence) for one in found.standouts(**options)]


# ---- the number ----------------------------------------------------------------------------------


def test_a_key_in_the_middle_at_the_start_and_at_the_end() -> None:
    found = planted([(17, 0.57), (0, 0.4), (LENGTH - 1, 0.29)])
    assert_is(found["one_key"][0], exact(0.57, 0.4, 0.29))


def test_a_query_that_cannot_see_the_key_counts_with_0() -> None:
    found = planted([(10, 0.6), (0, 0.5)], is_causal=True)
    # Of 40 queries, 30 see key 10; the first query gives all of its weight to key 0.
    assert_is(found["one_key"][0], exact(0.6 * 30, 1 + 0.5 * 39) / LENGTH)


def test_the_last_key_does_not_win_by_the_one_query_that_sees_it() -> None:
    weights = torch.eye(LENGTH, dtype=torch.float64)[None].repeat(2, 1, 1)
    found = scan(matrix_of(weights, is_causal=True), values(2), statistics=NAMES)
    assert_is(found["one_key"][0], 1 / LENGTH)


def test_of_several_texts_it_is_the_mean_over_queries() -> None:
    first, second = planted([(17, 0.57), (0, 0.4)]), planted([(3, 0.21), (0, 0.8)])
    merged = first.merge(second)
    assert_is(merged["one_key"][0], exact((0.57 + 0.21) / 2, (0.4 + 0.8) / 2))


def test_a_padded_key_is_no_key() -> None:
    weights = torch.full((2, LENGTH, LENGTH), 0.1 / (LENGTH - 2), dtype=torch.float64)
    weights[:, :, 0], weights[:, :, 5] = 0.5, 0.4
    keys = torch.arange(LENGTH)[None] > 0
    matrix = matrix_of(weights)
    hidden = AttentionMatrix(
        matrix.q, matrix.k, mask=Mask.may_attend(keys, axes="batch keys"), scale=1.0
    )
    found = scan(hidden, values(2), statistics=NAMES)
    assert_is(found["one_key"][0], 0.8)


# ---- the sentence --------------------------------------------------------------------------------


def test_a_sink_in_the_middle_is_named_with_its_key() -> None:
    found = planted([(17, 0.57), (4, 0.31), (0, 0.02)])
    words = "gives 57 % of the weight of all queries to token 17"
    assert [one for one in sentences(found) if one[1].startswith("gives")] == [(0, words)]
    (one,) = [one for one in found.standouts() if one.statistic == "one_key"]
    assert one.middle == "31 %"


def test_a_sink_at_token_0_is_named_once() -> None:
    found = planted([(0, 0.57), (9, 0.02), (9, 0.02)])
    assert found.top("first_token", 1)[0].head == 0
    words = [sentence for _, sentence in sentences(found) if "effective" not in sentence]
    assert [each for each in words if "token 0" in each or "first token" in each] == [
        "gives 57 % of the weight of all queries to token 0"
    ]


@pytest.mark.parametrize(("share", "is_named"), [(0.29, False), (0.2999, False), (0.3001, True)])
def test_over_30_per_cent(share: float, is_named: bool) -> None:
    found = planted([(17, share), (17, 0.02), (17, 0.02)])
    # It is the highest, far above the middle head; but no sink.
    assert any("of all queries" in words for _, words in sentences(found)) is is_named


def test_it_is_named_where_all_heads_have_one() -> None:
    found = planted([(0, 0.57), (0, 0.55), (0, 0.56)])
    assert sentences(found) == [(0, "gives 57 % of the weight of all queries to token 0")]


def test_another_head_on_the_first_token_is_another_fact() -> None:
    found = planted([(17, 0.57), (0, 0.25), (9, 0.02)])
    words = sentences(found)
    assert (0, "gives 57 % of the weight of all queries to token 17") in words
    assert (1, "puts 25 % of its weight on the first token") in words


def test_the_first_token_beside_another_key_is_another_fact_of_the_same_head() -> None:
    weights = torch.full((3, LENGTH, LENGTH), 1 / LENGTH, dtype=torch.float64)
    weights[0] = 0.2 / (LENGTH - 2)
    weights[0, :, 17], weights[0, :, 0] = 0.55, 0.25
    words = sentences(scan(matrix_of(weights), values(3), statistics=NAMES))
    assert (0, "gives 55 % of the weight of all queries to token 17") in words
    assert (0, "puts 25 % of its weight on the first token") in words


def special(found: HeadScan, name: str, shares: list[float]) -> HeadScan:
    """The scan with this statistic too."""
    (statistic,) = find_standard_statistics([name])
    values = torch.tensor(shares, dtype=torch.float64)
    summary: Summary = {"sum": values, "count": torch.ones_like(values)}
    layer = found.layer_scans[0]
    layer = replace(layer, summaries={**layer.summaries, name: summary})
    statistics = (*found.statistics, statistic)
    return replace(found, statistics=statistics, layer_scans=(layer,))


@pytest.mark.parametrize("name", ["special", "separator"])
def test_the_same_weight_on_special_tokens_is_not_named_again(name: str) -> None:
    found = planted([(17, 0.57), *3 * [(9, 0.02)]])
    # All but 1 % of it is that of the key.
    once = special(found, name, [0.58, 0.02, 0.02, 0.02])
    assert not any("special" in words or "separator" in words for _, words in sentences(once))
    # Other special tokens have 38 % too, and another head has 90 %.
    more = special(found, name, [0.95, 0.02, 0.02, 0.02])
    assert any("puts 95 %" in words for _, words in sentences(more))
    other = special(found, name, [0.58, 0.9, 0.02, 0.02])
    assert any("puts 90 %" in words for _, words in sentences(other))


def test_of_several_texts_the_first_token_may_be_the_one() -> None:
    first = planted([(0, 0.57), (0, 0.1)]).merge(planted([(0, 0.51), (0, 0.1)]))
    words = "gives 54 % of the weight of all queries to the first token of each text"
    assert (0, words) in sentences(first)
    other = planted([(0, 0.57), (0, 0.1)]).merge(planted([(7, 0.51), (0, 0.1)]))
    words = "gives 54 % of the weight of all queries to one key of each text"
    assert (0, words) in sentences(other)


def test_a_scan_without_the_statistic_names_the_first_token_as_before() -> None:
    found = planted([(0, 0.57), (9, 0.02), (9, 0.02)])
    statistics = tuple(s for s in found.statistics if s.definition.name != "one_key")
    layer = found.layer_scans[0]
    kept = {name: x for name, x in layer.summaries.items() if name != "one_key"}
    old = replace(found, statistics=statistics, layer_scans=(replace(layer, summaries=kept),))
    assert (0, "puts 57 % of its weight on the first token") in sentences(old)


def test_a_word_may_be_anything() -> None:
    found = planted([(0, 0.57), (9, 0.02)])
    give_tokens(found)
    for word, shown in (
        ("{}", "“{}”, token 0"),
        ("one key", "“one key”, token 0"),
        ("“", "‘“’, token 0"),
        ("\n\u202e", "“\\n\\u202e”, token 0"),
        ("x" * 40, f"“{'x' * 32}…”, token 0"),
        ("", "token 0"),
    ):
        (words, *_) = sentences(found, name_of=lambda _, word=word: word)
        assert words[1] == f"gives 57 % of the weight of all queries to {shown}"


# ---- pages and terminals -------------------------------------------------------------------------


def give_tokens(found: HeadScan) -> None:
    """Make all tokens known, of one kind."""
    found.layer_scans[0].summaries["most_received"]["token"].fill_(3)
    for text in found.texts:
        text.ids.fill_(3)


def report_of(found: HeadScan) -> ScanReport:
    give_tokens(found)
    return ScanReport.of(found, title="planted", name_of=lambda _: "[CLS]")


def test_pages_terminals_and_python_agree() -> None:
    report = report_of(planted([(17, 0.57), (0, 0.2), (9, 0.02)]))
    words = "gives 57 % of the weight of all queries to “[CLS]”, token 17"
    told = sentences(report.scan, name_of=report.name_of)
    assert (0, words) in told
    meta, _ = blobs_of(report)
    assert [(x["head"], x["sentence"]) for x in meta["scans"][0]["standouts"]] == told
    assert RULE in meta["rule"]
    page = Tree(render_static(report)).root
    assert words in [item.text.partition(" (the middle")[0] for item in page.all("li")]
    console = Console(file=io.StringIO(), width=200, color_system=None)
    with console.capture() as capture:
        terminal.print_input_and_standouts(report, console)
    assert words in capture.get()


@needs_a_browser
def test_the_page_names_the_key(browser: Chromium, tmp_path: Path) -> None:
    report = report_of(planted([(17, 0.57), (0, 0.2), (9, 0.02)]))
    with browser.open(save_scan_page(tmp_path / "page.html", report)) as opened:
        card = opened.page.locator("[data-statistic=one_key]")
        assert "gives 57 % of the weight of all queries to “[CLS]”, token 17" in card.inner_text()
        card.click()
        opened.wait("s.statistic === 'one_key' && s.layer === 0 && s.head === 0")
        received = opened.page.inner_text("[data-part=received]")
        assert received.startswith(
            "Receive most of the weight of all queries: “[CLS]” at 17 (57 %), “[CLS]” at 0 (1.1 %)"
        )
        assert "Weight on one key" in opened.page.inner_text("[data-part=definition]")
        opened.page.click("summary:has-text('About')")
        about = opened.page.inner_text("details.about")
        assert "over 30 % of the weight of all queries" in about
        assert "sink (the layer" not in about.replace("learned sink (the layer", "")


@needs_a_browser
def test_what_a_key_of_several_texts_receives_is_in_queries(
    browser: Chromium, tmp_path: Path
) -> None:
    found = planted([(17, 0.57), (0, 0.2)]).merge(planted([(9, 0.25), (0, 0.2)]))
    with browser.open(
        save_scan_page(tmp_path / "page.html", report_of(found)), address="#h=0.0"
    ) as opened:
        opened.poll("headwise.app.loaded !== null")
        received = opened.page.inner_text("[data-part=received]")
        assert received.startswith("Receive most: “[CLS]” at 17 (as much as 22.8 queries give), ")
