"""Models that differ in calls with earlier keys alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from headwise.diagnosis.causes.cause import Evidence
from headwise.diagnosis.simulation.attention_model import AttentionModel, Forced
from headwise.diagnosis.simulation.stages import RecordedCall


def has_later_calls(evidence: Evidence) -> bool:
    """True if a call has keys of earlier calls."""
    return any(call.earlier for call in evidence.calls)


def model_with_later_calls(
    evidence: Evidence, stages: Sequence[str], change: Callable[[Forced], Forced]
) -> AttentionModel:
    """Return the model with stages that are changed in calls with earlier keys."""
    model = evidence.model
    for stage in stages:
        model = model.with_stage(stage, partial(_changed, change))
    return model


def _changed(change: Callable[[Forced], Forced], forced: Forced) -> Tensor:
    return change(forced).usual() if forced.call.earlier else forced.usual()


def with_positions(
    call: RecordedCall, position: Callable[[RecordedCall], Tensor | None]
) -> RecordedCall:
    """Return the call with other positions, also in those of its earlier calls that are later."""
    if not call.earlier:
        return call
    return replace(
        call,
        inputs=replace(call.inputs, positions=position(call)),
        earlier=tuple(with_positions(each, position) for each in call.earlier),
    )
