"""Interface of mask clauses. A new kind of mask is one class, in one file of ``clauses/``.

A clause decides which (query, key) pairs may attend. A clause is bound to sizes, evaluated one
block at a time, and lowered to (kind, tensors, integers), which an operator of torch accepts;
`from_lowered` restores the clause. Kernels use this interface only, and no kind by its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from headwise.errors import MaskError, OptionError
from headwise.support.text import describe_value

WHOLE = slice(None)
BOUNDLESS = 2**62  # keys: a distance that bounds nothing

# A range of positions, or chosen ones.
Index = slice | Tensor


class MatrixSizes(NamedTuple):
    """The sizes of an attention matrix."""

    batch: int
    heads: int
    queries: int
    keys: int


class MaskBlock(NamedTuple):
    """A part of a matrix: batches, heads, rows (queries) and columns (keys)."""

    batches: slice
    heads: slice
    rows: Index
    columns: slice
    device: torch.device


class Span(NamedTuple):
    """Positions [first, stop)."""

    first: int
    stop: int

    @property
    def size(self) -> int:
        """Number of positions."""
        return max(0, self.stop - self.first)

    def intersection(self, other: Span) -> Span:
        return Span(max(self.first, other.first), min(self.stop, other.stop))


class MatrixPart(NamedTuple):
    """Some sequences of a batch, some queries and some keys."""

    batches: Span
    queries: Span
    keys: Span


class Rectangle(NamedTuple):
    """Some queries and some keys of one sequence."""

    batch: int
    queries: Span
    keys: Span

    @property
    def as_matrix_part(self) -> MatrixPart:
        return MatrixPart(Span(self.batch, self.batch + 1), self.queries, self.keys)

    @property
    def cell_count(self) -> int:
        return self.queries.size * self.keys.size


class LoweredClause(NamedTuple):
    """A clause as an operator carries it."""

    kind: str
    tensors: tuple[Tensor, ...]
    integers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Clause(ABC):
    """One condition of a mask."""

    kind: ClassVar[str]  # the name under which a lowered clause is found again
    tensor_fields: ClassVar[tuple[str, ...]] = ()  # that are lowered
    integer_fields: ClassVar[tuple[str, ...]] = ()  # that are lowered
    # True for the distance ``key - query`` alone: it holds also where tokens are packed or dropped
    is_relative: ClassVar[bool] = False
    names_every_key: ClassVar[bool] = False  # True if its tensors fix the number of keys
    is_written: ClassVar[bool] = False  # True for a tensor over the matrix

    # ---- at known sizes ---------------------------------------------------------------------

    @abstractmethod
    def bind(self, sizes: MatrixSizes) -> Clause:
        """The clause at these sizes. Raise MaskError where it was made for others.

        What is bound may be bound again, at the same sizes, and stays what it is.
        """

    @abstractmethod
    def evaluate_block(self, block: MaskBlock, sizes: MatrixSizes) -> Tensor:
        """True = may attend, broadcastable to (batches, heads, rows, columns) of the block."""

    @abstractmethod
    def evaluate_pairs(self, rows: Tensor, columns: Tensor, sizes: MatrixSizes) -> Tensor:
        """True = may attend, at (query, key) pairs: broadcastable to (batch, heads, pairs)."""

    @abstractmethod
    def cut_to_part(self, place: MatrixPart, sizes: MatrixSizes) -> Clause:
        """Return the clause of one part of the matrix, for a mask of that size."""

    @abstractmethod
    def broadcast_shape(self, sizes: MatrixSizes) -> MatrixSizes:
        """Return its size along the four axes as a dense tensor; 1 where it broadcasts."""

    # ---- hints for kernels; a subclass may leave each as it is ------------------------------

    def merged(self, other: Clause) -> Clause | None:  # noqa: ARG002
        """Merge this bound clause with another one; None if they cannot be merged."""
        return None

    def hides(self, sizes: MatrixSizes) -> bool:  # noqa: ARG002
        """False where it is known to allow everything at these sizes."""
        return True

    def key_range(self, first: int, stop: int) -> Span:  # noqa: ARG002
        """Keys outside are hidden from every query in [first, stop)."""
        return Span(0, BOUNDLESS)

    def fully_allowed_key_range(self, first: int, stop: int) -> Span | None:  # noqa: ARG002
        """Keys inside are allowed to every query in [first, stop); None: not known."""
        return None

    def key_interval_per_query(
        self,
        rows: Tensor,  # noqa: ARG002
        batches: slice,  # noqa: ARG002
        sizes: MatrixSizes,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor] | None:
        """First key and stop of what each query may attend to, where that is one run of keys.

        Both broadcast to (batches, rows). They may lie beyond the keys, and stop before first.
        """
        return None

    def rectangles(self, sizes: MatrixSizes) -> list[list[Rectangle]] | None:  # noqa: ARG002
        """For each sequence disjoint rectangles that hold all allowed pairs, and no other."""
        return None

    def real_tokens(self, axis: int, sizes: MatrixSizes) -> Tensor | None:  # noqa: ARG002
        """(batch or 1, length of axis 2 or 3): False where all is hidden; None: unknown."""
        return None

    def first_real_keys(self) -> Tensor | None:
        """(batch,): the place of each sequence's first token; None where that is 0."""
        return None

    def known_sizes(self) -> MatrixSizes:
        """The least sizes that it can be bound to; 1 where any will do."""
        return MatrixSizes(1, 1, 1, 1)

    def aligned(self, align: str) -> Clause:
        """The clause with this alignment, where it needs one and names none."""
        if getattr(self, "align", "not needed") is not None:
            return self
        changes: dict[str, Any] = {"align": align}
        return replace(self, **changes)

    def of_heads(self, index: Tensor) -> Clause:  # noqa: ARG002
        """The clause of chosen heads."""
        return self

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that it holds, and that must be on the device of the matrix."""
        return tuple(getattr(self, name) for name in self.tensor_fields)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Clause:
        """The clause with ``function`` of each of its tensors, once where two fields share one."""
        tensors = {name: getattr(self, name) for name in self.tensor_fields}
        changed = {id(tensor): function(tensor) for tensor in tensors.values()}
        return replace(self, **{name: changed[id(tensor)] for name, tensor in tensors.items()})

    def lower_for_operator(self) -> LoweredClause:
        """Return a bound clause as values that an operator accepts."""
        tensors, integers = (
            tuple(getattr(self, name) for name in names)
            for names in (self.tensor_fields, self.integer_fields)
        )
        return LoweredClause(self.kind, tensors, integers)

    @classmethod
    def from_lowered(cls, tensors: tuple[Tensor, ...], integers: tuple[int, ...]) -> Clause:
        """Return the bound clause that was lowered to these."""
        names = (*cls.tensor_fields, *cls.integer_fields)
        return cls(**dict(zip(names, (*tensors, *integers), strict=True)))


class IntervalClause(Clause):
    """A clause that leaves each query one run of keys; a subclass has `key_interval_per_query`."""

    @abstractmethod
    def key_interval_per_query(
        self, rows: Tensor, batches: slice, sizes: MatrixSizes
    ) -> tuple[Tensor, Tensor]:
        """First key and stop for each query; see `Clause.key_interval_per_query`."""

    def evaluate_block(self, block: MaskBlock, sizes: MatrixSizes) -> Tensor:
        """Compare the columns of a block with each query's run of keys."""
        rows = positions_of_index(block.rows, sizes.queries, block.device)
        columns = positions_of_index(block.columns, sizes.keys, block.device)
        first, stop = self.key_interval_per_query(rows, block.batches, sizes)
        allowed = (columns >= first[:, :, None]) & (columns < stop[:, :, None])
        return allowed[:, None]

    def evaluate_pairs(self, rows: Tensor, columns: Tensor, sizes: MatrixSizes) -> Tensor:
        """Compare the key of a pair with its query's run of keys."""
        first, stop = self.key_interval_per_query(rows, WHOLE, sizes)
        return ((columns >= first) & (columns < stop))[:, None]


