"""Questions and answers made up for tests of what is said and shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headwise.study.question import Answer, Fact, FactTable, Numbers, Question
from headwise.study.run import LeftOut, Study
from headwise.study.trained import Fallback

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _draw(figure: Figure, n: Numbers) -> None:
    axes = figure.subplots()
    axes.bar(["<a>", "b & c"], n["bars"])


QUESTION = Question(
    id="made-up",
    asks='Are two and two <four> & "more"?',
    claim="They are four.",
    measure=lambda progress: {"sum": 4, "bars": [1.0, 2.5]},
    facts=(
        Fact("the sum is {sum}", lambda n: n["sum"] == 4),
        Fact("a bar is {bars[1]:.2f} high", lambda n: n["bars"][1] > 2),
    ),
    verdict="Yes: the sum <is> {sum}.",
    why="Because {sum} & nothing else.",
    caption='Two "bars", {bars[0]} and {bars[1]}.',
    draw=_draw,
    table=FactTable(("what", "how much"), (("sum", "{sum}"), ("<bar>", "{bars[1]:.1f}"))),
)


def answer(**changed: Any) -> Answer:
    return Answer(QUESTION, {"sum": 4, "bars": [1.0, 2.5]} | changed)


def made_up(
    *answers: Answer,
    left_out: tuple[LeftOut, ...] = (),
    setting: Mapping[str, str | int] = {},
    fallback: Fallback | None = None,
) -> Study:
    where = {"headwise": "0.1.0", "torch": "2.13.0", "threads": 2} | dict(setting)
    return Study(answers or (answer(),), left_out, where, fallback)
