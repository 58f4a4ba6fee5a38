"""Tables of a score bias by distance: the bias of each head as a function of ``key - query``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from headwise.masks.clause import Align, require_align


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
class GivenTable(ABC):
    """The bias of each head by distance, from the tensor that the caller gave."""

    given_tensor: Tensor

    @property
    def num_heads(self) -> int:
        """The number of heads; 1 where one row serves all of them."""
        return self.given_tensor.shape[0]

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> DistanceTable:
        """Return the table with ``function`` of its tensor."""
        return replace(self, given_tensor=function(self.given_tensor))

    @abstractmethod
    def __call__(self, distances: Int[Tensor, " n"], dtype: torch.dtype) -> Tensor:
        """(heads, n), with no rounding that ``dtype`` would not make as well."""


@dataclass(frozen=True, eq=False)
class ChangedTable(ABC):
    """The bias of each head by distance, from another table."""

    table: DistanceTable

    @property
    def num_heads(self) -> int:
        return self.table.num_heads

    @property
    def given_tensor(self) -> Tensor:
        return self.table.given_tensor

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> DistanceTable:
        return replace(self, table=self.table.map_tensors(function))

    @abstractmethod
    def __call__(self, distances: Int[Tensor, " n"], dtype: torch.dtype) -> Tensor:
        """As `GivenTable.__call__`."""


DistanceTable = GivenTable | ChangedTable


class AlibiTable(GivenTable):
    """``-slope * |distance|``; ``given_tensor`` holds the slopes, (heads,)."""

    def __call__(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        # In bfloat16 a slope times a distance is off by one part in 256: whole points of the score.
        exact = torch.promote_types(
            torch.promote_types(self.given_tensor.dtype, dtype), torch.float32
        )
        limits = torch.finfo(exact)  # a penalty beyond them hides no key
        slopes = self.given_tensor.to(exact)[:, None]
        return (-slopes * distances.abs()).clamp(limits.min, limits.max)


class RelativeTable(GivenTable):
    """One number for each distance from -reach to reach: (heads, 2 * reach + 1)."""

    def __call__(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        reach = self.given_tensor.shape[1] // 2
        return self.given_tensor[:, distances.clamp(-reach, reach) + reach]


@dataclass(frozen=True, eq=False)
class TableOfHeads(ChangedTable):
    """The table of chosen heads."""

    index: Tensor

    @property
    def num_heads(self) -> int:
        return 1 if self.table.num_heads == 1 else len(self.index)

    def __call__(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        rows = self.table(distances, dtype)
        return rows if rows.shape[0] == 1 else rows.index_select(0, self.index)


@dataclass(frozen=True, eq=False)
class ShiftedTable(ChangedTable):
    """The table of a part of a matrix, whose first query and key are not those of the whole."""

    shift: int

    def __call__(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        return self.table(distances + self.shift, dtype)
