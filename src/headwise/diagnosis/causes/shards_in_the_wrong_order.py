"""Tensor-parallel shards joined in the wrong order."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class ShardOrderCause(MovedProjectionsCause):
    """Shards of a projection are joined in the wrong order.

    q, k and v are split by rows, the output projection by columns. A fused projection holds q, k
    and v of rank 0, then those of rank 1. File names in the order of the alphabet put rank 10
    before rank 2.

    Wrong:
        fused = torch.cat(shards)

    Right:
        parts = [shard.split([q_rows, kv_rows, kv_rows]) for shard in shards]
        fused = torch.cat([torch.cat(role) for role in zip(*parts)])

    Repair:
        Join the shards in the order of ranks, each of q, k and v by itself.

    Confused with:
        heads permuted: shards of one projection hold whole heads.
        kv groups of fused rows: with one kv head a rank.
    """

    name: ClassVar[str] = "shards joined in the wrong order"
    symptom: ClassVar[str] = (
        "A checkpoint merged from several tensor-parallel ranks gives gibberish"
    )
    cost: ClassVar[float] = 1.06
