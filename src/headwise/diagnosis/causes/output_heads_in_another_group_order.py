"""Heads of the output projection in another order of kv groups."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class OutputGroupOrderCause(MovedProjectionsCause):
    """The output projection takes heads as (group, kv_heads) that are (kv_heads, group).

    Head outputs are joined before the output projection. Code for grouped queries often has an axis
    for kv heads and an axis for the queries of a group. Their order is that of the columns of the
    output projection.

    Wrong:
        outputs.permute(0, 3, 2, 1, 4).flatten(2)  # (batch, length, group, kv_heads, d)

    Right:
        outputs.permute(0, 3, 1, 2, 4).flatten(2)  # (batch, length, kv_heads, group, d)

    Repair:
        Join kv heads first, then the queries of a group.

    Confused with:
        kv heads tiled instead of repeated: if q has the same order.
        heads permuted: the order is one of the permutations of heads.
    """

    name: ClassVar[str] = "output heads in another group order"
    symptom: ClassVar[str] = (
        "Head outputs agree and the output does not, in grouped-query attention"
    )
    cost: ClassVar[float] = 1.04
