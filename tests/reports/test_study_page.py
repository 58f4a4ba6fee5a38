"""The page of the study: complete in itself, and what it says is what was measured."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headwise.errors import MissingExtraError
from headwise.reports import pictures as charts
from headwise.reports.templates import mark_identifiers_as_code
from headwise.study import drawing as style
from headwise.study.output import answer_svg, render_study_page
from headwise.support.files import write_whole
from tests.reports.html import Tree, everything, outside
from tests.study.answers import QUESTION, answer, made_up, missing


def test_nothing_is_loaded_from_outside() -> None:
    assert outside(render_study_page(made_up())) == []


def test_everything_that_is_said_is_on_the_page() -> None:
    page = Tree(render_study_page(made_up(answer(sum=4)))).root
    (section,) = page.all("section", id="made-up")
    assert section.all("h2")[0].text == 'Are two and two <four> & "more"?'
    assert section.all("div", class_="status")[0].text == "Yes: the sum <is> 4."
    assert [li.text for li in page.all("li")[:1]] == [
        'Are two and two <four> & "more"? Yes: the sum <is> 4.'
    ]
    assert section.all("figcaption")[0].text == 'Two "bars", 1.0 and 2.5.'
    assert "Because 4 & nothing else." in section.text
    assert "They are four." in section.text
    assert [li.text.strip() for li in section.all("li", class_="held")] == [
        "✓the sum is 4",
        "✓a bar is 2.50 high",
    ]
    cells = [[cell.text for cell in row.all("td")] for row in section.all("tr")[1:]]
    assert cells == [["sum", "4"], ["<bar>", "2.5"]]


def test_every_link_leads_somewhere() -> None:
    page = Tree(render_study_page(made_up())).root
    places = {e.attributes["id"] for e in everything(page) if "id" in e.attributes}
    links = [a.attributes["href"] for a in page.all("a")]
    assert links == ["#made-up"]
    assert {link.removeprefix("#") for link in links} <= places


def test_a_claim_that_failed_stands_at_the_top() -> None:
    html = render_study_page(made_up(answer(), answer(sum=5)))
    page = Tree(html).root
    assert "1 of 2 claims is not borne out here." in page.all("header")[0].text
    assert len(page.all("div", class_="status bad")) == 2
    assert [li.text.strip() for li in page.all("li", class_="failed")] == ["✗Not so: the sum is 5"]


def test_what_was_left_out_is_said_with_its_remedy() -> None:
    needy = replace(QUESTION, id="needy", asks="And this?")
    left = (needy, missing("a <thing> is missing", "pip install 'thing'"))
    words = Tree(render_study_page(made_up(left_out=(left,)))).root.text
    assert "Left out: And this? The reason: a <thing> is missing." in words
    assert "pip install 'thing'" in words


def test_the_fallback_says_what_it_is() -> None:
    fallback = missing("no <weights>", "pip install weights")
    words = Tree(render_study_page(made_up(fallback=fallback))).root.all("header")[0].text
    assert "This is not the trained encoder" in words
    assert "no <weights>" in words
    assert "pip install weights" in words


def test_where_it_was_measured() -> None:
    words = Tree(render_study_page(made_up(setting={"threads": 7}))).root.all("footer")[0].text
    assert "headwise 0.1.0, torch 2.13.0, threads 7" in words


def test_the_picture_takes_the_colours_of_its_page() -> None:
    drawn = answer_svg(answer())
    named = re.findall(r"var\((--[\w-]+), (#\w+)\)", drawn)
    assert {("--series-0", style.SERIES[0]), ("--soft", style.SOFT)} <= set(named)
    assert not re.search(rf"(?<!, ){style.SERIES[0]}", drawn)


def test_the_picture_has_text_that_stays_text_and_words_for_it() -> None:
    drawn = Tree(answer_svg(answer())).root
    (element,) = drawn.all("svg")
    assert element.attributes["aria-label"] == 'Two "bars", 1.0 and 2.5.'
    assert element.attributes["role"] == "img"
    assert {"<a>", "b & c"} <= {text.text.strip() for text in element.all("text")}


def test_a_picture_is_the_same_every_time() -> None:
    assert answer_svg(answer()) == answer_svg(answer())


def test_save_writes_what_render_gives(tmp_path: Path) -> None:
    page = write_whole(tmp_path / "new" / "page.html", render_study_page(made_up()))
    assert page.read_text("utf-8") == render_study_page(made_up())


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'headwise\[demo\]'"):
        charts.require_matplotlib()


@pytest.mark.parametrize(
    ("words", "html"),
    [
        (
            "embed_dim / heads, with torch.rand.",
            "<code>embed_dim</code> / heads, with <code>torch.rand</code>.",
        ),
        ("torch.nn.MultiheadAttention's", "<code>torch.nn.MultiheadAttention</code>&#39;s"),
        ("x-transformers, GPT-2, 1.5 and <b>", "x-transformers, GPT-2, 1.5 and &lt;b&gt;"),
    ],
)
def test_identifiers_are_set_in_code(words: str, html: str) -> None:
    assert mark_identifiers_as_code(words) == html
