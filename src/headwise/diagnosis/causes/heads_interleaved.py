"""Rows stored channel by channel, and read head by head."""

from __future__ import annotations

from typing import ClassVar

from headwise.diagnosis.causes.moved_projections_base import MovedProjectionsCause


class HeadsInterleavedCause(MovedProjectionsCause):
    """Rows are stored (head_dim, heads) and read (heads, head_dim), or the reverse.

    Both orders have heads * head_dim rows. With one head, or one channel a head, they are equal.

    Wrong:
        wq.reshape(head_dim, heads, width)  # of rows stored as (heads, head_dim)

    Right:
        wq.reshape(heads, head_dim, width)

    Repair:
        Read the rows in the order in which they are stored: `headwise layouts show LAYOUT` draws
        it.

    Confused with:
        heads permuted: if a head has one channel.
        rotary permutation with a wrong number of heads: with two heads, a permutation made for one.
    """

    name: ClassVar[str] = "heads interleaved"
    symptom: ClassVar[str] = (
        "Shapes fit, and every head holds some channels of all heads: (heads, head_dim) exchanged"
    )
    cost: ClassVar[float] = 1.04
