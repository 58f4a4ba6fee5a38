"""A run of a whole model, with the stages of each attention in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.diagnosis.simulation.attention_model import AttentionModel
from headwise.diagnosis.simulation.stages import RecordedCall


@dataclass(frozen=True, eq=False)
class LayerRun:
    """One attention of a model in a run.

    Attributes:
        name: of its module in the model.
        call: the recorded stages.
        model: the attention as data; None where its weights or settings cannot be read.
        input_rounding: the relative difference that a run in float32 makes at its input.
        stored: dtype of the weights.
    """

    name: str
    call: RecordedCall
    model: AttentionModel | None = None
    input_rounding: float = 0.0
    stored: torch.dtype = torch.float64


@dataclass(frozen=True, eq=False)
class ModelRun:
    """A run of a model.

    Attributes:
        kind: the class of the model.
        layers: its attentions, in the order of the run.
        output: the result of the model; None where its layers run apart.
        inputs: what the model was given, in words.
        output_rounding: the relative difference that a run in float32 makes in the output.
    """

    kind: str
    layers: Sequence[LayerRun]
    output: Tensor | None
    inputs: str
    output_rounding: float = 0.0


def relative_gap(first: Tensor, second: Tensor) -> float:
    """Return the norm of a difference by the norm of the second; infinity for other shapes."""
    if first.shape != second.shape:
        return torch.inf
    size = second.double().norm().clamp_min(torch.finfo(torch.float64).tiny)
    return float((first.double() - second.double()).norm() / size)
