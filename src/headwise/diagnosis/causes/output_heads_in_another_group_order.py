"""Heads of the output projection in another order of kv groups."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class OutputGroupOrderCause(MovedProjectionsCause):
    """The output projection takes heads as (group, kv_heads) that are (kv_heads, group)."""

    name: ClassVar[str] = "output heads in another group order"
    symptom: ClassVar[str] = (
        "Head outputs agree, and the output does not, with grouped-query attention"
    )
    cost: ClassVar[float] = 1.04
