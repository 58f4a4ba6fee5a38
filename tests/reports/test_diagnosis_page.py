"""The page of a diagnosis: complete in itself, and its numbers are those of the diagnosis."""

import json
import math
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import torch

from headwise import Attention, Rotary, compare
from headwise.identify.catalogue import PAGES
from headwise.identify.comparison import FunctionComparison
from headwise.identify.results import Diagnosis, Verdict
from headwise.reports.diagnosis import (
    DiagnosisReport,
    difference_percent_text,
    difference_scale_position,
    render_diagnosis_page,
    render_markdown,
    stage_rows,
)
from headwise.support.files import write_whole
from tests.reports.diagnoses import (
    HEADS,
    KV_HEADS,
    LONG,
    SHORT,
    function,
    report_of_function,
    report_of_model,
    report_of_weights,
)
from tests.reports.html import Element, Tree, outside

REPORTS = {
    "function": report_of_function,
    "model": report_of_model,
    "weights": report_of_weights,
}


def tree(report: DiagnosisReport) -> Element:
    return Tree(render_diagnosis_page(report)).root


def titles(page: Element, table: str) -> list[list[str]]:
    (element,) = page.all("table", class_=f"heat {table}")
    rows = [row.all("td") for row in element.all("tr")[1:]]
    return [
        [cell.attributes["title"] for cell in row if "title" in cell.attributes] for row in rows
    ]


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_is_loaded_from_outside(name: str) -> None:
    assert outside(render_diagnosis_page(REPORTS[name]())) == []


def test_the_question_and_its_answer_come_first() -> None:
    (header,) = tree(report_of_function()).all("header")
    assert header.all("h1")[0].text == "Is ported <model> the same function as original?"
    (status,) = header.all("div", class_="status bad")
    assert status.text == (
        "Different: rotary theta (or rotary exponent width) explains a part of it; nothing "
        "explains scores."
    )
    assert "The outputs differ by 38 % of their size at most." in header.text


def test_a_cause_has_its_numbers_and_a_repair_to_copy() -> None:
    (card,) = tree(report_of_function()).all("article", class_="card cause")
    assert card.all("h3")[0].text == "1. rotary theta"
    words = [
        (term.text, value.text) for term, value in zip(card.all("dt"), card.all("dd"), strict=True)
    ]
    assert words == [
        ("In the first", "theta 10000"),
        ("Alone in", "head 0"),
        (
            "Explains to rounding",
            "q after rotary, k after rotary: 62 % of the differences of stages; the outputs are "
            "then apart by 0.25 of their size",
        ),
        ("The same on these inputs", "rotary exponent width"),
        (
            "More",
            PAGES.joinpath("rotary-theta.md").read_text("utf-8").splitlines()[0].removeprefix("# "),
        ),
    ]
    assert card.all("pre", class_="copy")[0].text == 'Rotary(theta=500000, note="<&>")'
    assert "The rotary frequencies have another base." in card.text


def test_the_link_of_a_cause_leads_to_its_text() -> None:
    for report in (report_of_function(), report_of_weights()):
        page = tree(report)
        links = [a.attributes["href"] for a in page.all("a") if "#page-" in a.attributes["href"]]
        assert links
        for link in links:
            (article,) = page.all("article", id=link.removeprefix("#"))
            headings = [each.text for each in article.all("h4")]
            assert headings[0] == "Stages"
            assert "Repair" in headings
            # Nothing of Markdown is left, and each page names others in a list.
            assert not re.search(r"\]\(|\*\*\w[^*]*\*\*|##|`", article.text)
            assert article.all("li")


def test_a_text_of_a_cause_is_no_script() -> None:
    text = "A **bold** `x ** y`.\n\n- <b>one</b>\n- `two`\n\n```python\n- <i>\n\n## no\n```\n"
    assert str(render_markdown(text)) == (
        "<p>A <b>bold</b> <code>x ** y</code>.</p>\n"
        "<ul><li>&lt;b&gt;one&lt;/b&gt;</li><li><code>two</code></li></ul>\n"
        "<pre><code>- &lt;i&gt;\n\n## no\n</code></pre>"
    )


