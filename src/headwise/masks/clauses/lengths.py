"""Padding: the number of real tokens of each sequence, or the position of the first one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from headwise.errors import MaskError
from headwise.masks import clause
from headwise.masks.clause import Clause, MatrixPart, MatrixSizes, Rectangle, Span
from headwise.support.tensors import convert_to_int64, has_integer_dtype
from headwise.support.text import MATRIX_AXES, describe_value
from headwise.support.tracing import may_check_values, may_read_values

QUERIES, KEYS = 2, 3  # of MATRIX_AXES
Side = Literal["left", "right"]
Numbers = TypeVar("Numbers", int, Tensor)


@dataclass(frozen=True, eq=False)
class PaddingClause(clause.IntervalClause):
    """One number for each sequence, that says which positions of one axis are real."""

    tensor_fields = ("numbers",)
    integer_fields = ("axis",)
    keeps_least: ClassVar[bool]  # of the numbers of two clauses, else the most

    numbers: Tensor
    axis: int

    @abstractmethod
    def real_positions(self, numbers: Numbers, size: int) -> tuple[Numbers, Numbers]:
        """First real position and stop of sequences with these numbers, on an axis of this size."""

    def merged(self, other: Clause) -> PaddingClause | None:
        if type(other) is not type(self) or other.axis != self.axis:
            return None
        pick = torch.minimum if self.keeps_least else torch.maximum
        return type(self)(pick(self.numbers, other.numbers), self.axis)

    def _is_real(self, position: Tensor, numbers: Tensor, size: int) -> Tensor:
        first, stop = self.real_positions(numbers, size)
        return (position >= first) & (position < stop)

    def bind(self, sizes: MatrixSizes) -> PaddingClause:
        numbers, axis, size = self.numbers, MATRIX_AXES[self.axis], sizes[self.axis]
        if numbers.shape != (sizes.batch,):
            raise MaskError(
                saw=f"{self.kind} of shape {tuple(numbers.shape)} for the {axis}",
                needed=f"one integer for each sequence: shape (batch {sizes.batch},)",
                do="e.g. Mask.lengths(keys=torch.tensor([24, 17, 29]))",
            )
        may_check = may_check_values(numbers) and numbers.numel()
        least, most = (int(numbers.min()), int(numbers.max())) if may_check else (0, 0)
        if least < 0 or most > size:
            raise MaskError(
                saw=f"{self.kind} between {least} and {most} for {size} {axis}",
                needed=f"{self.kind} from 0 to {size}",
                do="pad the sequences to the longest, or correct the lengths; the q and k of an "
                "AttentionMatrix are (batch, heads, length, width)",
            )
        return self

    def cut_to_part(self, place: MatrixPart, sizes: MatrixSizes) -> PaddingClause:
        span = place.queries if self.axis == QUERIES else place.keys
        numbers = self.numbers[slice(*place.batches)] - span.first
        return type(self)(numbers.clamp(0, span.size), self.axis)

    def broadcast_shape(self, sizes: MatrixSizes) -> MatrixSizes:
        queries, keys = (1, sizes.keys) if self.axis == KEYS else (sizes.queries, 1)
        return MatrixSizes(self.numbers.shape[0], 1, queries, keys)

    def evaluate_block(self, block: clause.MaskBlock, sizes: MatrixSizes) -> Tensor:
        """Only its own axis is written."""
        numbers, size = self.numbers[block.batches, None], sizes[self.axis]
        index = block.columns if self.axis == KEYS else block.rows
        position = clause.positions_of_index(index, size, block.device)
        real = self._is_real(position, numbers, size)
        return real[:, None, None, :] if self.axis == KEYS else real[:, None, :, None]

    def key_interval_per_query(
        self, rows: Tensor, batches: slice, sizes: MatrixSizes
    ) -> tuple[Tensor, Tensor]:
        numbers = self.numbers[batches, None]
        if self.axis == KEYS:
            return self.real_positions(numbers, sizes.keys)
        none, every = torch.zeros_like(rows)[None], torch.full_like(rows, sizes.keys)[None]
        return none, torch.where(self._is_real(rows, numbers, sizes.queries), every, none)

    def rectangles(self, sizes: MatrixSizes) -> list[list[Rectangle]] | None:
        if not may_read_values(self.numbers):
            return None
        rectangles = []
        for batch, number in enumerate(self.numbers.tolist()):
            spans = [Span(0, sizes.queries), Span(0, sizes.keys)]
            real = Span(*self.real_positions(number, sizes[self.axis]))
            spans[self.axis - QUERIES] = real.intersection(spans[self.axis - QUERIES])
            rectangles.append([Rectangle(batch, *spans)])
        return rectangles

    def real_tokens(self, axis: int, sizes: MatrixSizes) -> Tensor | None:
        if self.axis != axis:
            return None
        position = torch.arange(sizes[axis], device=self.numbers.device)
        return self._is_real(position, self.numbers[:, None], sizes[axis])

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
    keeps_least = True

    side: Side = "right"  # where the padding stands

    def bind(self, sizes: MatrixSizes) -> PaddingClause:
        super().bind(sizes)
        if self.side == "right":
            return self
        return Starts(sizes[self.axis] - self.numbers, self.axis)

    def real_positions(self, numbers: Numbers, size: int) -> tuple[Numbers, Numbers]:
        return 0 * numbers, numbers

    def __str__(self) -> str:
        side = ", left-padded" if self.side == "left" else ""
        return f"lengths({MATRIX_AXES[self.axis]}{side})"


@dataclass(frozen=True, eq=False)
class Starts(PaddingClause):
    """The positions from ``numbers[b]`` on are real: padding stands before."""

    kind = "starts"
    keeps_least = False

    def real_positions(self, numbers: Numbers, size: int) -> tuple[Numbers, Numbers]:
        return numbers, 0 * numbers + size

    def first_real_keys(self) -> Tensor | None:
        return self.numbers if self.axis == KEYS else None


def require_lengths(lengths: object, axis: str, *, call: str = "lengths") -> Tensor:
    """Return lengths in int64. Raise MaskError unless they are a 1-D tensor of integers."""
    if not isinstance(lengths, Tensor):
        seen = describe_value(lengths)
    elif lengths.dim() != 1:
        seen = f"of shape {tuple(lengths.shape)}"
    elif not has_integer_dtype(lengths):
        seen = f"of dtype {lengths.dtype}"
    else:
        return convert_to_int64(lengths, f"{call} of the {axis}")
    raise MaskError(
        saw=f"{call} {seen} for the {axis}",
        needed="a tensor with one integer for each sequence: (batch,)",
        do=f"e.g. Mask.{call}(keys=torch.tensor([24, 17, 29]))",
    )
