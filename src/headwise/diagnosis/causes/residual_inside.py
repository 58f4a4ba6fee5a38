"""One of the two adds its input to its output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.attention_model import ForcedStage


class ResidualInsideCause(Cause):
    """One of the two adds its input to its output.

    BLOOM, and many teaching examples, add the residual inside the attention module.

    Repair:
        Compare `a(x) - x`, or leave the residual to the block.

    Confused with:
        norm inside: modules with a residual often normalise as well.
    """

    name: ClassVar[str] = "residual inside"
    symptom: ClassVar[str] = (
        "The attention output is off by exactly its input: a residual is inside one module"
    )
    stages: ClassVar[tuple[str, ...]] = ("output",)

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the output plus the input."""
        if evidence.model.weights["wo"].shape[2] == evidence.model.weights["wq"].shape[2]:
            model = evidence.model.with_stage_function("output", _add_residual)
            yield Variant(model, {}, "compare without the residual: a(x) - x")


def _add_residual(forced: ForcedStage) -> Tensor:
    return forced.usual_result() + forced.call.inputs.x
