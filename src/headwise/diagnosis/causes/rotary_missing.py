"""Queries and keys are not rotated, or are rotated where they should not be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class RotaryMissingCause(Cause):
    """Queries and keys are not rotated, or are rotated where they should not be."""

    name: ClassVar[str] = "rotary missing"
    symptom: ClassVar[str] = "The first token is right and all others are wrong"
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")
    cost: ClassVar[float] = 0.9

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the model without its rotation."""
        if evidence.model.settings.rotary is not None:
            model = evidence.model.with_settings(rotary=None)
            yield Variant(model, {}, "rotate q and k: Rotary(...)")
