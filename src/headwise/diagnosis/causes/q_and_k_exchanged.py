"""Queries and keys in each other's place."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class QAndKExchangedCause(MovedProjectionsCause):
    """The queries have the rows of the keys, and the keys those of the queries."""

    name: ClassVar[str] = "q and k exchanged"
    symptom: ClassVar[str] = (
        "Attention looks transposed: tokens attend to those that should attend to them"
    )
    cost: ClassVar[float] = 1.0
