"""Questions and answers made up for tests of what is said and shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headwise.errors import MissingExtraError
from headwise.study.question import Answer, Numbers, Question, Study, read_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _draw(figure: Figure, n: Numbers) -> None:
    axes = figure.subplots()
    axes.bar(["<a>", "b & c"], n["bars"])


TEXT = """# Are two and two <four> & "more"?

They are four.

## Verdict

Yes: the sum <is>
{sum}.

## Why

Because {sum} & nothing else.

## Caption

Two "bars", {bars[0]} and {bars[1]}.

## Facts

- `sum`: the sum
  is {sum}
- `bar`: a bar is {bars[1]:.2f} high

## Table

| what | how much |
| --- | --- |
| sum | {sum} |
| <bar> | {bars[1]:.1f} |
"""
QUESTION = Question(
    id="made-up",
    measure=lambda progress: {"sum": 4, "bars": [1.0, 2.5]},
    facts=lambda n: {"sum": n["sum"] == 4, "bar": n["bars"][1] > 2},
    draw=_draw,
    varies=set(),
    **read_text(TEXT),
)


def answer(**changed: Any) -> Answer:
    return Answer(QUESTION, {"sum": 4, "bars": [1.0, 2.5]} | changed)


def made_up(
    *answers: Answer,
    left_out: tuple[tuple[Question, MissingExtraError], ...] = (),
    setting: Mapping[str, str | int] = {},
    fallback: MissingExtraError | None = None,
) -> Study:
    where = {"headwise": "0.1.0", "torch": "2.13.0", "threads": 2} | dict(setting)
    return Study(answers or (answer(),), left_out, where, fallback)


def missing(saw: str, do: str) -> MissingExtraError:
    return MissingExtraError(saw=saw, needed="it", do=do)
