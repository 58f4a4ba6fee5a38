"""Every question of the catalogue: it is borne out, its numbers are those of the documentation.

Each question's own tests, in questions/, see its verdict turn.
"""

import re
import string
from functools import cache
from typing import Any

import pytest

from headwise.study import output as charts
from headwise.study import question as catalogue
from headwise.study.question import Answer, Question, answer_question, load_question
from tests.quick import others_extra, others_slow
from tests.reports.html import Tree
from tools import study as documentation

# Names with digits in them, which no experiment measures.
NAMES = re.compile(r"GPT-2|MiniLM-L6-v2|q?u?int8|b?float(16|32|64)|LLM\.int8|tensor2tensor|Conv1D")


@cache
def documented() -> dict[str, dict[str, Any]]:
    return {record["id"]: record for record in documentation.read_record()["questions"]}


def templates(question: Question) -> list[str]:
    cells = [cell for row in question.table[1:] for cell in row]
    sentences = question.sentences.values()
    return [question.verdict, question.why, question.caption, *sentences, *cells]


def apart(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Where two records differ by more than a thousandth."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = (
            [f"{where}: {sorted(ours)} against {sorted(theirs)}"]
            if ours.keys() != theirs.keys()
            else []
        )
        return found + [
            x
            for k in ours.keys() & theirs.keys()
            for x in apart(ours[k], theirs[k], f"{where}[{k}]")
        ]
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{where}: {len(ours)} values against {len(theirs)}"]
        return [
            x
            for n, (a, b) in enumerate(zip(ours, theirs, strict=True))
            for x in apart(a, b, f"{where}[{n}]")
        ]
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return (
            []
            if ours == pytest.approx(theirs, rel=1e-3, abs=2e-4)
            else [f"{where}: {ours} against {theirs}"]
        )
    return [] if ours == theirs else [f"{where}: {ours} against {theirs}"]


# Those that train or time for long.
SLOW = ("packing", "axis-order", "must-divide")
EXTRA = ("weights-of-one", "same-function", "learning", "implementations")


@pytest.mark.parametrize(
    "name", others_extra(catalogue.IDS, *SLOW, quick={*catalogue.IDS}.difference(SLOW, EXTRA))
)
def test_it_is_borne_out_and_the_documentation_has_its_numbers(name: str) -> None:
    question = load_question(name)
    answer = answer_question(question)
    assert answer.holds, answer.verdict
    recorded = documented()[name]["numbers"]
    assert answer.numbers.keys() == recorded.keys()
    assert question.varies <= recorded.keys()
    fixed = recorded.keys() - question.varies
    assert not apart({k: answer.numbers[k] for k in fixed}, {k: recorded[k] for k in fixed})


@pytest.mark.parametrize("name", catalogue.IDS)
def test_the_documentation_was_written_from_answers_that_hold(name: str) -> None:
    record = documented()[name]
    answer = Answer(load_question(name), record["numbers"])
    assert answer.holds, answer.verdict
    assert answer.as_json() == record


@pytest.mark.parametrize("name", catalogue.IDS)
def test_every_number_that_is_said_was_measured(name: str) -> None:
    for template in templates(load_question(name)):
        words = "".join(text for text, *_ in string.Formatter().parse(template))
        assert not re.search(r"\d", NAMES.sub("", words)), template


@pytest.mark.parametrize("name", catalogue.IDS)
def test_a_question_is_short_and_in_its_place(name: str) -> None:
    question = load_question(name)
    answer = Answer(question, documented()[name]["numbers"])
    assert question.id == name
    assert question.asks.endswith("?")
    assert question.claim.endswith(".")
    assert answer.verdict.endswith(".")
    assert len(answer.verdict.split()) <= 60
    assert len(question.sentences) >= 2


def test_every_file_is_in_the_catalogue() -> None:
    folder = documentation.ROOT / "src" / "headwise" / "study" / "questions"
    for kind in ("*.py", "*.md"):
        files = {path.stem.replace("_", "-") for path in folder.glob(kind)} - {"--init--"}
        assert files == set(catalogue.IDS)


def test_the_comparison_can_fail() -> None:
    same = {"a": [1, 2.0, {"b": True}], "c": "x"}
    assert not apart(same, {"a": [1, 2.0001, {"b": True}], "c": "x"})
    assert apart(same, {"a": [1, 2.01, {"b": True}], "c": "x"}) == ["[a][1]: 2.0 against 2.01"]
    assert apart(same, {"a": [1, 2.0, {"b": False}], "c": "x"})
    assert apart(same, {"a": [1, 2.0], "c": "x"})
    assert apart(same, {"a": [1, 2.0, {"b": True}]})


# ---- the documentation -----------------------------------------------------------------------


def test_the_page_is_written_from_the_record() -> None:
    assert documentation.PAGE.read_text("utf-8") == documentation.render_page(
        documentation.read_record()
    )


def test_each_question_is_on_the_page_once_with_a_plain_sentence_first() -> None:
    page = documentation.PAGE.read_text("utf-8")
    for name in catalogue.IDS:
        answer = Answer(load_question(name), documented()[name]["numbers"])
        heading = f'<a id="{name}"></a>\n\n## {answer.question.asks}\n\n**{answer.verdict}**\n'
        assert page.count(answer.question.asks) == page.count(heading) == 1
        assert answer.verdict.startswith(answer.short_verdict)
        assert len(answer.short_verdict) < 100
        assert not re.search(r"\b\d", answer.short_verdict)  # the numbers come after it


@pytest.mark.parametrize("name", catalogue.IDS)
def test_a_caption_is_on_the_page_once(name: str) -> None:
    answer = Answer(load_question(name), documented()[name]["numbers"])
    caption = answer.fill(answer.question.caption)
    assert documentation.PAGE.read_text("utf-8").count(caption) == 1


def test_a_difference_with_default_initialisation_names_its_tokens() -> None:
    """They decide it: the outputs of one head and of eight differ far less for positive tokens."""
    text = documentation.PAGE.read_text("utf-8").replace("\u00a0", " ")
    sentences = [
        sentence
        for sentence in re.split(r"(?<=[.!?]) |\n", text)
        if "default initialisation" in sentence and "%" in sentence
    ]
    assert sentences
    assert [each for each in sentences if "tokens from torch.rand" not in each] == []


@pytest.mark.parametrize(
    "name", others_slow(catalogue.IDS, "parameters", "when-split", "packing", "gradients")
)
def test_the_picture_is_that_of_the_record(name: str) -> None:
    answer = Answer(load_question(name), documented()[name]["numbers"])
    drawn = Tree((documentation.PICTURES / f"{name}.svg").read_text("utf-8")).root
    anew = Tree(charts.answer_svg(answer)).root
    (element,) = drawn.all("svg")
    assert element.attributes["aria-label"] == answer.fill(answer.question.caption)
    # Places of lines may differ in the last digit from machine to machine; what is said may not.
    assert [text.text for text in drawn.all("text")] == [text.text for text in anew.all("text")]
