"""Tables of a score bias by distance: the bias of each head as a function of ``key - query``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from headwise.masks.clause import Align, require_align


@runtime_checkable
class DistanceTable(Protocol):
    """The bias of each head as a function of the distance ``key - query``."""

    @property
    def num_heads(self) -> int:
        """The number of heads; 1 where one row serves all of them."""
        ...

    @property
    def given_tensor(self) -> Tensor:
        """The tensor that the caller gave."""
        ...

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> DistanceTable:
        """Return the table with ``function`` of its tensor."""
        ...

    def __call__(self, distances: Int[Tensor, " n"], dtype: torch.dtype) -> Tensor:
        """(heads, n), with no rounding that ``dtype`` would not make as well."""
        ...


@dataclass(frozen=True, eq=False)
class ByDistance:
    """A distance table and its name; distances count from ``align``."""

    name: str
    table: DistanceTable
    align: Align | None

    def __post_init__(self) -> None:
        require_align(self.align)

    @property
    def name_in_messages(self) -> str:
        """The bias as a message names it."""
        return f"a {self.name} bias"


# Values, not functions: a copy holds its own tensors, and a pickle holds them at all.
@dataclass(frozen=True, eq=False)
class AlibiTable:
    """``-slope * |distance|``; ``given_tensor`` holds the slopes, (heads,)."""

    given_tensor: Tensor

    @property
    def num_heads(self) -> int:
        """See `DistanceTable.num_heads`."""
        return self.given_tensor.shape[0]

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> DistanceTable:
        """See `DistanceTable.map_tensors`."""
        return replace(self, given_tensor=function(self.given_tensor))

    def __call__(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        """See `DistanceTable.__call__`."""
        # In bfloat16 a slope times a distance is off by one part in 256: whole points of the score.
        exact = torch.promote_types(
            torch.promote_types(self.given_tensor.dtype, dtype), torch.float32
        )
        limits = torch.finfo(exact)  # a penalty beyond them hides no key
        return (-self.given_tensor.to(exact)[:, None] * distances.abs()).clamp(
            limits.min, limits.max
        )


@dataclass(frozen=True, eq=False)
class RelativeTable:
    """One number for each distance from -reach to reach: (heads, 2 * reach + 1)."""

    given_tensor: Tensor

    @property
    def num_heads(self) -> int:
        """See `DistanceTable.num_heads`."""
        return self.given_tensor.shape[0]

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> DistanceTable:
        """See `DistanceTable.map_tensors`."""
        return replace(self, given_tensor=function(self.given_tensor))

    def __call__(self, distances: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """See `DistanceTable.__call__`."""
        reach = self.given_tensor.shape[1] // 2
        return self.given_tensor[:, distances.clamp(-reach, reach) + reach]


@dataclass(frozen=True, eq=False)
class TableOfHeads:
    """The table of chosen heads."""

    table: DistanceTable
    index: Tensor

    @property
    def num_heads(self) -> int:
        """See `DistanceTable.num_heads`."""
        return 1 if self.table.num_heads == 1 else len(self.index)

    @property
    def given_tensor(self) -> Tensor:
        """See `DistanceTable.given_tensor`."""
        return self.table.given_tensor

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> DistanceTable:
        """See `DistanceTable.map_tensors`."""
        return replace(self, table=self.table.map_tensors(function))

    def __call__(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        """See `DistanceTable.__call__`."""
        rows = self.table(distances, dtype)
        return rows if rows.shape[0] == 1 else rows.index_select(0, self.index)


@dataclass(frozen=True, eq=False)
class ShiftedTable:
    """The table of a part of a matrix, whose first query and key are not those of the whole."""

    table: DistanceTable
    shift: int

    @property
    def num_heads(self) -> int:
        """See `DistanceTable.num_heads`."""
        return self.table.num_heads

    @property
    def given_tensor(self) -> Tensor:
        """See `DistanceTable.given_tensor`."""
        return self.table.given_tensor

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> DistanceTable:
        """See `DistanceTable.map_tensors`."""
        return replace(self, table=self.table.map_tensors(function))

    def __call__(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        """See `DistanceTable.__call__`."""
        return self.table(distances + self.shift, dtype)
