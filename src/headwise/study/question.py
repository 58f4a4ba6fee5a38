"""Questions about attention heads as data: measurement, facts to check, answer text and picture.

Text and pictures are made from the measured numbers alone. Every number they show is therefore in
the JSON, and an answer can be written and drawn again from the JSON.
"""

from __future__ import annotations

import importlib
import math
import platform
import re
import string
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headwise.errors import MissingExtraError, OptionError
from headwise.study import encoder
from headwise.support.progress import Progress as Progress
from headwise.support.progress import no_progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:  # matplotlib is optional
    Figure = Any

Numbers = Mapping[str, Any]  # bool, int, float, str, and lists and dicts of them

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_FIGURE = re.compile(r"[-−+]?[\d(]|[-–]?$")  # a number, a shape, or nothing

SIGNIFICANT = 6  # digits: more is noise, and would triple the JSON
# In the order in which they build on each other.
IDS = (
    "diagram",
    "when-split",
    "parameters",
    "packing",
    "must-divide",
    "same-function",
    "weights-of-one",
    "gradients",
    "learning",
    "implementations",
    "quantised",
    "axis-order",
)
STEPS_PER_QUESTION = 100  # on the progress bar


@dataclass(frozen=True)
class Question:
    """A question that people ask, and the experiment that answers it: NAME.py with NAME.md.

    The texts are templates over the numbers. `answer_question` seeds torch's random numbers before
    ``measure`` and restores them afterwards.
    """

    id: str  # the name on the command line and in the JSON: the files' name, with hyphens
    asks: str  # the question, in the words of the people who ask it
    claim: str  # the statement that the experiment tests
    verdict: str  # the answer, shown if all facts hold
    why: str  # the reason in a few sentences
    caption: str  # how to read the picture; also its text for screen readers
    sentences: Mapping[str, str]  # the facts, which the numbers must confirm
    table: Sequence[Sequence[str]]  # a row of titles, then the others; empty without a table
    measure: Callable[[Progress], Numbers]
    facts: Callable[[Numbers], Mapping[str, bool]]  # True for each of ``sentences`` that holds
    draw: Callable[[Figure, Numbers], None]
    varies: Set[str]  # keys of numbers that differ between machines: times and rounding errors


def load_question(name: str) -> Question:
    code = importlib.import_module(f"headwise.study.questions.{name.replace('-', '_')}")
    assert code.__file__ is not None
    text = Path(code.__file__).with_suffix(".md").read_text("utf-8")
    return Question(
        id=name,
        measure=code.measure,
        facts=code.facts,
        draw=code.draw,
        varies=getattr(code, "VARIES", frozenset()),
        **read_text(text),
    )


def read_text(text: str) -> dict[str, Any]:
    """Return the parts of a question's text by the names of `Question`."""
    first, *sections = text.removeprefix("# ").split("\n## ")
    asks, claim = _paragraphs(first)
    under = dict(section.split("\n\n", 1) for section in sections)
    facts = _paragraphs(under["Facts"])[0].removeprefix("- `").split(" - `")
    rows = [line.strip("| ").split(" | ") for line in under.get("Table", "").splitlines()]
    return {
        "asks": asks,
        "claim": claim,
        **{name.lower(): _paragraphs(under[name])[0] for name in ("Verdict", "Why", "Caption")},
        "sentences": dict(fact.split("`: ", 1) for fact in facts),
        "table": rows[:1] + rows[2:],
    }


def _paragraphs(text: str) -> list[str]:
    return [part.replace("\n  ", " ").replace("\n", " ") for part in text.strip().split("\n\n")]


@dataclass(frozen=True)
class Answer:
    """A question and its measured numbers."""

    question: Question
    numbers: Numbers

    @property
    def facts(self) -> tuple[tuple[bool, str], ...]:
        """For each fact, True if it holds, and its sentence with the numbers."""
        holds, sentences = self.question.facts(self.numbers), self.question.sentences
        assert [*holds] == [*sentences]
        return tuple((holds[name], self.fill(sentence)) for name, sentence in sentences.items())

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
    def columns(self) -> tuple[tuple[str, bool], ...]:
        """The titles of the table, and True for columns of figures, which are aligned right."""
        return tuple(
            (title, count > 0 and all(_FIGURE.match(cell) for cell in column))
            for count, (title, *column) in enumerate(zip(*self._filled_table(), strict=True))
        )

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        return self._filled_table()[1:]

    def _filled_table(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(map(self.fill, row)) for row in self.question.table)

    def fill(self, template: str) -> str:
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
    """Convert measured values to JSON's types, with floats to six significant digits."""
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


# ---- runs: the experiments of all questions, or of some, in order --------------------------------


@dataclass(frozen=True)
class Study:
    """The answers, the questions left out, and the machine and versions of the measurement."""

    answers: tuple[Answer, ...]
    left_out: tuple[tuple[Question, MissingExtraError], ...]  # each with the reason and the remedy
    setting: Mapping[str, str | int]
    fallback: MissingExtraError | None = None  # the reason why the trained encoder did not run

    def as_json(self) -> dict[str, Any]:
        def explain(missing: MissingExtraError) -> dict[str, str]:
            return {"reason": missing.saw, "remedy": missing.do}

        return {
            "questions": [answer.as_json() for answer in self.answers],
            "left_out": [
                {"id": question.id, "asks": question.asks, **explain(missing)}
                for question, missing in self.left_out
            ],
            "setting": dict(self.setting),
            "fallback": explain(self.fallback) if self.fallback else None,
        }


def select_ids(ids: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the ids in the order of the catalogue, each once; all if ``ids`` is empty."""
    unknown = [name for name in ids if name not in IDS]
    if unknown:
        raise OptionError(
            saw=f"the question {unknown[0]!r}",
            needed=f"one of {', '.join(IDS)}",
            do="run headwise study --list to see every question",
        )
    return tuple(name for name in IDS if not ids or name in ids)


def answer_questions(ids: Sequence[str] = (), *, progress: Progress = no_progress) -> Study:
    names = select_ids(ids)
    answers, left_out, whole = [], [], STEPS_PER_QUESTION * len(names)
    for count, name in enumerate(names):

        def part(stage: str, done: int, total: int, *, count: int = count) -> None:
            progress(stage, STEPS_PER_QUESTION * count + STEPS_PER_QUESTION * done // total, whole)

        part(name, 0, 1)
        question = load_question(name)
        try:
            answers.append(answer_question(question, progress=part))
        except MissingExtraError as missing:
            if ids:
                raise
            left_out.append((question, missing))
    progress("done", whole, whole)
    setting: dict[str, str | int] = {
        "headwise": metadata.version("headwise"),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    return Study(tuple(answers), tuple(left_out), setting, encoder.reason_for_random_encoder())


def answer_question(question: Question, *, progress: Progress = no_progress) -> Answer:
    """Run the experiment from seed 0, and restore torch's random state afterwards."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        return Answer(question, round_numbers_for_json(question.measure(progress)))
