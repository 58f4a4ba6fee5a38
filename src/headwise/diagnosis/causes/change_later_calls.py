"""Models that differ in calls with earlier keys alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from headwise.diagnosis.causes.cause import Evidence
from headwise.diagnosis.simulation.attention_model import AttentionModel, ForcedStage
from headwise.diagnosis.simulation.stages import RecordedCall


def has_later_calls(evidence: Evidence) -> bool:
    """True if a call has keys of earlier calls."""
    return any(call.earlier for call in evidence.calls)


def change_model_in_later_calls(
    evidence: Evidence, stages: Sequence[str], change: Callable[[ForcedStage], ForcedStage]
) -> AttentionModel:
    """Return the model with stages that are changed in calls with earlier keys."""
    model = evidence.model
    for stage in stages:
        model = model.with_stage_function(stage, partial(_stage_result_in_later_calls, change))
    return model


def _stage_result_in_later_calls(
    change: Callable[[ForcedStage], ForcedStage], forced: ForcedStage
) -> Tensor:
    return change(forced).usual_result() if forced.call.earlier else forced.usual_result()


def change_call_positions(
    call: RecordedCall, position: Callable[[RecordedCall], Tensor | None]
) -> RecordedCall:
    """Return the call with other positions, also in those of its earlier calls that are later."""
    if not call.earlier:
        return call
    return replace(
        call,
        inputs=replace(call.inputs, positions=position(call)),
        earlier=tuple(change_call_positions(each, position) for each in call.earlier),
    )
