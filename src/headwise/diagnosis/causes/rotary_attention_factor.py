"""Rotated channels are multiplied by another factor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class RotaryAttentionFactorCause(Cause):
    """Rotated channels are multiplied by another factor.

    YaRN multiplies the cosines and sines by 0.1 ln(factor) + 1, which makes long contexts sharper.
    Both q and k have the factor, so scores have its square.

    Wrong:
        cos, sin = angles.cos(), angles.sin()

    Right:
        cos, sin = factor * angles.cos(), factor * angles.sin()

    Repair:
        Set the factor that is reported: `YarnScaling(..., attention_factor=...)`.

    Confused with:
        scale: if all channels turn, the square of the factor is a factor of the scores.
    """

    name: ClassVar[str] = "rotary attention factor"
    symptom: ClassVar[str] = (
        "A model with YaRN is too flat or too sharp at every length: wrong attention factor"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the family of all factors."""
        rotary = evidence.model.settings.rotary
        if rotary is None:
            return
        right = rotary.amplitude

        def make(factor: float) -> Variant:
            model = evidence.model.with_rotary(attention_factor=factor)
            return Variant(model, {"attention factor": factor}, f"attention_factor={right:.6g}")

        yield Family(make, (0.25 * right, 0.5 * right, right, 2 * right, 4 * right), is_log=True)
