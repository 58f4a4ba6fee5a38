"""Rows of a projection with the other sign."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class ProjectionSignCause(MovedProjectionsCause):
    """Rows of a projection have the other sign.

    Repair:
        Multiply the rows that are reported by -1.

    Confused with:
        factor: a factor of -1.
    """

    name: ClassVar[str] = "sign"
    symptom: ClassVar[str] = "A projection has the right size and the wrong sign"
    cost: ClassVar[float] = 1.07
