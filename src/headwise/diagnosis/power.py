"""Tests of the check itself: whether these inputs could show a difference at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headwise.diagnosis.simulation.attention_model import AttentionModel
from headwise.diagnosis.simulation.gaps import difference
from headwise.diagnosis.simulation.stage_rounding import allowed
from headwise.diagnosis.simulation.stages import RecordedCall

ANOTHER_SCALE = 0.7  # of the scores: a head's share that most faults exceed
ONE = 1 - 1e-6  # a weight that leaves nothing to the other keys


def blind_spot(model: AttentionModel, calls: Sequence[RecordedCall], unit: torch.dtype) -> str:
    """Return the reason why other scores would not change what was compared; "" if they would.

    The model is run with its scores multiplied by 0.7. Where that moves neither the weights, if
    they were recorded, nor else the output by more than rounding, equality says nothing about
    scores.
    """
    bare = [replace(call, stages={}, dtype=unit) for call in calls]
    other = model.with_settings(scale=ANOTHER_SCALE * model.settings.scale)
    stage = "weights" if "weights" in calls[0].stages else "output"
    if any(_moves(model, other, call, stage) for call in bare):
        return ""
    keys = max(call.inputs.key_source.shape[1] for call in calls)
    if keys == 1:
        return "one key: its weight is 1 whatever the scores are"
    runs = [model.run(call) for call in bare]
    if all(not bool(run["v"].any()) for run in runs):
        return "zero values: no weight changes the output"
    if all(bool((run["weights"].amax(-1) > ONE).all()) for run in runs):
        return "saturated: each query gives all its weight to one key"
    if all(_equal_tokens(run["v"]) for run in runs):
        return "equal tokens: all values are equal, so weights change nothing"
    return "another scale of the scores does not change the output on these inputs"


def _equal_tokens(v: torch.Tensor) -> bool:
    apart = (v - v[:, :, :1]).abs().amax()
    return bool(apart <= torch.finfo(torch.float32).eps * v.abs().amax())


def _moves(model: AttentionModel, other: AttentionModel, call: RecordedCall, stage: str) -> bool:
    first, second = model.predict(stage, call), other.predict(stage, call)
    return bool((difference(first, second) > allowed(model, call, stage)).any())
