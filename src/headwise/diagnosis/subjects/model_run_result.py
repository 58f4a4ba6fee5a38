"""A run of a whole model, with the stages of each attention in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

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
        roundings: the relative difference that a run in float32 makes in each stage.
        window: the number of keys in its window by the config; None for none.
        dropout: of its weights as the model was given: 0 in eval mode, None where not known.
    """

    name: str
    call: RecordedCall
    model: AttentionModel | None = None
    input_rounding: float = 0.0
    stored: torch.dtype = torch.float64
    roundings: Mapping[str, float] = field(default_factory=dict)
    window: int | None = None
    dropout: float | None = None

    def float32_rounding_of_stage(self, stage: str) -> float:
        """Return the relative difference that a run in float32 makes in a stage."""
        return self.roundings.get(stage, 0.0)


@dataclass(frozen=True, eq=False)
class ModelRun:
    """A run of a model.

    Attributes:
        kind: the class of the model.
        layers: its attentions, in the order of the run.
        outputs: the tensors of the model's result by name; None where its layers run apart.
        inputs: what the model was given, in words.
        output_roundings: the relative difference that a run in float32 makes in each output.
    """

    kind: str
    layers: Sequence[LayerRun]
    outputs: Mapping[str, Tensor] | None
    inputs: str
    output_roundings: Mapping[str, float] = field(default_factory=dict)

    def float32_rounding_of_output(self, name: str) -> float:
        """Return the relative difference that a run in float32 makes in an output."""
        return self.output_roundings.get(name, 0.0)


def relative_difference_norm(first: Tensor, second: Tensor) -> float:
    """Return the norm of a difference by the norm of the second; infinity for other shapes.

    Two NaNs are equal, and so are two infinities; one beside a number makes the gap infinite.
    """
    if first.shape != second.shape:
        return torch.inf
    first, second = first.double(), second.double()
    equal = (first == second) | (first.isnan() & second.isnan())
    apart = (first - second).masked_fill(equal, 0.0)
    if not apart.isfinite().all():
        return torch.inf
    size = second.masked_fill(~second.isfinite(), 0.0).norm()
    return float(apart.norm() / size.clamp_min(torch.finfo(torch.float64).tiny))


def exceeds_rounding(gap: float, *roundings: float) -> bool:
    """True if two differ by more than a run in float32 moves them; ``roundings`` has both.

    A rounding is infinite where a number of the float64 run is NaN or infinite in float32. Where
    this is so in one of the two alone, they differ.
    """
    finite = [rounding for rounding in roundings if isfinite(rounding)]
    return 0 < len(finite) < len(roundings) or gap > max(finite, default=torch.inf)
