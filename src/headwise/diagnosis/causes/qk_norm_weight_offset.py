"""The weight of the norm is used as w in place of 1 + w, or the reverse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class QKNormWeightOffsetCause(Cause):
    """The weight of the norm is used as w in place of 1 + w, or the reverse.

    Gemma stores what is added to 1. A port that multiplies by the stored weight makes queries and
    keys much too small.

    Wrong:
        normed * weight

    Right:
        normed * (1 + weight)

    Repair:
        Add 1 to the weights once, in the code or in the file: `QKNorm(one_plus=True)`.

    Confused with:
        scale: if all weights of the norm are equal.
        factor: likewise, in q or in k alone.
    """

    name: ClassVar[str] = "qk-norm weight offset"
    symptom: ClassVar[str] = "Gemma's norm weights are used as w in place of 1 + w"
    stages: ClassVar[tuple[str, ...]] = (
        "q after norm",
        "k after norm",
        "q after rotary",
        "k after rotary",
    )

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the other convention."""
        norm = evidence.model.settings.norm
        if norm is not None:
            offset = 0.0 if norm.weight_offset else 1.0
            model = evidence.model.with_settings(norm=replace(norm, weight_offset=offset))
            right = "1 + w" if norm.weight_offset else "w"
            yield Variant(model, {"offset": offset}, f"multiply by {right}, w the stored weight")
