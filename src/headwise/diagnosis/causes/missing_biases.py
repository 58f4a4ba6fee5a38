"""Biases that are missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.causes.projection_moves import STAGE_OF


class MissingBiasesCause(Cause):
    """Projections lack their biases, or the biases are zero."""

    name: ClassVar[str] = "bias missing"
    symptom: ClassVar[str] = "Outputs are off by a constant; the checkpoint has biases"
    stages: ClassVar[tuple[str, ...]] = ("q", "k", "v", "output")
    cost: ClassVar[float] = 1.0

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the models without the biases of the stages that parted, all and each."""
        parted = {
            f"b{role}": stage
            for role, stage in STAGE_OF.items()
            if evidence.parted(stage) and f"b{role}" in evidence.model.weights
        }
        for names in dict.fromkeys((tuple(parted), *((name,) for name in parted))):
            if names:
                model = evidence.model.with_weights(**dict.fromkeys(names))
                roles = "".join(name[1:] for name in names)
                yield Variant(model, {"roles": roles}, f"load the biases {', '.join(names)}")
