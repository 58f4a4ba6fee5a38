"""All named maps of rows for given sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from headwise.diagnosis.moves.fused_maps import exchanged_roles, fused_orders, fused_pairs
from headwise.diagnosis.moves.head_maps import first_shards, head_orders, interleaved_heads
from headwise.diagnosis.moves.projection_rows import RowSizes
from headwise.diagnosis.moves.rotary_maps import rotary_maps
from headwise.diagnosis.moves.row_map import RowMap, grouped_maps

FAMILIES = (
    exchanged_roles,
    fused_orders,
    fused_pairs,
    rotary_maps,
    interleaved_heads,
    head_orders,
    first_shards,
)


@dataclass(frozen=True, eq=False)
class MapCatalogue:
    """The maps for some sizes.

    Attributes:
        maps: of distinct effect, the most usual first; none moves nothing.
        indices: (maps, rows).
        permutations: the maps that have an inverse.
        inverses: (permutations, rows).
    """

    maps: tuple[RowMap, ...]
    indices: Tensor
    permutations: tuple[RowMap, ...]
    inverses: Tensor


@lru_cache(maxsize=8)
def map_catalogue(sizes: RowSizes, columns: tuple[int, ...]) -> MapCatalogue:
    """Return the maps for these sizes.

    Args:
        sizes: of the rows.
        columns: of each role; rows of different widths are never exchanged.
    """
    drafts = chain.from_iterable(family(sizes) for family in FAMILIES)
    maps = grouped_maps(drafts, sizes, columns)
    permutations = tuple(row_map for row_map in maps if row_map.is_permutation)
    none = torch.empty(0, sizes.rows, dtype=torch.int64)
    return MapCatalogue(
        maps,
        torch.stack([x.index for x in maps]) if maps else none,
        permutations,
        torch.stack([x.inverse() for x in permutations]) if permutations else none,
    )
