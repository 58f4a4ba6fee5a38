"""Padding: the number of real tokens of each sequence, or the position of the first one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headwise.errors import MaskError
from headwise.masks.clause import (
    BOUNDLESS,
    Clause,
    IntervalClause,
    MaskBlock,
    MatrixPart,
    MatrixSizes,
    Rectangle,
    Span,
    positions_of_index,
)
from headwise.support.integers import convert_to_int64, has_integer_dtype
from headwise.support.text import MATRIX_AXES, describe_value
from headwise.support.tracing import may_check_values, may_read_values

QUERIES, KEYS = 2, 3  # of MATRIX_AXES
Side = Literal["left", "right"]


@dataclass(frozen=True, eq=False)
class PaddingClause(IntervalClause):
    """One number for each sequence, that says which positions of one axis are real."""

    tensor_fields = ("numbers",)
    integer_fields = ("axis",)

    numbers: Tensor
    axis: int

    @abstractmethod
    def real_span(self, number: int) -> Span:
        """The real positions of a sequence with this number."""

    @abstractmethod
    def is_real(self, position: Tensor, numbers: Tensor) -> Tensor:
        """Return True at real positions; both arguments broadcast."""

    def bind(self, sizes: MatrixSizes) -> PaddingClause:
        _check_numbers(self, sizes)
        return self

    def cut_to_part(self, place: MatrixPart, sizes: MatrixSizes) -> PaddingClause:
        span = place.queries if self.axis == QUERIES else place.keys
        numbers = self.numbers[slice(*place.batches)] - span.first
        return type(self)(numbers.clamp(0, span.size), self.axis)

    def broadcast_shape(self, sizes: MatrixSizes) -> MatrixSizes:
        keys = self.axis == KEYS
        batch = self.numbers.shape[0]
        return (
            MatrixSizes(batch, 1, 1, sizes.keys)
            if keys
            else MatrixSizes(batch, 1, sizes.queries, 1)
        )

    def evaluate_block(self, block: MaskBlock, sizes: MatrixSizes) -> Tensor:
        """Only its own axis is written."""
        numbers = self.numbers[block.batches, None]
        if self.axis == KEYS:
            position = positions_of_index(block.columns, sizes.keys, block.device)
            return self.is_real(position, numbers)[:, None, None, :]
        position = positions_of_index(block.rows, sizes.queries, block.device)
        return self.is_real(position, numbers)[:, None, :, None]

    def key_interval_per_query(
        self, rows: Tensor, batches: slice, sizes: MatrixSizes
    ) -> tuple[Tensor, Tensor]:
        numbers = self.numbers[batches, None]
        if self.axis == KEYS:
            return self._real_key_interval(numbers, rows, sizes)
        none, every = torch.zeros_like(rows)[None], torch.full_like(rows, sizes.keys)[None]
        return none, torch.where(self.is_real(rows, numbers), every, none)

    @abstractmethod
    def _real_key_interval(
        self, numbers: Tensor, rows: Tensor, sizes: MatrixSizes
    ) -> tuple[Tensor, Tensor]:
        """First real key and stop."""

    def rectangles(self, sizes: MatrixSizes) -> list[list[Rectangle]] | None:
        if not may_read_values(self.numbers):
            return None
        every = Span(0, sizes.queries), Span(0, sizes.keys)
        rectangles = []
        for batch, number in enumerate(self.numbers.tolist()):
            queries, keys = every
            if self.axis == QUERIES:
                queries = queries.intersection(self.real_span(number))
            else:
                keys = keys.intersection(self.real_span(number))
            rectangles.append([Rectangle(batch, queries, keys)])
        return rectangles

    def real_keys(self, sizes: MatrixSizes) -> Tensor | None:
        if self.axis != KEYS:
            return None
        position = torch.arange(sizes.keys, device=self.numbers.device)
        return self.is_real(position, self.numbers[:, None])

    def known_sizes(self) -> MatrixSizes:
        most = int(self.numbers.max()) if self.numbers.numel() else 0
        queries, keys = (most, 1) if self.axis == QUERIES else (1, most)
        return MatrixSizes(self.numbers.shape[0], 1, queries, keys)

    def __str__(self) -> str:
        return f"{self.kind}({MATRIX_AXES[self.axis]})"


@dataclass(frozen=True, eq=False)
class Lengths(PaddingClause):
    """``numbers[b]`` positions are real; bound, they are the first ones, or it is a `Starts`."""

    kind = "lengths"

    side: Side = "right"  # where the padding stands

    def bind(self, sizes: MatrixSizes) -> PaddingClause:
        super().bind(sizes)
        if self.side == "right":
            return self
        return Starts(sizes[self.axis] - self.numbers, self.axis)

    def real_span(self, number: int) -> Span:
        return Span(0, number)

    def is_real(self, position: Tensor, numbers: Tensor) -> Tensor:
        return position < numbers

    def _real_key_interval(
        self,
        numbers: Tensor,
        rows: Tensor,
        sizes: MatrixSizes,
    ) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(rows)[None], numbers

    def merged(self, other: Clause) -> Lengths | None:
        if not isinstance(other, Lengths) or other.axis != self.axis:
            return None
        return Lengths(torch.minimum(self.numbers, other.numbers), self.axis)

    def __str__(self) -> str:
        side = ", left-padded" if self.side == "left" else ""
        return f"lengths({MATRIX_AXES[self.axis]}{side})"


@dataclass(frozen=True, eq=False)
class Starts(PaddingClause):
    """The positions from ``numbers[b]`` on are real: padding stands before."""

    kind = "starts"

    def real_span(self, number: int) -> Span:
        return Span(number, BOUNDLESS)

    def is_real(self, position: Tensor, numbers: Tensor) -> Tensor:
        return position >= numbers

    def _real_key_interval(
        self, numbers: Tensor, rows: Tensor, sizes: MatrixSizes
    ) -> tuple[Tensor, Tensor]:
        return numbers, torch.full_like(rows, sizes.keys)[None]

    def merged(self, other: Clause) -> Starts | None:
        if not isinstance(other, Starts) or other.axis != self.axis:
            return None
        return Starts(torch.maximum(self.numbers, other.numbers), self.axis)

    def first_real_keys(self) -> Tensor | None:
        return self.numbers if self.axis == KEYS else None


def require_lengths(lengths: object, axis: str, *, call: str = "lengths") -> Tensor:
    """Return lengths in int64. Raise MaskError unless they are a 1-D tensor of integers."""
    if not isinstance(lengths, Tensor) or lengths.dim() != 1:
        seen = (
            f"of shape {tuple(lengths.shape)}"
            if isinstance(lengths, Tensor)
            else describe_value(lengths)
        )
    elif not has_integer_dtype(lengths):
        seen = f"of dtype {lengths.dtype}"
    else:
        return convert_to_int64(lengths, f"{call} of the {axis}")
    raise MaskError(
        saw=f"{call} {seen} for the {axis}",
        needed="a tensor with one integer for each sequence: (batch,)",
        do=f"e.g. Mask.{call}(keys=torch.tensor([24, 17, 29]))",
    )


def _check_numbers(clause: PaddingClause, sizes: MatrixSizes) -> None:
    """Raise MaskError unless there is one number for each sequence, within the axis."""
    numbers, axis, size = clause.numbers, MATRIX_AXES[clause.axis], sizes[clause.axis]
    if numbers.shape != (sizes.batch,):
        raise MaskError(
            saw=f"{clause.kind} of shape {tuple(numbers.shape)} for the {axis}",
            needed=f"one integer for each sequence: shape (batch {sizes.batch},)",
            do="e.g. Mask.lengths(keys=torch.tensor([24, 17, 29]))",
        )
    if not may_check_values(numbers) or numbers.numel() == 0:
        return
    least, most = int(numbers.min()), int(numbers.max())
    if least < 0 or most > size:
        raise MaskError(
            saw=f"{clause.kind} between {least} and {most} for {size} {axis}",
            needed=f"{clause.kind} from 0 to {size}",
            do="pad the sequences to the longest, or correct the lengths",
        )
