"""Causal masks and sliding windows: a range of the distance ``key - query``; and a prefix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import MaskError, OptionError
from headwise.masks import clause
from headwise.masks.clause import BOUNDLESS, Align, Clause, MatrixPart, MatrixSizes, Span
from headwise.support import tensors
from headwise.support.text import describe_value
from headwise.support.tracing import is_certain, may_check_values


@dataclass(frozen=True, eq=False)
class Band(clause.IntervalClause):
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
        offset = clause.resolve_align(self.align, sizes.queries, sizes.keys, what=str(self))
        return Band(
            self.left if self.left == BOUNDLESS else self.left - offset,
            self.right if self.right == BOUNDLESS else self.right + offset,
        )

    def merged(self, other: Clause) -> Band | None:
        if not isinstance(other, Band):
            return None
        return Band(min(self.left, other.left), min(self.right, other.right))

    def hides(self, sizes: MatrixSizes) -> bool:
        shows_late = is_certain(self.right >= sizes.keys - 1)
        return not (shows_late and is_certain(self.left >= sizes.queries - 1))

    @property
    def is_causal(self) -> bool:
        return self.left == BOUNDLESS and bool(self.right == 0)

    def key_range(self, first: int, stop: int) -> Span:
        return Span(first - self.left, stop + self.right)

    def fully_allowed_key_range(self, first: int, stop: int) -> Span:
        return Span(stop - 1 - self.left, first + self.right + 1)

    def key_interval_per_query(
        self, rows: Tensor, batches: slice, sizes: MatrixSizes
    ) -> tuple[Tensor, Tensor]:
        return rows[None] - self.left, rows[None] + (self.right + 1)

    def evaluate_block(self, block: clause.MaskBlock, sizes: MatrixSizes) -> Tensor:
        """A side that bounds nothing is not compared."""
        if self.left != BOUNDLESS and self.right != BOUNDLESS:
            return super().evaluate_block(block, sizes)
        rows = clause.positions_of_index(block.rows, sizes.queries, block.device)
        columns = clause.positions_of_index(block.columns, sizes.keys, block.device)
        if self.left == BOUNDLESS:
            return (columns <= (rows + self.right)[:, None])[None, None]
        return (columns >= (rows - self.left)[:, None])[None, None]

    def cut_to_part(self, place: MatrixPart, sizes: MatrixSizes) -> Band:
        shift = place.keys.first - place.queries.first
        return Band(
            self.left if self.left == BOUNDLESS else self.left + shift,
            self.right if self.right == BOUNDLESS else self.right - shift,
        )

    def broadcast_shape(self, sizes: MatrixSizes) -> MatrixSizes:
        return MatrixSizes(1, 1, sizes.queries, sizes.keys)

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


@dataclass(frozen=True, eq=False)
class Prefix(clause.IntervalClause):
    """The first ``lengths[b]`` keys are seen by every query, later ones as in a causal mask.

    The mask of a prefix language model (Raffel et al. 2020, arXiv:1910.10683, figure 4).
    """

    kind = "prefix"
    tensor_fields = ("lengths",)
    integer_fields = ("most", "right")

    lengths: Tensor  # (batch,), or () for all alike
    most: int  # no length is larger; BOUNDLESS where that is not known
    right: int = 0  # bound: how far the query's own key stands behind the key of its number
    align: Align | None = "top-left"

    def bind(self, sizes: MatrixSizes) -> Prefix:
        if self.lengths.shape not in ((), (sizes.batch,)):
            raise MaskError(
                saw=f"prefix lengths of shape {tuple(self.lengths.shape)}",
                needed=f"one integer, or one for each sequence: shape (batch {sizes.batch},)",
                do="e.g. Mask.prefix(torch.tensor([24, 17, 29]))",
            )
        offset = clause.resolve_align(self.align, sizes.queries, sizes.keys, what=str(self))
        return Prefix(self.lengths, self.most, self.right + offset)

    def key_range(self, first: int, stop: int) -> Span:
        return Span(0, max(self.most, stop + self.right))

    def fully_allowed_key_range(self, first: int, stop: int) -> Span:
        return Span(0, first + self.right + 1)

    def key_interval_per_query(
        self, rows: Tensor, batches: slice, sizes: MatrixSizes
    ) -> tuple[Tensor, Tensor]:
        lengths = self.lengths if self.lengths.dim() == 0 else self.lengths[batches, None]
        stop = torch.maximum(lengths, rows[None] + (self.right + 1))
        return torch.zeros_like(stop), stop

    def cut_to_part(self, place: MatrixPart, sizes: MatrixSizes) -> Prefix:
        lengths = self.lengths
        if lengths.dim():
            lengths = lengths[slice(*place.batches)]
        first = place.keys.first
        most = self.most if self.most == BOUNDLESS else self.most - first
        return Prefix(lengths - first, most, self.right + place.queries.first - first)

    def broadcast_shape(self, sizes: MatrixSizes) -> MatrixSizes:
        return MatrixSizes(self._batch_size, 1, sizes.queries, sizes.keys)

    def known_sizes(self) -> MatrixSizes:
        return MatrixSizes(self._batch_size, 1, 1, 1)

    def __str__(self) -> str:
        align = f" {self.align}" if self.align else ""
        return f"prefix({f'batch {self._batch_size}' if self.lengths.dim() else self.most}){align}"

    def tensors(self) -> tuple[Tensor, ...]:
        """One number for all is at home on every device."""
        return (self.lengths,) if self.lengths.dim() else ()

    @property
    def _batch_size(self) -> int:
        return self.lengths.shape[0] if self.lengths.dim() else 1


def make_prefix(lengths: object, align: Align | None) -> Prefix:
    """The clause for one number or one for each sequence, or OptionError."""
    if isinstance(lengths, Tensor) and lengths.dim() == 1 and tensors.has_integer_dtype(lengths):
        wide = tensors.convert_to_int64(lengths, "prefix lengths")
        if not (may_check_values(wide) and wide.numel()):
            return Prefix(wide, BOUNDLESS, align=align)
        if int(wide.min()) >= 0:
            return Prefix(wide, int(wide.max()), align=align)
        lengths = int(wide.min())
    count = tensors.convert_to_int_or_none(lengths)
    if count is not None and count >= 0:
        return Prefix(torch.tensor(count), count, align=align)
    raise OptionError(
        saw=f"prefix({describe_value(lengths)})",
        needed="a whole number from 0, or a 1-D tensor with one for each sequence",
        do="e.g. Mask.prefix(24)",
    )
