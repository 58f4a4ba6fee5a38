"""A mask at known sizes, evaluated one block at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwise.errors import DeviceError
from headwise.masks.clause import WHOLE, Clause, MaskBlock, MatrixPart, MatrixSizes, Rectangle, Span
from headwise.masks.clauses.band import Band
from headwise.masks.clauses.lengths import KEYS


@dataclass(frozen=True, eq=False)
class BoundMask:
    """Bound clauses, all of which must allow a pair; like ones are merged."""

    sizes: MatrixSizes
    device: torch.device
    clauses: tuple[Clause, ...]

    @property
    def band(self) -> Band | None:
        return next((c for c in self.clauses if isinstance(c, Band)), None)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Number of keys that a query sees before and after its own position; None: no limit."""
        return (None, None) if self.band is None else self.band.sides

    @property
    def is_causal(self) -> bool:
        """True if the mask is exactly the top-left causal one."""
        band = self.band
        return len(self.clauses) == 1 and band is not None and band.is_causal

    @property
    def hiding_clauses(self) -> tuple[Clause, ...]:
        return tuple(clause for clause in self.clauses if clause.hides(self.sizes))

    # ---- ranges of keys ---------------------------------------------------------------------

    def key_range(self, first: int, stop: int) -> Span:
        """Keys outside are hidden from every query in [first, stop)."""
        span = reduce(
            Span.intersection, (c.key_range(first, stop) for c in self.clauses), self._all_keys
        )
        start = min(span.first, self.sizes.keys)
        return Span(start, max(start, span.stop))

    def fully_allowed_key_range(self, first: int, stop: int) -> Span:
        """Keys inside are allowed to every query in [first, stop); empty where unknown."""
        spans = [clause.fully_allowed_key_range(first, stop) for clause in self.clauses]
        if None in spans:
            return Span(0, 0)
        return reduce(Span.intersection, (span for span in spans if span), self._all_keys)

    @property
    def max_visible_keys(self) -> int:
        """Upper bound of the keys that a query sees, by the clause of distance."""
        left, right = self.reach
        if left is None or right is None:
            return self.sizes.keys
        return max(0, min(self.sizes.keys, left + right + 1))

    def key_interval_per_query(
        self, rows: Tensor, batches: slice = WHOLE
    ) -> tuple[Tensor, Tensor] | None:
        """First key and stop for each query, (batches or 1, rows); None: not one run of keys."""
        first, stop = torch.zeros_like(rows)[None], torch.full_like(rows, self.sizes.keys)[None]
        for clause in self.clauses:
            keys = clause.key_interval_per_query(rows, batches, self.sizes)
            if keys is None:
                return None
            first, stop = torch.maximum(first, keys[0]), torch.minimum(stop, keys[1])
        return first, torch.maximum(first, stop)

    @property
    def _all_keys(self) -> Span:
        return Span(0, self.sizes.keys)

    # ---- blocks -----------------------------------------------------------------------------

    def evaluate_block(
        self,
        batches: slice,
        heads: slice,
        rows: slice | Tensor,
        columns: slice,
        clauses: Iterable[Clause] | None = None,
    ) -> Tensor | None:
        """Evaluate the clauses, or some of them, over one block; None without clauses.

        Bool, broadcastable to (batches, heads, rows, columns).
        """
        block = MaskBlock(batches, heads, rows, columns, self.device)
        chosen = self.clauses if clauses is None else clauses
        parts = [clause.evaluate_block(block, self.sizes) for clause in chosen]
        return reduce(torch.logical_and, parts) if parts else None

    def evaluate_rows(self, rows: Int[Tensor, " rows"]) -> Bool[Tensor, "..."]:
        """Evaluate the mask at chosen queries, broadcastable to (batch, heads, rows, keys)."""
        allowed = self.evaluate_block(WHOLE, WHOLE, rows, WHOLE)
        if allowed is None:
            allowed = rows.new_ones(1, 1, 1, 1, dtype=torch.bool)
        return allowed.expand(-1, -1, rows.shape[0], self.sizes.keys)

    def evaluate_pairs(
        self, rows: Int[Tensor, " pairs"], columns: Int[Tensor, " pairs"]
    ) -> Bool[Tensor, "..."]:
        """Evaluate the mask at (query, key) pairs, broadcastable to (batch, heads, pairs)."""
        allowed = torch.ones_like(rows, dtype=torch.bool)[None, None]
        for clause in self.clauses:
            allowed = allowed & clause.evaluate_pairs(rows, columns, self.sizes)
        return allowed

    # ---- parts ------------------------------------------------------------------------------

    def rectangles_of_allowed_pairs(self) -> BlockDiagonal | None:
        """Return rectangles that hold every allowed pair; None where no clause has any."""
        parts = [(clause, clause.rectangles(self.sizes)) for clause in self.clauses]
        lists = [rectangles for _, rectangles in parts if rectangles is not None]
        if not lists:
            return None
        common = tuple(
            r for rows in zip(*lists, strict=True) for r in reduce(_intersect_rectangles, rows)
        )
        rest = tuple(clause for clause, rectangles in parts if rectangles is None)
        return BlockDiagonal(tuple(r for r in common if r.cell_count), replace(self, clauses=rest))

    def cut_to_part(self, place: MatrixPart) -> BoundMask:
        batch, queries, keys = (span.size for span in place)
        sizes = MatrixSizes(batch, self.sizes.heads, queries, keys)
        clauses = tuple(clause.cut_to_part(place, self.sizes) for clause in self.clauses)
        return BoundMask(sizes, self.device, clauses)

    def first_real_keys(self) -> Int[Tensor, " batch"] | None:
        """Return the position of each sequence's first token; None without left padding."""
        starts = (clause.first_real_keys() for clause in self.clauses)
        return next((start for start in starts if start is not None), None)

    def real_keys(self) -> Bool[Tensor, "batch keys"]:
        """False where a key is hidden from every query, other than by its distance."""
        real = torch.ones(self.sizes.batch, self.sizes.keys, dtype=torch.bool, device=self.device)
        known = self._real_tokens(KEYS, self.clauses)
        return real if known is None else real & known

    def stated_tokens(self, axis: int) -> Bool[Tensor, "..."] | None:
        """False for padding by lengths, starts or segments, (batch or 1, length); None without."""
        return self._real_tokens(axis, [c for c in self.clauses if not c.is_written])

    def _real_tokens(self, axis: int, clauses: Iterable[Clause]) -> Tensor | None:
        parts = [clause.real_tokens(axis, self.sizes) for clause in clauses]
        known = [part for part in parts if part is not None]
        return reduce(torch.logical_and, known) if known else None


