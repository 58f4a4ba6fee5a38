"""Weights are dropped at random, and the others multiplied by 1 / (1 - p)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import ForcedStage


class DropoutLeftOnCause(Cause):
    """Weights are dropped at random, and the others multiplied by 1 / (1 - p).

    `scaled_dot_product_attention` drops weights whenever `dropout_p` is positive, after `eval()` as
    well.

    Wrong:
        F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)

    Right:
        F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)

    Repair:
        Call `eval()` before the comparison, and pass `dropout_p=0.0` outside of training.
    """

    name: ClassVar[str] = "dropout left on"
    symptom: ClassVar[str] = (
        "Two runs on the same input differ, because attention dropout is still on"
    )
    stages: ClassVar[tuple[str, ...]] = ("weights",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the recorded zeros with the factor of the weights that are left."""
        kept: dict[object, Tensor] = {}
        factors = []
        for call in evidence.calls:
            actual = call.stages.get("weights")
            usual = evidence.model.predict_stage("weights", call)
            if actual is None or actual.shape != usual.shape:
                return
            kept[call.key] = actual != 0
            ratio = (actual / usual)[(actual != 0) & (usual > 0)]
            factors.append(ratio)
        factor = float(torch.cat(factors).median()) if factors else 1.0
        if factor > 1.0 + 1e-6:
            rate = round(1 - 1 / factor, 12)
            model = evidence.model.with_stage_function(
                "weights", partial(_apply_recorded_dropout, kept, factor)
            )
            yield Variant(model, {"p": rate}, "call eval() before the comparison")


def _apply_recorded_dropout(
    kept: dict[object, Tensor], factor: float, forced: ForcedStage
) -> Tensor:
    usual = forced.usual_result()
    left = kept.get(forced.call.key)
    if left is None or left.shape != usual.shape:
        return usual
    return torch.where(left, factor * usual, 0.0)
