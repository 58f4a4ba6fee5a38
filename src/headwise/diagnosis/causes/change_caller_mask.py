"""Scores under another mask than the caller's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from headwise.diagnosis.causes.cause import Evidence
from headwise.diagnosis.simulation.attention_model import AttentionModel, ForcedStage

MaskChange = Callable[[Tensor], Tensor | None]


def has_masks(evidence: Evidence) -> bool:
    """True if a call has a mask of the caller."""
    return any(call.inputs.mask is not None for call in evidence.calls)


def change_mask_of_model(evidence: Evidence, change: MaskChange) -> AttentionModel:
    """Return the model under a changed mask."""
    return evidence.model.with_stage_function("scores", partial(_scores_with_mask, change))


def _scores_with_mask(change: MaskChange, forced: ForcedStage) -> Tensor:
    return change_mask(change, forced).usual_result()


def change_mask(change: MaskChange, forced: ForcedStage) -> ForcedStage:
    """Return the stage under a changed mask."""
    inputs = forced.call.inputs
    if inputs.mask is None:
        return forced
    other = replace(inputs, mask=change(inputs.mask))
    return replace(forced, call=replace(forced.call, inputs=other))
