"""Rotated channels are multiplied by another factor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class RotaryAttentionFactorCause(Cause):
    """Rotated channels are multiplied by another factor."""

    name: ClassVar[str] = "rotary attention factor"
    symptom: ClassVar[str] = "A model with YaRN is a little too flat or too sharp at every length"
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
