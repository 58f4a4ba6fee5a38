"""Positions of queries and keys are off by a constant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from headwise.diagnosis.causes.cause import Cause, Evidence, Family, Variant

MOST = 64


class RotaryPositionOffsetCause(Cause):
    """Positions of queries and keys are off by a constant."""

    name: ClassVar[str] = "rotary position offset"
    symptom: ClassVar[str] = (
        "Positions start at another number, and q and k differ from the original"
    )
    stages: ClassVar[tuple[str, ...]] = ("q after rotary", "k after rotary")

    def variants(self, evidence: Evidence) -> Iterator[Variant | Family]:
        """Return offsets up to MOST tokens."""
        if evidence.model.settings.rotary is None:
            return
        for offset in range(-MOST, MOST + 1):
            if offset:
                model = evidence.model.with_rotary(q_offset=offset, k_offset=offset)
                repair = f"positions that are {abs(offset)} {'smaller' if offset > 0 else 'larger'}"
                yield Variant(model, {"offset": offset}, repair)
