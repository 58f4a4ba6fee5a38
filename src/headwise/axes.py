"""The vocabulary of axes, and how sizes are spoken of in messages.

=========== =====================================================================================
axis        meaning
=========== =====================================================================================
batch       independent sequences
heads       query heads
kv_heads    key/value heads; query head ``h`` reads kv head ``h // (heads // kv_heads)``
queries     positions that attend
keys        positions that are attended to
head_dim    width of one query or key vector (d_k)
value_dim   width of one value vector (d_v)
embed_dim   width of the layer's input
out_dim     width of the layer's output
source_dim  width of what keys and values are projected from
=========== =====================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

MATRIX_AXES = ("batch", "heads", "queries", "keys")


def sizes(tensor: Tensor, axes: Sequence[str]) -> str:
    """``(batch 3, heads 6, queries 24)`` for a tensor of shape (3, 6, 24)."""
    return "(" + ", ".join(f"{a} {n}" for a, n in zip(axes, tensor.shape, strict=True)) + ")"


def broadcasts(size: int, wanted: int) -> bool:
    """Whether an axis of this size stands for one of ``wanted``: the same, or 1 for all.

    Not ``size in (1, wanted)``: compiled, that is False where only one of both is symbolic.
    """
    return size == 1 or size == wanted


def human_bytes(count: int) -> str:
    """``6.4 GB`` for 6_442_450_944: decimal units, two significant digits."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return (
        f"{value:.0f} {units[0]}" if value >= 10 or units[0] == "B" else f"{value:.1f} {units[0]}"
    )
