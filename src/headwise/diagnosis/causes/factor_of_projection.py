"""Rows of a projection with a factor."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class ProjectionFactorCause(MovedProjectionsCause):
    """Rows of a projection are multiplied by a number.

    MaxText stores queries that are divided by sqrt(head_dim) already. A quantised file read without
    its scales, and an adapter merged with another alpha / rank, differ by a factor as well.

    Repair:
        Divide the rows by the number that is reported, or set `scale` accordingly if they are those
        of q or k alone.

    Confused with:
        scale: a factor of all queries gives the same scores as a factor of the scale.
        sign: a factor of -1.
        rows zero: a factor of 0.
    """

    name: ClassVar[str] = "factor"
    symptom: ClassVar[str] = (
        "Queries, keys or values are too large or too small by the same factor everywhere"
    )
    cost: ClassVar[float] = 1.08
