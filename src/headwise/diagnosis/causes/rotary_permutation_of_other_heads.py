"""Rotated rows permuted for another number of heads."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class RotaryPermutationHeadsCause(MovedProjectionsCause):
    """Rows of queries or keys are permuted as if there were another number of heads."""

    name: ClassVar[str] = "rotary permutation with a wrong number of heads"
    symptom: ClassVar[str] = "A converted model with grouped-query attention gives gibberish"
    cost: ClassVar[float] = 1.02
