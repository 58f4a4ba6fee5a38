"""The study: which questions are asked, with which random numbers, and what is left out."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from headwise.errors import MissingExtraError, OptionError
from headwise.study import question as catalogue
from headwise.study.question import Question, answer_question, answer_questions
from tests.study.answers import QUESTION


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A catalogue of two questions, the second of which needs what is not there."""

    def missing(progress: object) -> dict[str, int]:
        raise MissingExtraError(saw="no such thing", needed="a thing", do="pip install thing")

    questions = {"made-up": QUESTION, "needy": replace(QUESTION, id="needy", measure=missing)}
    monkeypatch.setattr(catalogue, "IDS", tuple(questions))
    monkeypatch.setattr(catalogue, "load_question", questions.__getitem__)
    return SimpleNamespace(**{name.replace("-", "_"): q for name, q in questions.items()})


def test_ids_come_in_the_order_of_the_catalogue_and_once() -> None:
    assert catalogue.select_ids() == catalogue.IDS
    assert catalogue.select_ids(["parameters", "when-split", "parameters"]) == (
        "when-split",
        "parameters",
    )


def test_an_unknown_id_is_refused_with_those_there_are() -> None:
    with pytest.raises(OptionError, match="the question 'heads'") as refused:
        catalogue.select_ids(["parameters", "heads"])
    assert "diagram, when-split, parameters" in str(refused.value)


def test_what_needs_an_extra_is_left_out_of_the_whole_study(two: SimpleNamespace) -> None:
    result = answer_questions()
    assert [a.question.id for a in result.answers] == ["made-up"]
    (left,) = result.left_out
    assert (left[0].id, left[1].saw, left[1].do) == ("needy", "no such thing", "pip install thing")
    record = result.as_json()
    assert list(record) == ["questions", "left_out", "setting", "fallback"]
    assert record["left_out"] == [
        {
            "id": "needy",
            "asks": QUESTION.asks,
            "reason": "no such thing",
            "remedy": "pip install thing",
        }
    ]
    assert record["setting"]["torch"] == torch.__version__


def test_what_was_named_and_needs_an_extra_is_an_error(two: SimpleNamespace) -> None:
    with pytest.raises(MissingExtraError, match="no such thing"):
        answer_questions(["needy"])


def test_progress_rises_to_the_end(two: SimpleNamespace) -> None:
    seen: list[tuple[str, int, int]] = []
    answer_questions(progress=lambda *step: seen.append(step))
    assert [step[1] for step in seen] == sorted(step[1] for step in seen)
    assert seen[0] == ("made-up", 0, 200)
    assert seen[-1] == ("done", 200, 200)


def test_random_numbers_are_the_same_every_time_and_nobody_elses() -> None:
    def drawn(progress: object) -> dict[str, float]:
        return {"sum": torch.rand(()).item(), "bars": 0}

    question: Question = replace(QUESTION, measure=drawn)
    before = torch.get_rng_state()
    first = answer_question(question).numbers
    torch.testing.assert_close(torch.get_rng_state(), before)
    torch.rand(3)
    assert answer_question(question).numbers == first