def test_each_stage_has_a_cell_for_each_input() -> None:
    assert titles(tree(report_of_function()), "by-input") == [
        [
            f"q after rotary, {SHORT}: equal to rounding",
            f"q after rotary, {LONG}: differs by 0.5 of its size",
        ],
        [
            f"k after rotary, {SHORT}: equal to rounding",
            f"k after rotary, {LONG}: differs by 3e-05 of its size",
        ],
        [
            f"scores, {SHORT}: of another shape",
            f"scores, {LONG}: differs by 0.02 of its size",
        ],
        [f"output, {SHORT}: not compared", f"output, {LONG}: equal to rounding"],
    ]


def test_each_stage_has_a_cell_for_each_head() -> None:
    page = tree(report_of_function())
    queries, keys, scores, output = titles(page, "by-head")
    assert queries[:2] == [
        "q after rotary, head 0: differs by 0.5 of its size",
        "q after rotary, head 1: equal to rounding",
    ]
    assert len(queries) == HEADS
    assert keys == [
        "k after rotary, kv head 0: differs by 3e-05 of its size",
        "k after rotary, kv head 1: equal to rounding",
    ]
    assert scores == ["scores: of another shape"]
    assert output == ["output: equal to rounding"]
    (table,) = page.all("table", class_="heat by-head")
    for row in table.all("tr"):
        cells = [*row.all("th"), *row.all("td")]
        assert sum(int(cell.attributes.get("colspan", 1)) for cell in cells) == HEADS + 1
    assert HEADS // KV_HEADS == 3


def test_each_stage_that_parts_has_a_cell_for_each_position() -> None:
    page = tree(report_of_function())
    assert titles(page, "by-position") == [
        [
            "q after rotary, position 0: equal to rounding",
            "q after rotary, position 1: differs by 0.5 of its size",
            "q after rotary, position 2: differs by 0.25 of its size",
        ]
    ]
    assert not tree(report_of_weights()).all("table", class_="heat by-position")


def test_explained_stages_are_marked() -> None:
    (table,) = tree(report_of_function()).all("table", class_="heat by-input")
    marks = [row.all("td", class_="why")[0].text.split() for row in table.all("tr")[1:]]
    theta = ["✓", "rotary", "theta"]
    assert marks == [theta, theta, ["✗", "not", "explained"], []]


def test_what_was_compared_can_be_compared_again() -> None:
    (section,) = tree(report_of_function()).all("section", id="compared")
    facts = {t.text: d.text for t, d in zip(section.all("dt"), section.all("dd"), strict=True)}
    assert facts == {
        "The first": "ported <model>: headwise.Attention",
        "The second": "original: a function named <f>",
        "Inputs": f"{SHORT}; {LONG}",
        "Seed": "4",
        "Stages": "q after rotary, k after rotary, scores, output",
    }
    call = "headwise compare 'ported <model>' original --layer=3"
    assert section.all("pre")[0].text == call


def test_weights_have_tensors_and_moves() -> None:
    page = tree(report_of_weights())
    items = {s.attributes["id"]: [li.text for li in s.all("li")] for s in page.all("section")}
    assert [" ".join(text.split()) for text in items["moves"]] == [
        "model.layers.1.self_attn: rotary permutation missing (q and k); then no known change "
        "explains v; more: A Llama checkpoint of Meta gives gibberish in Hugging Face: q and k "
        "rows are not permuted Repair undo it in <wq>, wk",
        "the layer: phlogiston (q)",
    ]
    (moves,) = page.all("section", id="moves")
    assert [repair.text for repair in moves.all("pre")] == ["undo it in <wq>, wk"]
    differing, alone = items["tensors"]
    assert "(queries of heads 0 to 3), made of layers.1.attention.wq.weight: 4608 of" in differing
    assert alone == "<rotary>.inv_freq: in the second alone"
    assert "OTHER OUTPUTS" in items["outputs"][1]
    assert "a config of another model" in page.all("header")[0].text
    assert page.all("table") == []


