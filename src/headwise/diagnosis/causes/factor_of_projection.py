"""Rows of a projection with a factor."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class ProjectionFactorCause(MovedProjectionsCause):
    """Rows of a projection are multiplied by a number."""

    name: ClassVar[str] = "factor"
    symptom: ClassVar[str] = "Queries, keys or values are too large by the same factor everywhere"
    cost: ClassVar[float] = 1.08
