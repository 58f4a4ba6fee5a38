"""A map of the weights by cells: blocks of queries by blocks of keys, summed inside the tiles.

Position i of n is in block floor(i * blocks / n). Blocks of queries are summed first, since adding
whole rows of a tile is the fast direction; what is left of its columns is then summed to cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headwise.kernels.bound_scores import BoundScores
from headwise.kernels.tiles import Tile

# Blocks of at least so many columns are summed one by one: adding up by an index, one number after
# the other, would round more.
LONG_BLOCK = 64


@dataclass(frozen=True)
class BlockMap:
    """The blocks that a run of positions touches, of all blocks of an axis."""

    span: slice
    length: int
    blocks: int

    @property
    def touched(self) -> slice:
        if self.span.start == self.span.stop:
            return slice(0, 0)
        first, last = (
            i * self.blocks // self.length for i in (self.span.start, self.span.stop - 1)
        )
        return slice(first, last + 1)

    @property
    def count(self) -> int:
        return int(self.touched.stop - self.touched.start)

    def sizes(self) -> list[int]:
        """How many positions of the run each touched block has."""
        touched = range(self.touched.start, self.touched.stop + 1)
        starts = [-(-block * self.length // self.blocks) for block in touched]
        inside = [min(max(start, self.span.start), self.span.stop) for start in starts]
        return [stop - start for start, stop in pairwise(inside)]

    def index(self, like: Tensor) -> Tensor:
        """For each position its block, counted from the first that is touched."""
        position = torch.arange(self.span.start, self.span.stop, device=like.device)
        return (position * self.blocks // self.length).sub_(self.touched.start)


def add_tile(cells: Tensor, problem: BoundScores, tile: Tile, p: Tensor) -> None:
    """Add the weights of one tile to their cells, (batch, heads, query blocks, key blocks)."""
    rows, columns = _blocks_of_tile(cells, problem, tile)
    if rows.count != p.shape[2]:
        summed = p.new_zeros(*p.shape[:2], rows.count, p.shape[3])
        p = summed.index_add_(2, rows.index(p), p)
    if columns.count * LONG_BLOCK <= p.shape[3]:
        p = torch.stack([block.sum(-1) for block in p.split(columns.sizes(), dim=-1)], dim=-1)
    elif columns.count != p.shape[3]:
        summed = p.new_zeros(*p.shape[:3], columns.count)
        p = summed.index_add_(3, columns.index(p), p)
    cells[tile.batches, tile.heads, rows.touched, columns.touched] += p


def of_tile(cells: Tensor, problem: BoundScores, tile: Tile) -> Tensor:
    """For each entry of a tile the number of its cell: the gradient of `add_tile`."""
    rows, columns = _blocks_of_tile(cells, problem, tile)
    cut = cells[tile.batches, tile.heads, rows.touched, columns.touched]
    return cut.index_select(3, columns.index(cut)).index_select(2, rows.index(cut))


def membership(length: int, blocks: int, like: Tensor) -> Tensor:
    """(length, blocks): 1 where a position is in a block."""
    block = torch.arange(length, device=like.device) * blocks // max(1, length)
    return (block[:, None] == torch.arange(blocks, device=like.device)).to(like.dtype)


def sizes(length: int, blocks: int, like: Tensor) -> Tensor:
    """How many positions each block has, at least 1."""
    # Of positive numbers: ONNX rounds quotients of integers towards 0.
    edges = (torch.arange(blocks + 1, device=like.device) * length + (blocks - 1)) // blocks
    return (edges[1:] - edges[:-1]).clamp(min=1).to(like.dtype)


def _blocks_of_tile(cells: Tensor, problem: BoundScores, tile: Tile) -> tuple[BlockMap, BlockMap]:
    rows = BlockMap(tile.rows, problem.q.shape[2], cells.shape[2])
    return rows, BlockMap(tile.columns, problem.k.shape[2], cells.shape[3])
