"""Scores under another mask than the caller's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from headwise.diagnosis.causes.cause import Evidence
from headwise.diagnosis.simulation.attention_model import AttentionModel, Forced

MaskChange = Callable[[Tensor], Tensor | None]


def has_masks(evidence: Evidence) -> bool:
    """True if a call has a mask of the caller."""
    return any(call.inputs.mask is not None for call in evidence.calls)


def model_with_mask(evidence: Evidence, change: MaskChange) -> AttentionModel:
    """Return the model under a changed mask."""
    return evidence.model.with_stage("scores", partial(_scores, change))


def _scores(change: MaskChange, forced: Forced) -> Tensor:
    return with_mask(change, forced).usual()


def with_mask(change: MaskChange, forced: Forced) -> Forced:
    """Return the stage under a changed mask."""
    inputs = forced.call.inputs
    if inputs.mask is None:
        return forced
    other = replace(inputs, mask=change(inputs.mask))
    return replace(forced, call=replace(forced.call, inputs=other))
