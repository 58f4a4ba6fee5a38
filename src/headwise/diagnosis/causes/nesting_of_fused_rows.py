"""Axes of fused rows nested in another order."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class FusedRowNestingCause(MovedProjectionsCause):
    """A fused projection is stored as (3, heads, d) and read as (heads, 3, d), or the like."""

    name: ClassVar[str] = "nesting of fused rows"
    symptom: ClassVar[str] = "Fused qkv weights load; only the first rows of q agree"
    cost: ClassVar[float] = 1.03
