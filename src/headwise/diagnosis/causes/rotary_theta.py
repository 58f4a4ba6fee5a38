"""Another base of the rotary frequencies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant


class RotaryThetaCause(Cause):
    """The rotary frequencies have another base."""

    name: ClassVar[str] = "rotary theta"
    symptom: ClassVar[str] = (
        "Short prompts are fine; answers degrade with the length of the context"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the family of all bases from 10 to 10 million."""
        rotary = evidence.model.settings.rotary
        if rotary is None:
            return
        right = rotary.theta

        def make(theta: float) -> Variant:
            model = evidence.model.with_rotary(theta=theta)
            return Variant(model, {"theta": theta}, f"Rotary(theta={right:g})")

        yield Family(make, tuple(10.0 ** (n / 4) for n in range(4, 32)), is_log=True)
