"""All named maps of rows for given sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from headwise.diagnosis.moves.fused import (
    draft_exchanged_roles,
    draft_fused_kv_orders,
    draft_fused_orders,
)
from headwise.diagnosis.moves.heads import (
    draft_head_group_orders,
    draft_interleaved_heads,
    draft_repeated_first_shards,
    draft_rotary_maps,
)
from headwise.diagnosis.moves.maps import RowMap, make_distinct_maps
from headwise.diagnosis.moves.rows import RowSizes

FAMILIES = (
    draft_exchanged_roles,
    draft_fused_orders,
    draft_fused_kv_orders,
    draft_rotary_maps,
    draft_interleaved_heads,
    draft_head_group_orders,
    draft_repeated_first_shards,
)


@dataclass(frozen=True, eq=False)
class RowMapCatalogue:
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
def make_row_map_catalogue(sizes: RowSizes, columns: tuple[int, ...]) -> RowMapCatalogue:
    """Return the maps for these sizes.

    Args:
        sizes: of the rows.
        columns: of each role; rows of different widths are never exchanged.
    """
    drafts = chain.from_iterable(family(sizes) for family in FAMILIES)
    maps = make_distinct_maps(drafts, sizes, columns)
    permutations = tuple(row_map for row_map in maps if row_map.is_permutation)
    none = torch.empty(0, sizes.total_rows, dtype=torch.int64)
    return RowMapCatalogue(
        maps,
        torch.stack([x.index for x in maps]) if maps else none,
        permutations,
        torch.stack([x.inverse_index() for x in permutations]) if permutations else none,
    )
