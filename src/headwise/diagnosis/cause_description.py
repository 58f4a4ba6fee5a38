"""Description of a cause, for its page and for reports: the sections of its docstring."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from headwise.diagnosis.causes.cause import Cause

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
