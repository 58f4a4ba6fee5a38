"""Axes of fused rows nested in another order."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class FusedRowNestingCause(MovedProjectionsCause):
    """A fused projection is stored as (3, heads, d) and read as (heads, 3, d), or the like.

    GPT-NeoX, BLOOM and Falcon-RW store q, k and v of head 0, then those of head 1. GPT-2, MPT and
    timm store all of q, all of k, all of v. The shape is the same, and so are the first rows.

    Wrong:
        q, k, v = fused.reshape(3, heads, d, width)  # GPT-NeoX

    Right:
        q, k, v = fused.reshape(heads, 3, d, width).unbind(1)

    Repair:
        Name the layout of the file: `headwise convert MODEL OUT --from neox --to llama`.

    Confused with:
        kv groups of fused rows: with as many kv heads as heads.
        order of fused rows: with one head.
    """

    name: ClassVar[str] = "nesting of fused rows"
    symptom: ClassVar[str] = (
        "Fused qkv weights of GPT-NeoX, BLOOM or Falcon load, and only the first head of q agrees"
    )
    cost: ClassVar[float] = 1.03
