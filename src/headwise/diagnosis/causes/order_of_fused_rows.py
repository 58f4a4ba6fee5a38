"""Blocks of a fused projection in another order."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class FusedRowOrderCause(MovedProjectionsCause):
    """A fused projection is stored in one order of q, k and v, and read in another.

    Most files store [q|k|v]. CodeGen stores q, v, k in four blocks of heads.

    Wrong:
        q, k, v = fused.chunk(3)

    Right:
        k, v, q = fused.chunk(3)  # in the order of the file

    Repair:
        Name the layout of the file with `--from`, or exchange the blocks.

    Confused with:
        q and k exchanged: in separate projections, it is the same.
        k and v exchanged: likewise.
        nesting of fused rows: with one head.
    """

    name: ClassVar[str] = "order of fused rows"
    symptom: ClassVar[str] = (
        "Fused qkv weights load, and every output is wrong: another order of q, k and v"
    )
    cost: ClassVar[float] = 1.02
