"""Rotated rows permuted once too often."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class RotaryPermutationDoubledCause(MovedProjectionsCause):
    """Rows of queries or keys are permuted to another pairing though they had it."""

    name: ClassVar[str] = "rotary permutation doubled"
    symptom: ClassVar[str] = (
        "A checkpoint that was converted already gives gibberish after conversion"
    )
    cost: ClassVar[float] = 1.01
