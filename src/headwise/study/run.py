"""The study: every question asked, one after the other."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from headwise.errors import MissingExtraError, OptionError
from headwise.study import trained_encoder
from headwise.study.question import Answer, Question, as_numbers
from headwise.study.trained_encoder import Fallback
from headwise.support.progress import Progress, no_progress

# In the order in which they build on each other.
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
WHOLE = 100  # what one question counts on the progress bar


@dataclass(frozen=True)
class LeftOut:
    """A question that could not be asked here, why, and what to do."""

    id: str
    asks: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Study:
    """The answers, what was left out, and where this was measured.

    ``fallback`` is None where the trained encoder was read, or none was needed.
    """

    answers: tuple[Answer, ...]
    left_out: tuple[LeftOut, ...]
    setting: Mapping[str, str | int]
    fallback: Fallback | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; its keys are stable."""
        return {
            "questions": [answer.as_json() for answer in self.answers],
            "left_out": [asdict(left) for left in self.left_out],
            "setting": dict(self.setting),
            "fallback": asdict(self.fallback) if self.fallback else None,
        }


def load(question: str) -> Question:
    """The question of an id, from its file."""
    module = importlib.import_module(f"headwise.study.questions.{question.replace('-', '_')}")
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


def study(ids: Sequence[str] = (), *, progress: Progress = no_progress) -> Study:
    """Ask the questions of these ids, or all.

    Args:
        ids: questions of the catalogue.
        progress: told (what is going on, steps done, steps in all).

    Raises:
        OptionError: an id is not in the catalogue.
        MissingExtraError: a question that was named needs a package that is not installed. Where
            none is named, such a question is left out.
    """
    names = chosen(ids)
    answers, left_out = [], []
    for count, name in enumerate(names):

        def part(stage: str, done: int, total: int, *, count: int = count) -> None:
            progress(stage, WHOLE * count + WHOLE * done // total, WHOLE * len(names))

        part(name, 0, 1)
        question = load(name)
        try:
            answers.append(ask(question, progress=part))
        except MissingExtraError as missing:
            if ids:
                raise
            left_out.append(LeftOut(name, question.asks, missing.saw, missing.do))
    progress("done", WHOLE * len(names), WHOLE * len(names))
    return Study(tuple(answers), tuple(left_out), setting(), trained_encoder.fallback())


def ask(question: Question, *, progress: Progress = no_progress) -> Answer:
    """Measure, with random numbers that are the same every time and nobody else's."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        return Answer(question, as_numbers(question.measure(progress)))


def setting() -> dict[str, str | int]:
    """What times and roundings depend on."""
    return {
        "headwise": metadata.version("headwise"),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
    }
