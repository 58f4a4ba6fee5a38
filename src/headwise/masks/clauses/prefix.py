"""A prefix that every query sees, and causal attention behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.errors import MaskError, OptionError
from headwise.masks.clause import (
    BOUNDLESS,
    Align,
    IntervalClause,
    MatrixPart,
    MatrixSizes,
    Span,
    resolve_align_to_offset,
)
from headwise.support.integers import convert_to_int64, convert_to_int_or_none, has_integer_dtype
from headwise.support.text import describe_value
from headwise.support.tracing import may_check_values


@dataclass(frozen=True, eq=False)
class Prefix(IntervalClause):
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
        offset = resolve_align_to_offset(self.align, sizes.queries, sizes.keys, what=str(self))
        return Prefix(self.lengths, self.most, self.right + offset)

    def key_range(self, first: int, stop: int) -> Span:
        return Span(0, max(self.most, stop + self.right))

    def fully_allowed_key_range(self, first: int, stop: int) -> Span:
        return Span(0, first + self.right + 1)

    def key_interval_per_query(
        self,
        rows: Tensor,
        batches: slice,
        sizes: MatrixSizes,
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

    @property
    def named_align(self) -> Align | None:
        return self.align

    def aligned(self, align: str) -> Prefix:
        chosen: Any = self.align or align
        return replace(self, align=chosen)

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
    if isinstance(lengths, Tensor) and lengths.dim() == 1 and has_integer_dtype(lengths):
        wide = convert_to_int64(lengths, "prefix lengths")
        if not (may_check_values(wide) and wide.numel()):
            return Prefix(wide, BOUNDLESS, align=align)
        if int(wide.min()) >= 0:
            return Prefix(wide, int(wide.max()), align=align)
        lengths = int(wide.min())
    count = convert_to_int_or_none(lengths)
    if count is not None and count >= 0:
        return Prefix(torch.tensor(count), count, align=align)
    raise OptionError(
        saw=f"prefix({describe_value(lengths)})",
        needed="a whole number from 0, or a 1-D tensor with one for each sequence",
        do="e.g. Mask.prefix(24)",
    )
