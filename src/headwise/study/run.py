"""Study runs: the experiments of all questions, or of some, in order."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from headwise.errors import MissingExtraError, OptionError
from headwise.study import encoder
from headwise.study.question import Answer, Question, load_question, round_numbers_for_json
from headwise.support.progress import Progress, no_progress

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
