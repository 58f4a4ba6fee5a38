"""Rows stored channel by channel, and read head by head."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections import MovedProjectionsCause


class HeadsInterleavedCause(MovedProjectionsCause):
    """Rows are stored (head_dim, heads) and read (heads, head_dim), or the reverse."""

    name: ClassVar[str] = "heads interleaved"
    symptom: ClassVar[str] = "Shapes fit, and every head holds some channels of all heads"
    cost: ClassVar[float] = 1.04
