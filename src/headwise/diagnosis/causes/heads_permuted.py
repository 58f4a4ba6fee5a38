"""Whole heads in another order."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class HeadsPermutedCause(MovedProjectionsCause):
    """Whole heads of a projection are in another order."""

    name: ClassVar[str] = "heads permuted"
    symptom: ClassVar[str] = "The same heads, in other places"
    cost: ClassVar[float] = 1.05
