"""A square matrix that is transposed."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class MatrixTransposedCause(MovedProjectionsCause):
    """A square projection is stored as its transpose."""

    name: ClassVar[str] = "square matrix transposed"
    symptom: ClassVar[str] = "Weights ported from GPT-2's Conv1D load, and one projection is wrong"
    cost: ClassVar[float] = 1.02
