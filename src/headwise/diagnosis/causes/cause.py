"""Base class of the causes of a difference."""

from __future__ import annotations

import inspect
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from headwise.diagnosis.moves.maps import MapName
from headwise.diagnosis.simulation.gaps import Cell, Gaps, measure_gaps
from headwise.diagnosis.simulation.model import AttentionModel
from headwise.diagnosis.simulation.stages import RecordedCall

PAGES = Path(__file__).with_name("pages")  # `python -m tools.causes_page` writes them


@dataclass(frozen=True)
class Evidence:
    """Recorded calls of the layer in doubt, and the model that it should equal.

    Attributes:
        model: the model that is believed so far.
        calls: recorded calls of the layer in doubt.
        gaps: where the two part.
    """

    model: AttentionModel
    calls: Sequence[RecordedCall]
    gaps: Gaps

    @classmethod
    def of(cls, model: AttentionModel, calls: Sequence[RecordedCall]) -> Evidence:
        """Return the evidence of calls against a model."""
        return cls(model, calls, measure_gaps(model, calls))

    def parted_calls_and_heads(self, *stages: str) -> list[Cell]:
        """Return the parted cells of these stages."""
        return [cell for cell in self.gaps.cells_beyond_rounding if cell[0] in stages]


@dataclass(frozen=True)
class Variant:
    """One way in which a cause could have changed the model.

    Attributes:
        model: the model with the fault, which predicts the layer in doubt.
        parameters: name -> value in the layer in doubt, for the report.
        repair: what makes the layer in doubt equal again.
        details: more of the same, for the report alone: they do not count as parameters.
        is_step: True if the data say that another cause of the same stage follows.
    """

    model: AttentionModel
    parameters: Mapping[str, Any] = field(default_factory=dict)
    repair: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    is_step: bool = False


@dataclass(frozen=True)
class Family:
    """Variants by one real number, which is fitted.

    Attributes:
        make: number -> variant.
        starts: numbers from which the fit starts.
        is_log: True to fit the logarithm, for positive numbers.
    """

    make: Callable[[float], Variant]
    starts: tuple[float, ...]
    is_log: bool = False


class Cause(ABC):
    """A reason why two attentions differ.

    Attributes:
        name: in a few words, as reports print it.
        symptom: what people see and search for; the title of the page about it.
        stages: the stages that it can change when those before them are given.
        cost: rank among causes that explain the same; a lower one is named first.
        is_whole: True if it is named only where it explains all of its stages that part: its
            variants say that something is nowhere, which each of these stages can refute.
        is_statistical: True if the numbers are only likely by this cause; exact ones come first.
    """

    name: ClassVar[str]
    symptom: ClassVar[str]
    stages: ClassVar[tuple[str, ...]]
    cost: ClassVar[float] = 1.0
    is_whole: ClassVar[bool] = False
    is_statistical: ClassVar[bool] = False

    @abstractmethod
    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the models that the layer in doubt would be, if this were the cause."""

    def remedy(self, name: MapName) -> str:
        """Return what makes weights right again that moved in this way."""
        return describe_undoing(name)


def describe_undoing(name: MapName) -> str:
    """Return the repair of a move of weights that no cause describes."""
    return f"undo it in {', '.join(f'w{role}' for role in name.roles)}: {name}"


WRONG, RIGHT, REPAIR, CONFUSED = SECTIONS = ("Wrong", "Right", "Repair", "Confused with")


@dataclass(frozen=True)
class CauseDescription:
    """A cause in words.

    Attributes:
        symptom: what people see.
        meaning: the first sentence about the cause.
        details: the paragraphs after it.
        sections: name of `SECTIONS` -> its text, for those that the docstring has.
    """

    symptom: str
    meaning: str
    details: str
    sections: Mapping[str, str]


def describe_cause(cause: Cause) -> CauseDescription:
    """Return the docstring of a cause, split into its sections."""
    headings = "|".join(SECTIONS)
    text, *rest = re.split(rf"^({headings}):\n", inspect.getdoc(type(cause)) or "", flags=re.M)
    bodies = (textwrap.dedent(body).strip("\n") for body in rest[1::2])
    meaning, _, details = text.strip().partition("\n\n")
    return CauseDescription(
        cause.symptom, meaning, details, dict(zip(rest[::2], bodies, strict=True))
    )


def cause_page_path(cause: str) -> str:
    """Return the path of the page about a cause: ``.../rotary-theta.md`` in this package."""
    words = re.findall("[a-z0-9]+", cause.lower().replace("'", ""))
    return str(PAGES / f"{'-'.join(words)}.md")
