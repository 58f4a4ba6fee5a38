"""An output projection reshaped with its axes exchanged."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class OutputReshapedCause(MovedProjectionsCause):
    """The output projection is reshaped from (out_dim, heads, value_dim), axes exchanged."""

    name: ClassVar[str] = "output projection reshaped with exchanged axes"
    symptom: ClassVar[str] = (
        "Head outputs agree, and the output does not, though the shape is right"
    )
    cost: ClassVar[float] = 1.05
