"""The questions, in the order in which they build on each other."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from headwise.errors import OptionError
from headwise.studies.question import Question

IDS = (
    "picture",
    "split",
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


def load(question: str) -> Question:
    """The question of an id, from its file."""
    module = importlib.import_module(f"headwise.studies.questions.{question.replace('-', '_')}")
    found = module.QUESTION
    assert isinstance(found, Question)
    return found


def chosen(ids: Sequence[str] = ()) -> tuple[str, ...]:
    """The ids in the order of the catalogue, each once; all of them if none is named.

    Raises:
        OptionError: an id is not in the catalogue.
    """
    unknown = [name for name in ids if name not in IDS]
    if unknown:
        raise OptionError(
            saw=f"the question {unknown[0]!r}",
            needed=f"one of {', '.join(IDS)}",
            do="headwise study --list says what each of them asks",
        )
    return tuple(name for name in IDS if not ids or name in ids)
