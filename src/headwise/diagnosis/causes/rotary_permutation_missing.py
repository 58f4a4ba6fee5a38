"""Rotated rows in the order of the other pairing."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class RotaryPermutationMissingCause(MovedProjectionsCause):
    """Rows of queries or keys keep the order of the pairing that they were stored for."""

    name: ClassVar[str] = "rotary permutation missing"
    symptom: ClassVar[str] = "A converted Llama checkpoint gives gibberish, and position 0 agrees"
    cost: ClassVar[float] = 1.01
