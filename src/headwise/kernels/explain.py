"""Which kernel computes which reading, why, and what it costs: a report to print."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from headwise.kernels import pieces, sdpa
from headwise.kernels.choose import choose
from headwise.kernels.problem import Problem
from headwise.kernels.tiles import TILE_ELEMENTS, plan
from headwise.support.axes import human_bytes


@dataclass(frozen=True)
class Line:
    """One reading: who computes it, why, its multiply-adds and its memory beside the result."""

    reading: str
    kernel: str
    why: str
    operations: int
    memory: int

    def __str__(self) -> str:
        cost = f"{self.operations / 1e9:.2g} GFLOP, {human_bytes(self.memory)}"
        return f"{self.reading:<22} {self.kernel:<7} {cost:<22} {self.why}"


@dataclass(frozen=True)
class Explanation:
    """The answer of ``A.explain()``; print it."""

    lines: tuple[Line, ...]

    def __str__(self) -> str:
        head = f"{'reading':<22} {'kernel':<7} {'cost beside result':<22} why"
        return "\n".join([head, *map(str, self.lines)])

    __repr__ = __str__


def explain(problem: Problem, v: Tensor) -> Explanation:
    """What each reading of this matrix would run, for values shaped like ``v``."""
    batch, heads, queries, head_dim = problem.q.shape
    keys, value_dim = problem.k.shape[2], v.shape[-1]
    cells = _visible_cells(problem)
    choice = choose(problem, v)
    scores = 2 * cells * head_dim
    tiles = "row sums and columns come from tiles; fused kernels return none"
    width = problem.q.new_empty(0, dtype=problem.accumulate).element_size()
    tile_memory = _tile_memory(problem, cells)
    dense_memory = 3 * prod((batch, heads, queries, keys)) * width
    product = scores + 2 * cells * value_dim
    own = product
    if choice.division:
        own = (
            2
            * heads
            * sum(piece.cells for piece in choice.division.rectangles)
            * (head_dim + value_dim)
        )
    return Explanation(
        (
            Line("A @ v", choice.kernel, choice.why, own, _memory(problem, v)),
            Line("A.mT @ y", "tiled", "no fused kernel sums over queries", product, tile_memory),
            Line("statistics, diagonal", "tiled", tiles, scores, tile_memory),
            Line("head_average", "tiled", "heads of one row share a tile", scores, tile_memory),
            Line("rows, dense", "dense", "written down on request", scores, dense_memory),
        )
    )


def _memory(problem: Problem, v: Tensor) -> int:
    """Memory of ``A @ v`` beside its result; pieces come one after the other."""
    choice = choose(problem, v)
    if choice.kernel == "sdpa":
        return sdpa.copied_bytes(problem, v)
    if choice.kernel == "tiled":
        return _tile_memory(problem, _visible_cells(problem))
    assert choice.division is not None
    rows = pieces.matrices(problem, v, choice.division)
    return max((_memory(*matrix) for row in rows for matrix in row), default=0)


def _tile_memory(problem: Problem, cells: int) -> int:
    width = problem.q.new_empty(0, dtype=problem.accumulate).element_size()
    return min(2 * TILE_ELEMENTS, 2 * max(cells, 1)) * width


def _visible_cells(problem: Problem) -> int:
    """Entries of the matrix inside the tiles: what the bands leave, rounded up to tiles."""
    total = 0
    for tile in plan(problem):
        batches, kv_heads, group, rows, columns = tile.size(problem.group)
        total += batches * kv_heads * group * rows * columns
    return total
