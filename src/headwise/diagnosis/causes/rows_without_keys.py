"""A row whose keys are all hidden has NaN, equal weights or zeros."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import ForcedStage


class RowsWithoutKeysCause(Cause):
    """A row whose keys are all hidden has NaN, equal weights or zeros.

    A softmax over -inf alone is NaN. With a finite number in its place, such as -1e9, it is the
    mean of all hidden keys.

    Wrong:
        scores.softmax(-1)

    Right:
        scores.softmax(-1).nan_to_num(0.0)

    Repair:
        Give such rows zeros, or never read them.

    Confused with:
        padding ignored: equal weights look like attention without a mask if all scores are equal.
    """

    name: ClassVar[str] = "rows without keys"
    symptom: ClassVar[str] = "Outputs are NaN for padded rows: a query whose keys are all masked"
    stages: ClassVar[tuple[str, ...]] = ("weights",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return NaN, and equal weights over all keys."""
        if any(
            bool(_find_empty_rows(evidence.model.predict_stage("scores", call)).any())
            for call in evidence.calls
        ):
            for words, value in (("NaN", math.nan), ("equal weights", None), ("weights of 1", 1.0)):
                model = evidence.model.with_stage_function(
                    "weights", partial(_fill_empty_rows, value)
                )
                yield Variant(model, {"row": words}, "give such rows zeros")


def _find_empty_rows(scores: Tensor) -> Tensor:
    return (scores == -math.inf).all(-1, keepdim=True)


def _fill_empty_rows(value: float | None, forced: ForcedStage) -> Tensor:
    scores = forced["scores"]
    other = 1 / scores.shape[-1] if value is None else value
    return torch.where(_find_empty_rows(scores), other, forced.usual_result())
