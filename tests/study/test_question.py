"""An answer is made of its numbers, and turns with them."""

import math
from dataclasses import replace

import pytest
import torch

from headwise.study.question import round_numbers_for_json
from tests.study.answers import answer


def test_the_verdict_is_said_when_every_fact_holds() -> None:
    given = answer()
    assert given.holds
    assert given.verdict == "Yes: the sum <is> 4."
    assert given.facts == ((True, "the sum is 4"), (True, "a bar is 2.50 high"))
    assert given.rows == (("sum", "4"), ("<bar>", "2.5"))


def test_one_fact_that_fails_turns_the_verdict_and_is_named() -> None:
    given = answer(bars=[1.0, 1.5])
    assert not given.holds
    assert given.verdict == (
        "The experiment did not confirm the claim. These facts do not hold: a bar is 1.50 high."
    )


def test_the_record_has_stable_keys() -> None:
    record = answer().as_json()
    assert list(record) == ["id", "claim", "holds", "verdict", "numbers"]
    assert record["numbers"] == {"sum": 4, "bars": [1.0, 2.5]}


def test_numbers_are_plain_and_short() -> None:
    given = {"a": 1 / 3, "b": [True, 2, ("x", 1e-9 / 3)], "c": {1: 123456789.0}}
    assert round_numbers_for_json(given) == {
        "a": 0.333333,
        "b": [True, 2, ["x", 3.33333e-10]],
        "c": {"1": 123457000.0},
    }
    assert round_numbers_for_json(True) is True


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="a measured number is"):
        round_numbers_for_json({"a": [value]})


def test_a_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="Tensor"):
        round_numbers_for_json({"a": torch.ones(3)})


def test_columns_of_figures_are_told_from_columns_of_words() -> None:
    titles = ("what", "n", "words", "mixed")
    table = (titles, ("1", "(2, 3)", "4x", "5"), ("2", "−0.5", "a", ""))
    given = replace(answer(), question=replace(answer().question, table=table))
    assert given.columns == tuple(zip(titles, (False, True, False, True), strict=True))
    assert given.rows == table[1:]
