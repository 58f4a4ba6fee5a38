"""Queries are scaled before a function that scales the scores once more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class ScaleTwiceCause(Cause):
    """Queries are scaled before a function that scales the scores once more."""

    name: ClassVar[str] = "scale twice"
    symptom: ClassVar[str] = (
        "Attention is far too flat after a port to scaled_dot_product_attention"
    )
    stages: ClassVar[tuple[str, ...]] = ("scores",)
    cost: ClassVar[float] = 0.8

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the square of the scale."""
        right = evidence.model.settings.scale
        if right != 1.0:
            model = evidence.model.with_settings(scale=right**2)
            yield Variant(model, {"scale": right**2}, "scale q or the scores, not both")
