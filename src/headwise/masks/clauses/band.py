"""Causal masks and sliding windows: a range of the distance ``key - query``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from headwise.masks.clause import (
    BOUNDLESS,
    Align,
    Clause,
    IntervalClause,
    MaskBlock,
    MatrixPart,
    MatrixSizes,
    Span,
    positions_of_index,
    resolve_align_to_offset,
)


@dataclass(frozen=True, eq=False)
class Band(IntervalClause):
    """Keys from ``left`` before to ``right`` after the query's own place.

    Bound, the own place of query i is key i, and a side may be negative.
    """

    kind = "band"
    integer_fields = ("left", "right")
    is_relative = True

    left: int = BOUNDLESS
    right: int = BOUNDLESS
    align: Align | None = "top-left"

    def bind(self, sizes: MatrixSizes) -> Band:
        offset = resolve_align_to_offset(self.align, sizes.queries, sizes.keys, what=str(self))
        return Band(
            self.left if self.left == BOUNDLESS else self.left - offset,
            self.right if self.right == BOUNDLESS else self.right + offset,
        )

    def merged(self, other: Clause) -> Band | None:
        if not isinstance(other, Band):
            return None
        return Band(min(self.left, other.left), min(self.right, other.right))

    def hides(self, sizes: MatrixSizes) -> bool:
        hides_late = self.right < sizes.keys - 1
        return hides_late or self.left < sizes.queries - 1

    @property
    def is_causal(self) -> bool:
        """True if the clause is exactly the top-left causal mask."""
        return self.left == BOUNDLESS and bool(self.right == 0)

    def key_range(self, first: int, stop: int) -> Span:
        return Span(first - self.left, stop + self.right)

    def fully_allowed_key_range(self, first: int, stop: int) -> Span:
        return Span(stop - 1 - self.left, first + self.right + 1)

    def key_interval_per_query(
        self,
        rows: Tensor,
        batches: slice,
        sizes: MatrixSizes,
    ) -> tuple[Tensor, Tensor]:
        return rows[None] - self.left, rows[None] + (self.right + 1)

    def evaluate_block(self, block: MaskBlock, sizes: MatrixSizes) -> Tensor:
        """A side that bounds nothing is not compared."""
        if self.left != BOUNDLESS and self.right != BOUNDLESS:
            return super().evaluate_block(block, sizes)
        rows = positions_of_index(block.rows, sizes.queries, block.device)
        distance = positions_of_index(block.columns, sizes.keys, block.device) - rows[:, None]
        allowed = distance <= self.right if self.left == BOUNDLESS else distance >= -self.left
        return allowed[None, None]

    def cut_to_part(self, place: MatrixPart, sizes: MatrixSizes) -> Band:
        shift = place.keys.first - place.queries.first
        return Band(
            self.left if self.left == BOUNDLESS else self.left + shift,
            self.right if self.right == BOUNDLESS else self.right - shift,
        )

    def broadcast_shape(self, sizes: MatrixSizes) -> MatrixSizes:
        return MatrixSizes(1, 1, sizes.queries, sizes.keys)

    @property
    def named_align(self) -> Align | None:
        return self.align

    def aligned(self, align: str) -> Band:
        chosen: Any = self.align or align
        return replace(self, align=chosen)

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """``left`` and ``right``, None where there is no bound."""
        left, right = (None if n == BOUNDLESS else n for n in (self.left, self.right))
        return left, right

    def __str__(self) -> str:
        align = f" {self.align}" if self.align else ""
        left, right = self.sides
        if left is None and right == 0:
            return f"causal{align}"
        return f"window(left={left}, right={right}){align}"
