"""Pooled map of the weights: sums over blocks of queries and blocks of keys, tile by tile.

Position i of n is in block floor(i * blocks / n). Queries are summed first, since adding whole rows
of a tile is fast; then the columns of these sums are summed to cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headwise.matrix.kernels.input import KernelInput
from headwise.matrix.kernels.tiles import Tile

# Blocks of at least this many columns are summed by `sum`: index_add_ adds the numbers in sequence,
# which rounds more.
LONG_BLOCK = 64


@dataclass(frozen=True)
class BlockMap:
    """Blocks of an axis that overlap a span of its positions."""

    span: slice
    length: int
    blocks: int

    @property
    def touched_blocks(self) -> slice:
        if self.span.start == self.span.stop:
            return slice(0, 0)
        first, last = (
            i * self.blocks // self.length for i in (self.span.start, self.span.stop - 1)
        )
        return slice(first, last + 1)

    @property
    def touched_block_count(self) -> int:
        return int(self.touched_blocks.stop - self.touched_blocks.start)

    def positions_per_block(self) -> list[int]:
        """Return the number of the span's positions in each touched block."""
        touched = range(self.touched_blocks.start, self.touched_blocks.stop + 1)
        starts = [-(-block * self.length // self.blocks) for block in touched]
        inside = [min(max(start, self.span.start), self.span.stop) for start in starts]
        return [stop - start for start, stop in pairwise(inside)]

    def index(self, like: Tensor) -> Tensor:
        """Return the block of each position, counted from the first touched block."""
        position = torch.arange(self.span.start, self.span.stop, device=like.device)
        return (position * self.blocks // self.length).sub_(self.touched_blocks.start)


def add_tile(cells: Tensor, problem: KernelInput, tile: Tile, p: Tensor) -> None:
    """Add the weights of one tile to their cells, (batch, heads, query blocks, key blocks)."""
    rows, columns = _block_maps_of_tile(cells, problem, tile)
    if rows.touched_block_count != p.shape[2]:
        summed = p.new_zeros(*p.shape[:2], rows.touched_block_count, p.shape[3])
        p = summed.index_add_(2, rows.index(p), p)
    if columns.touched_block_count * LONG_BLOCK <= p.shape[3]:
        p = torch.stack(
            [block.sum(-1) for block in p.split(columns.positions_per_block(), dim=-1)], dim=-1
        )
    elif columns.touched_block_count != p.shape[3]:
        summed = p.new_zeros(*p.shape[:3], columns.touched_block_count)
        p = summed.index_add_(3, columns.index(p), p)
    cells[tile.batches, tile.heads, rows.touched_blocks, columns.touched_blocks] += p


def expand_to_tile(cells: Tensor, problem: KernelInput, tile: Tile) -> Tensor:
    """Return for each entry of a tile the value of its cell: the gradient of `add_tile`."""
    rows, columns = _block_maps_of_tile(cells, problem, tile)
    cut = cells[tile.batches, tile.heads, rows.touched_blocks, columns.touched_blocks]
    return cut.index_select(3, columns.index(cut)).index_select(2, rows.index(cut))


def block_membership(length: int, blocks: int, like: Tensor) -> Tensor:
    """Return (length, blocks): 1 where a position is in a block, else 0."""
    block = torch.arange(length, device=like.device) * blocks // max(1, length)
    return (block[:, None] == torch.arange(blocks, device=like.device)).to(like.dtype)


def block_sizes(length: int, blocks: int, like: Tensor) -> Tensor:
    """Return the number of positions in each block, at least 1."""
    # Positive numbers only, since ONNX rounds quotients of integers towards 0.
    edges = (torch.arange(blocks + 1, device=like.device) * length + (blocks - 1)) // blocks
    return (edges[1:] - edges[:-1]).clamp(min=1).to(like.dtype)


def _block_maps_of_tile(
    cells: Tensor, problem: KernelInput, tile: Tile
) -> tuple[BlockMap, BlockMap]:
    rows = BlockMap(tile.rows, problem.q.shape[2], cells.shape[2])
    return rows, BlockMap(tile.columns, problem.k.shape[2], cells.shape[3])
