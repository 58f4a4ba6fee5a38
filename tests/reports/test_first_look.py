"""The page of the first look: complete in itself, and its numbers are the result's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headwise.reports.first_look import in_words, render, save, scientific
from headwise.studies.first_look import METRICS, FirstLook
from tests.looks import random_look, with_distinct_checks
from tests.reports.html import Element, Tree, everything, outside


@pytest.fixture(scope="module")
def result() -> FirstLook:
    return with_distinct_checks(random_look())


@pytest.fixture(scope="module")
def page(result: FirstLook) -> Element:
    return Tree(render(result)).root


# ---- what is in it ---------------------------------------------------------------------------


def test_nothing_is_loaded_from_outside(result: FirstLook) -> None:
    assert outside(render(result)) == []


def test_the_check_for_loading_can_fail() -> None:
    assert outside('<p><img src="map.png"></p>') == ["map.png"]
    assert outside("<p><script>1</script></p>") == ["script"]
    style = "<style>@import 'a'; p { background: url(b.png) } /* https://c.org */</style>"
    assert outside(style) == ["@import", "url(b.png)", "https://c.org"]


def test_every_head_has_its_map(page: Element, result: FirstLook) -> None:
    figures = page.all("figure", class_="map")
    assert len(figures) == len(result.heads) == 15
    for figure, head in zip(figures, result.heads, strict=True):
        assert figure.attributes["id"] == f"head-{head.layer}-{head.head}"
        (image,) = figure.all("img")
        assert image.attributes["src"].startswith("data:image/png;base64,")
        assert image.attributes["alt"].startswith(f"Layer {head.layer}, head {head.head}: entropy")
    assert len({figure.all("img")[0].attributes["src"] for figure in figures}) == 15


def test_every_link_leads_somewhere(page: Element) -> None:
    places = {e.attributes["id"] for e in everything(page) if "id" in e.attributes}
    links = [a.attributes["href"] for a in page.all("a")]
    assert links
    assert {link.removeprefix("#") for link in links} <= places


def test_the_numbers_of_the_table_are_the_results(page: Element, result: FirstLook) -> None:
    (table,) = page.all("table", id="table")
    rows = [[cell.text for cell in row.all("td")] for row in table.all("tr")[1:]]
    assert rows == [
        [f"{h.layer}, {h.head}", *(f"{getattr(h, metric):.4f}" for metric in METRICS)]
        for h in result.heads
    ]


@pytest.mark.parametrize("metric", METRICS)
def test_the_numbers_of_the_pictures_are_the_results(
    page: Element, result: FirstLook, metric: str
) -> None:
    (table,) = page.all("table", **{"class": "grid", "data-measure": metric})
    titles = [cell.all("a")[0].attributes["title"] for cell in table.all("td")]
    assert titles == [
        f"layer {h.layer}, head {h.head}: {getattr(h, metric):.4f}" for h in result.heads
    ]
    for cell, head in zip(table.all("td"), result.heads, strict=True):
        value, digits = getattr(head, metric), 1 if metric == "entropy" else 2
        assert float(cell.text) == pytest.approx(value, abs=0.5001 * 10**-digits)


def test_the_equality_table_is_the_results(page: Element, result: FirstLook) -> None:
    (section,) = page.all("section", id="same")
    rows = section.all("tbody")[0].all("tr")
    for row, equality in zip(rows, result.equalities, strict=True):
        cells = [cell.text.strip() for cell in row.all("td")]
        assert cells[0] == str(equality.layer)
        checks = (equality.drop_in, equality.reference, equality.matrix)
        assert cells[3:6] == [f"{check.ratio:.2f}" for check in checks]
        mantissa, exponent = f"{equality.drop_in.error:.1e}".split("e")
        assert cells[1] == f"{mantissa} × 10−{-int(exponent)}"


def test_what_was_read_and_with_what(page: Element, result: FirstLook) -> None:
    (tokens,) = page.all("div", class_="tokens")
    assert [span.text for span in tokens.all("span")] == list(result.tokens)
    words = page.text
    assert "The same function." in words
    assert "37 tokens" in words
    assert all(f"{name} {version}" in words for name, version in result.versions.items())


def test_a_page_needs_its_words(page: Element) -> None:
    for image in page.all("img") + page.all("svg"):
        assert image.attributes.get("alt") or image.attributes.get("aria-label")
    (html,) = page.all("html")
    assert html.attributes["lang"] == "en"
    assert [heading.text for heading in page.all("h1")] == ["What 15 attention heads look at"]


def test_close_ups_show_the_tokens_and_their_weights(page: Element, result: FirstLook) -> None:
    cards = page.all("article")
    assert len(cards) == len(result.close_ups)
    for card, shown in zip(cards, result.close_ups, strict=True):
        part = result.tokens[shown.start : shown.start + len(shown.weights)]
        assert [t.text for t in card.all("text")] == [t for token in part for t in (token,) * 2]
        found = [title.text for title in card.all("title")]
        worth = [
            f"{part[i]} → {part[j]}: {weight:.2f}"
            for i, row in enumerate(shown.weights)
            for j, weight in enumerate(row)
            if weight >= 0.05
        ]
        assert found == worth


# ---- other results ---------------------------------------------------------------------------


def test_a_failed_comparison_is_not_hidden(result: FirstLook) -> None:
    worst = result.equalities[1]
    outside = replace(worst.drop_in, ratio=31.5, within=False)
    broken = replace(
        result,
        equalities=(result.equalities[0], replace(worst, drop_in=outside), result.equalities[2]),
    )
    words = Tree(render(broken)).root.text
    assert "Not the same function." in words
    assert "The same function." not in words
    assert "31.50" in words


def test_tokens_are_text_and_never_markup() -> None:
    tokens = ("<script>", "&amp;", '"><b>', "]]>", *(f"w{n}" for n in range(30)))
    html = render(random_look(tokens))
    assert outside(html) == []
    (shown,) = Tree(html).root.all("div", class_="tokens")
    assert [span.text for span in shown.all("span")] == list(tokens)


def test_numbers_in_words() -> None:
    assert scientific(1.94e-6) == "1.9 × 10<sup>−6</sup>"
    assert scientific(0.0) == "0"
    assert in_words(["one"]) == "One"
    assert in_words(["one", "two", "three"]) == "One, two and three"


def test_save_writes_what_render_gives(result: FirstLook, tmp_path: Path) -> None:
    page = save(result, tmp_path / "new" / "page.html")
    assert page.read_text("utf-8") == render(result)
