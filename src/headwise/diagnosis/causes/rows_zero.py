"""Rows of zeros in a projection."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class RowsZeroCause(MovedProjectionsCause):
    """Rows of a projection were never loaded, and are zero."""

    name: ClassVar[str] = "rows zero"
    symptom: ClassVar[str] = "Some heads, or all, give zeros"
    cost: ClassVar[float] = 1.07
