"""Judging of a diagnosis by the right answers of its case."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

import headwise
from benchmarks.field import formulas, references
from benchmarks.field.case import FieldCase
from benchmarks.field.truth import PROPOSED, Truth
from headwise.errors import HeadwiseError
from headwise.identify import Diagnosis, Verdict
from headwise.identify.catalogue import CAUSES

WHERE_RIGHT = {"same": "same", "unknown": "unknown"}


@dataclass(frozen=True)
class Score:
    """What was said of one case.

    Attributes:
        case: of which.
        answer: "right", "wrong" (a cause that is none of the right ones), "part" (of a pair: one of
            the two, and no wrong one), "unknown", "same", "inconclusive" or "refused".
        named: the causes that were named, each with those that look the same, or the refusal.
        seconds: of processor time.
    """

    case: FieldCase
    answer: str
    named: tuple[str, ...]
    seconds: float

    @property
    def is_right(self) -> bool:
        """True for the right answer: every cause of a fault, or that there is none."""
        return self.answer == WHERE_RIGHT.get(self.case.kind, "right")


def score(case: FieldCase, truth: Truth | None) -> Score:
    """Run a case, and judge what is said of it; ``truth`` is that of a single or a pair."""
    module = case.module()
    weights = formulas.draw_weights(module.SETTINGS)
    layer = references.layer(module.SETTINGS, weights)
    narrow = {name: w.astype("float32") for name, w in weights.items()}
    is_numpy = getattr(module, "NUMPY", False)
    given = narrow if is_numpy else {name: torch.from_numpy(w) for name, w in narrow.items()}
    with torch.no_grad():
        port = module.make(given)
    start = time.process_time()
    try:
        diagnosis = headwise.compare(port, layer)
    except HeadwiseError as error:
        return Score(case, "refused", (str(error.saw),), time.process_time() - start)
    seconds = time.process_time() - start
    answer, named = _judge(diagnosis, truth)
    return Score(case, answer, named, seconds)


def score_job(job: tuple[FieldCase, Truth | None]) -> Score:
    """Score a case in a process beside others."""
    return score(*job)


# Truths have the name of a cause's row for both directions of a fault.
ROWS = {cause.unexpected: cause.name for cause in CAUSES if cause.unexpected}


def _judge(diagnosis: Diagnosis, truth: Truth | None) -> tuple[str, tuple[str, ...]]:
    if diagnosis.verdict.is_same:
        return "same", ()
    if diagnosis.verdict is Verdict.INCONCLUSIVE:
        return "inconclusive", ()
    causes = [] if diagnosis.function is None else list(diagnosis.function.causes)
    named = tuple(cause.name_with_equals for cause in causes)
    if not causes:
        return "unknown", ()
    if truth is None:
        return "wrong", named
    said = [{ROWS.get(n, n) for n in (cause.name, *cause.equals)} for cause in causes]
    # Each fault takes a cause that names it; a cause that is left over is wrong.
    # A cause may be in the catalogue now under the name that was proposed for it.
    left = [{name.removeprefix(PROPOSED) for name in fault} for fault in truth.causes]
    for names in said:
        match = next((fault for fault in left if names.intersection(fault)), None)
        if match is None:
            return "wrong", named
        left.remove(match)
    return ("part" if left else "right"), named


def interval(right: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share (E. B. Wilson, 1927)."""
    if not count:
        return 0.0, 1.0
    z, share = 1.96, right / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return (middle - spread) / scale, (middle + spread) / scale
