"""Queries and values in each other's place."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class QAndVExchangedCause(MovedProjectionsCause):
    """The queries have the rows of the values, and the values those of the queries."""

    name: ClassVar[str] = "q and v exchanged"
    symptom: ClassVar[str] = "Ported weights load, and only the keys agree"
    cost: ClassVar[float] = 1.0
