"""Fused rows of kv groups, read as blocks, or the reverse."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class FusedRowGroupsCause(MovedProjectionsCause):
    """A fused projection is stored by kv groups and read as [q|k|v], or the reverse.

    Megatron, Falcon-40B and InternLM2 store group by group: some query heads, their key head, their
    value head. The shape is the same as that of [q|k|v]. With one kv head the two orders are equal.

    Wrong:
        q, k, v = fused.split([heads * d, kv_heads * d, kv_heads * d])

    Right:
        by_group = fused.reshape(kv_heads, heads // kv_heads + 2, d, width)
        q, k, v = by_group[:, :-2], by_group[:, -2], by_group[:, -1]

    Repair:
        Name the layout of the file: `headwise convert MODEL OUT --from megatron --to llama`.
        `headwise detect MODEL` names the layouts that fit.

    Confused with:
        nesting of fused rows: with as many kv heads as heads, where groups are heads.
        shards joined in the wrong order: tensor-parallel shards of [q|k|v] look like groups.
    """

    name: ClassVar[str] = "kv groups of fused rows"
    symptom: ClassVar[str] = (
        "Grouped-query weights from Megatron, Falcon-40B or InternLM2 give gibberish"
    )
    cost: ClassVar[float] = 1.03
