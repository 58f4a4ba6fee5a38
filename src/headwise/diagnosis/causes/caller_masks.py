"""Scores under another mask than the caller's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from headwise.diagnosis.causes.cause import Evidence
from headwise.diagnosis.simulation.attention_model import (
    AttentionModel,
    Forced,
    StageFunction,
    score,
)


def has_masks(evidence: Evidence) -> bool:
    """True if a call has a mask of the caller."""
    return any(call.inputs.mask is not None for call in evidence.calls)


def model_with_mask(
    evidence: Evidence, change: Callable[[Tensor], Tensor | None], *, only_later: bool = False
) -> AttentionModel:
    """Return the model under a changed mask; in calls with earlier keys alone if ``only_later``."""
    return evidence.model.with_stage("scores", _scores(change, only_later))


def _scores(change: Callable[[Tensor], Tensor | None], only_later: bool) -> StageFunction:
    def scores(forced: Forced) -> Tensor:
        inputs = forced.call.inputs
        if inputs.mask is None or (only_later and not forced.call.earlier):
            return forced.usual()
        other = replace(forced.call, inputs=replace(inputs, mask=change(inputs.mask)))
        return score(replace(forced, call=other))

    return scores
