"""A question about heads, as data: what is measured, what must hold, what is then said and drawn.

Everything that is shown is made from the numbers alone, so that every number that is shown is in
the JSON, and an answer can be drawn again from it.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.study.charts import Figure
from headwise.support.progress import Progress

Numbers = Mapping[str, Any]  # bool, int, float, str, and lists and dicts of them

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_FIGURE = re.compile(r"[-−+]?[\d(]|[-–]?$")  # a number, a shape, or nothing

SIGNIFICANT = 6  # digits: more is noise, and would triple the JSON


@dataclass(frozen=True)
class Fact:
    """One thing that must be so for the claim to stand.

    Attributes:
        says: the fact in a sentence, as a template over the numbers.
        holds: whether the numbers bear it out.
    """

    says: str
    holds: Callable[[Numbers], bool]


@dataclass(frozen=True)
class FactTable:
    """Rows of templates over the numbers, under columns with names."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Question:
    """What people ask, and the experiment that answers it.

    Attributes:
        id: the name on the command line and in the JSON: that of its file, with hyphens.
        asks: the question, in the words of those who ask it.
        claim: what the experiment should bear out.
        measure: does the experiment. It may use the global random numbers: they are seeded before
            and put back after.
        facts: what must hold of the numbers.
        verdict: the answer in one sentence, a template over the numbers; said if all facts hold.
        why: the reason, in few sentences; a template.
        caption: how to read the picture, for those who see it and those who do not; a template.
        draw: draws the picture from the numbers.
        table: the figures beside the picture.
        varies: keys of numbers that another machine need not repeat: times, and what hangs on the
            order of roundings.
    """

    id: str
    asks: str
    claim: str
    measure: Callable[[Progress], Numbers]
    facts: tuple[Fact, ...]
    verdict: str
    why: str
    caption: str
    draw: Callable[[Figure, Numbers], None]
    table: FactTable | None = None
    varies: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Answer:
    """A question and what was measured."""

    question: Question
    numbers: Numbers

    @property
    def facts(self) -> tuple[tuple[bool, str], ...]:
        """Whether each fact holds, and the fact with its numbers."""
        return tuple((f.holds(self.numbers), self.say(f.says)) for f in self.question.facts)

    @property
    def holds(self) -> bool:
        """Whether every fact holds, and so the claim."""
        return all(held for held, _ in self.facts)

    @property
    def verdict(self) -> str:
        """The answer; where a fact does not hold, which."""
        if self.holds:
            return self.say(self.question.verdict)
        failed = "; ".join(words for held, words in self.facts if not held)
        return f"The claim is not borne out. These do not hold: {failed}."

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The rows of the table, filled; none where there is no table."""
        table = self.question.table
        return tuple(tuple(map(self.say, row)) for row in table.rows) if table else ()

    @property
    def are_figures(self) -> tuple[bool, ...]:
        """Whether a column of the table holds figures, to be set flush right, or words."""
        return tuple(
            count > 0 and all(_FIGURE.match(cell) for cell in column)
            for count, column in enumerate(zip(*self.rows, strict=True))
        )

    def say(self, template: str) -> str:
        """A template with this answer's numbers."""
        return say(template, self.numbers)

    def as_json(self) -> dict[str, Any]:
        """The record of the command line's ``--json``."""
        return {
            "id": self.question.id,
            "claim": self.question.claim,
            "holds": self.holds,
            "verdict": self.verdict,
            "numbers": dict(self.numbers),
        }


def as_numbers(value: Any) -> Any:
    """Plain values, with floats to six significant digits.

    Raises:
        TypeError: a value that JSON does not have, a tensor for instance.
        ValueError: a number that is not finite.
    """
    match value:
        case bool() | int() | str():
            return value
        case float():
            if not math.isfinite(value):
                raise ValueError(f"a measured number is {value}")
            return float(f"{value:.{SIGNIFICANT}g}")
        case Mapping():
            return {str(key): as_numbers(inner) for key, inner in value.items()}
        case Sequence():
            return [as_numbers(inner) for inner in value]
    raise TypeError(f"a measured number is a {type(value).__name__}")


# ---- sentences with measured numbers in them ----------------------------------------------------


def say(template: str, numbers: Mapping[str, Any]) -> str:
    """Fill ``{key}``, ``{key[inner]}`` and ``{key[0]}`` from the numbers.

    After a colon stands how it is written: what Python's ``format`` knows, or ``sci``
    (1.9 × 10⁻⁶), ``percent`` (34 %, and 0.12 % of what is small), ``shape`` ((2, 12, 256)),
    ``list`` (1, 2, 4) or ``yesno``.
    """
    return _Template().vformat(template, (), numbers)


def scientific(value: float) -> str:
    """``1.9 × 10⁻⁶`` in one piece, without a line break; plainly 0 where it is 0."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}\u00a0×\u00a010{str(int(exponent)).translate(_SUPERSCRIPTS)}"


class _Template(string.Formatter):
    def get_field(  # Python's own reads [8] as an index, and a dict of JSON has the key "8"
        self,
        field_name: str,
        args: Any,  # noqa: ARG002
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, str]:
        first, *inner = field_name.replace("]", "").split("[")
        value: Any = kwargs[first]
        for key in inner:
            value = value[key] if isinstance(value, Mapping) else value[int(key)]
        return value, first

    def format_field(self, value: Any, spec: str) -> str:
        match spec:
            case "sci":
                return scientific(float(value))
            case "percent":
                small = 0 < abs(value) < 0.01
                return f"{100 * value:{'.2g' if small else '.0f'}}\u00a0%"
            case "shape":
                inner = ", ".join(map(str, value))
                return f"({inner},)" if len(value) == 1 else f"({inner})"
            case "list":
                return ", ".join(map(str, value))
            case "yesno":
                return "yes" if value else "no"
        return format(value, spec)
