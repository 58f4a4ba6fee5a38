"""A head's weights as small pictures: by the offset from the query, and as a map."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from headwise.scanning.captured_call import CELLS
from headwise.scanning.statistics.rows import EXCLUDED, SHARE
from headwise.scanning.statistics.statistic import (
    Definition,
    Part,
    Parts,
    Summary,
    TileStatistic,
    mean_over,
)
from headwise.scanning.statistics.tile import WeightTile


class OffsetProfile(TileStatistic):
    """The weight on each of the places around the query's own."""

    OFFSETS = 16
    definition = Definition(
        name="offset_profile",
        formula="for each offset o from −16 to +16: mean over queries i of A[i, i + o]",
        unit=SHARE,
        excluded="padded queries, and those for which no key stands at the offset",
        source="diagonals: Kovaleva et al. 2019, arXiv:1908.08593; positional heads: Voita et al. "
        "2019, arXiv:1905.09418",
        axes=("offset",),
    )
    needs = ("own_key",)
    reach = OFFSETS
    parts = mean_over(2 * OFFSETS + 1)

    def update(self, gathered: Summary, tile: WeightTile) -> None:
        offsets = torch.arange(-self.OFFSETS, self.OFFSETS + 1, device=tile.weights.device)
        place = tile.own[:, None] + offsets
        real = tile.call.real_keys[tile.batches]
        exists = (place >= 0) & (place < real.shape[1])
        stands = real[:, place.clamp(0, real.shape[1] - 1)] & exists
        counted = tile.counted[..., None] & stands[:, None]
        found = tile.band(self.OFFSETS).double().masked_fill(~counted, 0.0)
        gathered["sum"][tile.heads] += found.sum((0, 2))
        gathered["count"][tile.heads] += counted.sum((0, 2))


class Map(TileStatistic):
    """The weight from each block of queries to each block of keys."""

    definition = Definition(
        name="map",
        formula=f"cell (a, b): mean over the queries of block a of Σⱼ A[i, j] over the keys of "
        f"block b; the i-th of n real tokens is in block ⌊{CELLS} i / n⌋",
        unit="share of the weight, 0 to 1; a row of cells sums to 1, less a sink's share",
        excluded=EXCLUDED + "; blocks that no query is in have no value. A sequence shorter than "
        "the map leaves gaps: a coarser one (pyramid) has none",
        source="headwise.AttentionMatrix.pool",
        axes=("query_block", "key_block"),
    )
    parts: ClassVar[Parts] = {
        "sum": Part(axes=(CELLS, CELLS)),
        "count": Part(axes=(CELLS,), values="count"),
    }

    def update(self, gathered: Summary, tile: WeightTile) -> None:
        blocks, weights = tile.by_cell
        key_cells = tile.call.key_cells[tile.batches, tile.columns].to(weights.dtype)
        found = torch.matmul(weights, key_cells[:, None])
        gathered["sum"][tile.heads, blocks] += found.double().sum(0)
        cells = tile.call.query_cells[tile.batches, tile.rows]
        inside = torch.arange(blocks.start, blocks.stop, device=cells.device)
        member = (cells[..., None] == inside).to(weights.dtype)
        counted = torch.matmul(tile.counted.to(weights.dtype), member)
        gathered["count"][tile.heads, blocks] += counted.double().sum(0)

    def result(self, summary: Summary) -> Tensor:
        """(heads, query_block, key_block)."""
        return summary["sum"] / summary["count"][..., None]


def pyramid(summary: Summary) -> dict[int, Tensor]:
    """The map of a summary at every size: 64 x 64, 32 x 32, ..., 1 x 1, as (heads, size, size).

    Each is exact, as if the sequences had been cut into so many blocks: blocks of half as many
    cells are made of two whole ones.
    """
    total, count = summary["sum"], summary["count"]
    maps = {}
    while True:
        size = total.shape[-1]
        maps[size] = total / count[..., None]
        if size == 1:
            return maps
        total = total.unflatten(1, (size // 2, 2)).unflatten(3, (size // 2, 2)).sum((2, 4))
        count = count.unflatten(1, (size // 2, 2)).sum(2)
