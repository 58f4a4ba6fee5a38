"""Other channels turn together: i with i + width / 2, or 2i with 2i + 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant
from headwise.diagnosis.simulation.settings import Pairing


class RotaryPairingCause(Cause):
    """Other channels turn together: i with i + width / 2, or 2i with 2i + 1."""

    name: ClassVar[str] = "rotary pairing"
    symptom: ClassVar[str] = "A converted model writes fluent nonsense, and every shape fits"
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return the other convention."""
        rotary = evidence.model.settings.rotary
        if rotary is None:
            return
        other: Pairing = "interleaved" if rotary.pairing == "half-split" else "half-split"
        model = evidence.model.with_rotary(pairing=other, span=None)
        yield Variant(model, {"pairing": other}, f'Rotary(pairing="{rotary.pairing}")')
