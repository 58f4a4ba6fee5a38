"""Fused rows of kv groups, read as blocks, or the reverse."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class FusedRowGroupsCause(MovedProjectionsCause):
    """A fused projection is stored by kv groups and read as [q|k|v], or the reverse."""

    name: ClassVar[str] = "kv groups of fused rows"
    symptom: ClassVar[str] = "Grouped-query weights from Megatron or Falcon give gibberish"
    cost: ClassVar[float] = 1.03
