"""Questions about attention heads as data: measurement, facts to check, answer text and picture.

Text and pictures are made from the measured numbers alone. Every number they show is therefore in
the JSON, and an answer can be written and drawn again from the JSON.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.study.drawing import Figure
from headwise.support.progress import Progress

Numbers = Mapping[str, Any]  # bool, int, float, str, and lists and dicts of them

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_FIGURE = re.compile(r"[-−+]?[\d(]|[-–]?$")  # a number, a shape, or nothing

SIGNIFICANT = 6  # digits: more is noise, and would triple the JSON


@dataclass(frozen=True)
class Fact:
    """A statement that must be true of the numbers for the claim to hold.

    Attributes:
        sentence: the fact in a sentence, as a template over the numbers.
        holds: True if the numbers confirm the fact.
    """

    sentence: str
    holds: Callable[[Numbers], bool]


@dataclass(frozen=True)
class FactTable:
    """A table whose cells are templates over the numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Question:
    """A question that people ask, and the experiment that answers it.

    Attributes:
        id: the name on the command line and in the JSON: the file's name, with hyphens.
        asks: the question, in the words of the people who ask it.
        claim: the statement that the experiment tests.
        measure: runs the experiment. It may use torch's global random numbers: `answer_question`
            seeds them before the call and restores them afterwards.
        facts: the statements that the numbers must confirm.
        verdict: the answer, as a template over the numbers; shown if all facts hold.
        why: the reason in a few sentences, as a template.
        caption: how to read the picture, as a template; also its text for screen readers.
        draw: draws the picture from the numbers.
        table: the figures beside the picture.
        varies: keys of numbers that differ between machines: times and rounding errors.
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
    """A question and its measured numbers."""

    question: Question
    numbers: Numbers

    @property
    def facts(self) -> tuple[tuple[bool, str], ...]:
        """For each fact, True if it holds, and its sentence with the numbers."""
        return tuple((f.holds(self.numbers), self.fill(f.sentence)) for f in self.question.facts)

    @property
    def holds(self) -> bool:
        """True if every fact, and so the claim, holds."""
        return all(holds for holds, _ in self.facts)

    @property
    def verdict(self) -> str:
        """The answer; if a fact does not hold, the list of facts that failed."""
        if self.holds:
            return self.fill(self.question.verdict)
        failed = "; ".join(sentence for holds, sentence in self.facts if not holds)
        return f"The experiment did not confirm the claim. These facts do not hold: {failed}."

    @property
    def short_verdict(self) -> str:
        """The first sentence of the answer, for lists of questions."""
        return re.split(r"(?<=\.)\s+(?=[A-Z])", self.verdict, maxsplit=1)[0]

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The rows of the table with their numbers; empty if there is no table."""
        table = self.question.table
        return tuple(tuple(map(self.fill, row)) for row in table.rows) if table else ()

    @property
    def numeric_columns(self) -> tuple[bool, ...]:
        """For each column of the table, True if it holds figures and is aligned right."""
        return tuple(
            count > 0 and all(_FIGURE.match(cell) for cell in column)
            for count, column in enumerate(zip(*self.rows, strict=True))
        )

    def fill(self, template: str) -> str:
        """Fill a template with this answer's numbers."""
        return fill_template(template, self.numbers)

    def as_json(self) -> dict[str, Any]:
        """Return the answer as plain dicts, lists, strings and numbers, for ``--json``."""
        return {
            "id": self.question.id,
            "claim": self.question.claim,
            "holds": self.holds,
            "verdict": self.verdict,
            "numbers": dict(self.numbers),
        }


def round_numbers_for_json(value: Any) -> Any:
    """Convert measured values to JSON's types, with floats to six significant digits.

    Raises:
        TypeError: JSON has no such value (a tensor, for instance).
        ValueError: a number is not finite.
    """
    match value:
        case bool() | int() | str():
            return value
        case float():
            if not math.isfinite(value):
                raise ValueError(f"a measured number is {value}")
            return float(f"{value:.{SIGNIFICANT}g}")
        case Mapping():
            return {str(key): round_numbers_for_json(inner) for key, inner in value.items()}
        case Sequence():
            return [round_numbers_for_json(inner) for inner in value]
    raise TypeError(f"a measured number is a {type(value).__name__}")


# ---- sentences with measured numbers in them ----------------------------------------------------


def fill_template(template: str, numbers: Mapping[str, Any]) -> str:
    """Replace ``{key}``, ``{key[inner]}`` and ``{key[0]}`` by the numbers.

    The format after a colon is one of Python's, or ``sci`` (1.9 × 10⁻⁶), ``percent`` (34 %; 1.2 %
    below 10 %), ``shape`` ((2, 12, 256)), ``list`` (1, 2, 4) or ``yesno``.
    """
    return _Template().vformat(template, (), numbers)


def format_scientific(value: float) -> str:
    """Return ``1.9 × 10⁻⁶`` with no-break spaces, or ``0`` for 0."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}\u00a0×\u00a010{str(int(exponent)).translate(_SUPERSCRIPTS)}"


class _Template(string.Formatter):
    def get_field(  # string.Formatter takes [8] as an index; a dict from JSON has the key "8"
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
                return format_scientific(float(value))
            case "percent":
                small = 0 < abs(value) < 0.1
                return f"{100 * value:{'.2g' if small else '.0f'}}\u00a0%"
            case "shape":
                inner = ", ".join(map(str, value))
                return f"({inner},)" if len(value) == 1 else f"({inner})"
            case "list":
                return ", ".join(map(str, value))
            case "yesno":
                return "yes" if value else "no"
        return format(value, spec)
