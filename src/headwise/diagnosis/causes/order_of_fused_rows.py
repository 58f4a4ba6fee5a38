"""Blocks of a fused projection in another order."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class FusedRowOrderCause(MovedProjectionsCause):
    """A fused projection is stored in one order of q, k and v, and read in another."""

    name: ClassVar[str] = "order of fused rows"
    symptom: ClassVar[str] = (
        "Fused qkv weights load, and the outputs are wrong from the first layer on"
    )
    cost: ClassVar[float] = 1.02
