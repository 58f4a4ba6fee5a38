"""Keys and values in each other's place."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class KAndVExchangedCause(MovedProjectionsCause):
    """The keys have the rows of the values, and the values those of the keys."""

    name: ClassVar[str] = "k and v exchanged"
    symptom: ClassVar[str] = "Ported weights load without an error, and every output is wrong"
    cost: ClassVar[float] = 1.0