def positions_of_index(index: Index, size: int, device: torch.device) -> Tensor:
    return index if isinstance(index, Tensor) else torch.arange(size, device=device)[index]


def index_axes(tensor: Tensor, *index: Index) -> Tensor:
    """Index each axis of a broadcastable tensor, leaving axes of size one as they are."""
    for dim, part in enumerate(index):
        if tensor.shape[dim] != 1:
            if isinstance(part, Tensor):
                tensor = tensor.index_select(dim, part)
            else:
                tensor = tensor[(WHOLE,) * dim + (part,)]
    return tensor


def read_pairs(tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """A tensor broadcastable to (batch, heads, queries, keys), read at (query, key) pairs."""
    row_index = rows if tensor.shape[2] != 1 else torch.zeros_like(rows)
    column_index = columns if tensor.shape[3] != 1 else torch.zeros_like(columns)
    return tensor[:, :, row_index, column_index]


Align = Literal["top-left", "bottom-right"]


def require_align(align: str | None) -> None:
    if align not in (None, "top-left", "bottom-right"):
        raise OptionError(
            saw=f"align={describe_value(align)}",
            needed='"top-left", "bottom-right", or None where queries == keys',
            do='a key/value cache means align="bottom-right"',
        )


def resolve_align(align: Align | None, queries: int, keys: int, *, what: str) -> int:
    """Return the key position that is aligned with query 0: 0, or keys - queries.

    Raises:
        MaskError: queries != keys and no alignment was named.
    """
    if align == "bottom-right":
        return keys - queries
    if align is None and queries != keys:
        raise MaskError(
            saw=f"{what} over {queries} queries and {keys} keys, without an alignment",
            needed='align="top-left" (first query at first key) or align="bottom-right" '
            "(last query at last key, what a key/value cache means)",
            do='name it where it is made: align="bottom-right", or align="top-left"',
        )
    return 0