class BlockDiagonal(NamedTuple):
    """Rectangles outside of which a mask hides all, in order, and what else it says within."""

    rectangles: tuple[Rectangle, ...]
    rest: BoundMask


def zero_padding(x: Tensor, real: Tensor | None) -> Tensor:
    """Return (batch, ..., length, width) with 0 at tokens that are not real, (batch, length).

    A weight of 0 times NaN is NaN, and so is its gradient.
    """
    if real is None:
        return x
    # `where` takes half of the time of `masked_fill`.
    return torch.where(real[(slice(None), *[None] * (x.dim() - 3), ..., None)], x, 0)


def bind_clauses(clauses: Iterable[Clause], sizes: MatrixSizes, device: torch.device) -> BoundMask:
    """Bind each clause, and merge those that are of one kind.

    Raises:
        MaskError: a clause that was made for other sizes.
        DeviceError: a tensor on another device than queries and keys.
    """
    merged: list[Clause] = []
    for clause in [clause.bind(sizes) for clause in clauses]:
        for tensor in clause.tensors():
            if tensor.device != device:
                raise DeviceError(
                    saw=f"a mask on {tensor.device} for queries and keys on {device}",
                    needed="one device",
                    do=f'mask.to("{device}")',
                )
        for index, other in enumerate(merged):
            if (both := other.merged(clause)) is not None:
                merged[index] = both
                break
        else:
            merged.append(clause)
    return BoundMask(sizes, device, tuple(merged))


def _intersect_rectangles(some: list[Rectangle], others: list[Rectangle]) -> list[Rectangle]:
    pairs = [
        Rectangle(a.batch, a.queries.intersection(b.queries), a.keys.intersection(b.keys))
        for a in some
        for b in others
    ]
    return [rectangle for rectangle in pairs if rectangle.cell_count]