def test_a_model_has_a_row_for_each_layer_and_causes_once() -> None:
    page = tree(report_of_model())
    (status,) = page.all("div", class_="status bad")
    assert status.text == (
        "Different: rotary theta (or rotary exponent width) and layers exchanged explain a part of "
        "it; nothing explains "
        "layers.1.attention, layers.2.attention."
    )
    (causes,) = page.all("section", id="causes")
    groups = [h3.text for h3 in causes.all("h3", class_="group")]
    assert groups == ["layers.1.attention, layers.2.attention", "layers.3.attention"]
    assert len(causes.all("article")) == 1
    assert "It computes what h.4.attn should" in causes.text
    (table,) = page.all("table", class_="heat by-layer")
    rows = [[cell.text.strip() for cell in row.all("td")] for row in table.all("tr")[1:]]
    assert rows == [
        ["=", "·", "·", "·", "=", ""],
        ["=", "50 %", "3e-03 %", "2 %", "=", "✗ not explained rotary theta"],
        ["differs", "50 %", "3e-03 %", "2 %", "=", "✗ not explained rotary theta"],
        ["differs", "50 %", "3e-03 %", "2 %", "=", "✓ layers exchanged"],
    ]
    assert "Stages of layers.1.attention" in page.text
    assert len(page.all("table", class_="heat by-head")) == 2


@pytest.mark.slow
def test_a_comparison_of_layers_is_drawn() -> None:
    torch.manual_seed(0)
    a, b = (Attention(24, 4, num_kv_heads=2, rotary=Rotary(theta=theta)) for theta in (1e4, 5e5))
    b.load_state_dict(a.state_dict())
    diagnosis = compare(a, b)
    assert diagnosis.function is not None
    page = tree(DiagnosisReport(diagnosis=diagnosis))
    assert page.all("h1")[0].text == "Are the two the same function?"
    rows = titles(page, "by-input")
    inputs = len(diagnosis.function.probes)
    assert inputs == 6
    assert [len(row) for row in rows] == [inputs] * len(diagnosis.function.stages)
    parted = [row.stage for row in stage_rows(diagnosis.function) if row.is_parted]
    assert parted == [stage.stage for stage in diagnosis.function.parted]
    assert "Rotary(theta=500000)" in page.text
    assert "not explained" not in page.text
    assert json.loads(json.dumps(diagnosis.as_dict()))["function"]["gaps"][0]["stage"] == "q"


def test_equal_layers_have_no_causes_and_no_legend() -> None:
    same = replace(function(), parted=(), causes=(), gaps=function().gaps[:1])
    page = tree(DiagnosisReport(diagnosis=Diagnosis(verdict=Verdict.SAME, function=same)))
    assert page.all("div", class_="status ")
    assert [page.all("article"), page.all("figure")] == [[], []]
    assert "The outputs differ" not in page.text


def test_without_a_cause_the_first_stage_is_named() -> None:
    unknown = replace(function(), causes=())
    diagnosis = Diagnosis(verdict=Verdict.UNKNOWN, function=unknown)
    (section,) = tree(DiagnosisReport(diagnosis=diagnosis)).all("section", id="causes")
    assert "the earliest stage that differs: q after rotary" in section.text


def test_inconclusive_has_its_reason() -> None:
    blind = replace(function(), parted=(), causes=(), blind="there is one key")
    diagnosis = Diagnosis(verdict=Verdict.INCONCLUSIVE, function=blind)
    (header,) = tree(DiagnosisReport(diagnosis=diagnosis)).all("header")
    assert header.all("div", class_="status note")
    assert "The reason: there is one key." in header.text


def test_sizes_in_words_and_on_the_scale() -> None:
    sizes = (0.0, 2e-9, 1e-4, 0.0123, 0.5, 2.0, 1e9, math.inf)
    words = ["0", "2e-07 %", "0.01 %", "1.2 %", "50 %", "200 %", ">999 %", "shape"]
    assert [difference_percent_text(size) for size in sizes] == words
    places = [difference_scale_position(size) for size in (0.0, 1e-6, 1e-3, 1.0, 7.0)]
    assert places == pytest.approx([0, 0, 0.5, 1, 1])


def test_json_has_no_infinities() -> None:
    fields = function().as_dict()
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    assert fields["parted"][2]["size"] is None
    assert {*fields} == {*FunctionComparison.__dataclass_fields__}


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    frame = report_of_function().diagnosis._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert "1. rotary theta" in unescape(frame)


def test_save_writes_what_render_gives(tmp_path: Path) -> None:
    page = write_whole(tmp_path / "new" / "page.html", render_diagnosis_page(report_of_weights()))
    assert page.read_text("utf-8") == render_diagnosis_page(report_of_weights())
