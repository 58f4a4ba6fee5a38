"""Division of the attention matrix into tiles, and the scores of one tile.

A tile holds consecutive queries of some heads with all keys inside their bands. A row is always
complete in one tile: the softmax needs no rescaling and row statistics are exact in one pass.
Memory grows with keys, never with queries x keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from headwise.masks.bound import BoundMask
from headwise.masks.clause import Clause, Span
from headwise.masks.score_bias import cast_biases_for_sum
from headwise.matrix.kernels.kernel import KernelInput, Task
from headwise.support import private_torch
from headwise.support.processor import may_use_onednn, product_here

# 8 MB of float32. On two cores, half of it took 13 % longer and twice of it 10 % (docs/log.md).
TILE_ELEMENTS = 2**21
# As many times larger are tiles on CUDA, up to 1/64 of its memory. Not measured: `make gpu` does.
CUDA_TILES = 32
# Rows of queries for each kv head up to which a copy of the keys costs more than it saves; measured
# on an AMD EPYC: 8 ms against 68 for one row, 35 against 99 for 64.
FEW_ROWS = 64
# Multiply-adds of a lane, and its rows, from which oneDNN's product takes 0.4 to 0.7 of bmm's time,
# where that is faster (`headwise.support.processor`). Below it is slower.
PRODUCT_PAYS_FROM, FEWEST_ROWS = 2**22, 64
PRODUCT_ELEMENTS = 2**18  # of a block of it: 2**16 takes 1.3 times as long, one block 1.6 times


@dataclass(frozen=True)
class Tile:
    """Index ranges of one tile; ``heads`` are the query heads of ``kv_heads``."""

    batches: slice
    kv_heads: slice
    heads: slice
    rows: slice
    columns: slice

    def axis_sizes(self, group: int) -> tuple[int, int, int, int, int]:
        """Return the sizes (batches, kv_heads, group, rows, columns)."""
        return (
            self.batches.stop - self.batches.start,
            self.kv_heads.stop - self.kv_heads.start,
            group,
            self.rows.stop - self.rows.start,
            self.columns.stop - self.columns.start,
        )


def tile_elements(device: torch.device) -> int:
    """Return the elements of a tile on a device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return TILE_ELEMENTS
    memory = torch.cuda.get_device_properties(device).total_memory
    return TILE_ELEMENTS * max(1, min(CUDA_TILES, memory // (64 * 4 * TILE_ELEMENTS)))


def plan_tiles(problem: KernelInput, *, all_heads: bool = False, parts: int = 1) -> Iterator[Tile]:
    """Yield tiles that cover every row once; ``all_heads`` puts all heads of a row in one tile.

    Tiles are ``parts`` times smaller.
    """
    batch, heads, queries, _ = problem.q.shape
    kv_heads, keys = problem.k.shape[1:3]
    if 0 in (batch, heads, queries):
        return
    group, span = heads // kv_heads, problem.mask.max_visible_keys
    elements = max(1, tile_elements(problem.q.device) // parts)
    rows = min(queries, max(128, span))
    in_tile = group * (kv_heads if all_heads else 1) * max(1, min(keys, span + rows))
    rows = max(1, min(rows, elements // in_tile))
    lanes = max(1, elements // (group * rows * max(1, min(keys, span + rows))))
    kv_step = kv_heads if all_heads else min(kv_heads, lanes)
    batch_step = max(1, lanes // kv_heads) if kv_step == kv_heads else 1
    for b in range(0, batch, batch_step):
        for h in range(0, kv_heads, kv_step):
            kv = slice(h, min(h + kv_step, kv_heads))
            for i in range(0, queries, rows):
                stop = min(i + rows, queries)
                yield Tile(
                    batches=slice(b, min(b + batch_step, batch)),
                    kv_heads=kv,
                    heads=slice(kv.start * group, kv.stop * group),
                    rows=slice(i, stop),
                    columns=slice(*problem.mask.key_range(i, stop)),
                )


def count_cells(problem: KernelInput) -> int:
    """Return the number of matrix entries in all tiles: those inside the bands, rounded up."""
    return sum(prod(tile.axis_sizes(problem.group)) for tile in plan_tiles(problem))


def count_operations(task: Task) -> int:
    """Return the operations of the scores and every product, two for a multiply-add."""
    widths = [task.problem.q.shape[3], *(t.shape[3] for t in (task.v, task.y) if t is not None)]
    return 2 * count_cells(task.problem) * sum(widths)


class Scratch:
    """Buffer that all tiles reuse, since fresh memory costs more time than the arithmetic on it."""

    def __init__(self, problem: KernelInput) -> None:
        self._memory = problem.q.new_empty(0, dtype=problem.accumulation_dtype)

    def view(self, *shape: int) -> Tensor:
        """Return uninitialised memory of this shape, valid until the next call."""
        count = prod(shape)
        if self._memory.numel() < count:
            self._memory = self._memory.new_empty(count)
        return self._memory[:count].view(shape)


class KeysByColumn:
    """Keys of a tile's heads, (head_dim, keys), in memory as a product of many rows is faster."""

    def __init__(self, problem: KernelInput) -> None:
        self._problem = problem
        self._heads: tuple[slice, slice] | None = None  # of the last tiles, which come together
        self._columns = problem.k

    def cut(self, tile: Tile) -> Tensor:
        """Return the keys of a tile, (batches * kv_heads, head_dim, columns)."""
        heads = (tile.batches, tile.kv_heads)
        if heads != self._heads:
            k = self._problem.k[heads].to(self._problem.accumulation_dtype).flatten(0, 1)
            if self._problem.q.shape[2] * self._problem.group <= FEW_ROWS:
                self._columns = k.mT
            elif product_here().product == "onednn":  # which takes keys by row
                self._columns = k.contiguous().mT
            else:
                self._columns = k.mT.contiguous()
            self._heads = heads
        return self._columns[:, :, tile.columns]


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``a @ b`` for each lane, (lanes, rows, columns), perhaps in the memory of ``out``."""
    (lanes, rows, width), columns = a.shape, b.shape[2]
    if not (rows >= FEWEST_ROWS and rows * width * columns >= PRODUCT_PAYS_FROM and _is_fast(a, b)):
        return torch.bmm(a, b, out=out)
    out = a.new_empty(lanes, rows, columns) if out is None else out
    # oneDNN writes new memory, which is cheap in small blocks alone. Of a part of a row it makes a
    # product without blocks, a thousand times as slow.
    step = max(FEWEST_ROWS, PRODUCT_ELEMENTS // columns)
    for x, y, lane in zip(a, b, out, strict=True):
        weight = y.mT.contiguous() if y.stride(0) == 1 else y.contiguous().mT
        for block, part in zip(x.contiguous().split(step), lane.split(step), strict=True):
            part.copy_(private_torch.onednn_linear(block, weight, None))
    return out


def multiply_transposed(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a.mT @ b`` for each lane; the large ``a`` is not moved in memory."""
    return multiply(b.mT.contiguous(), a).mT


def sum_entries(entries: Tensor, weights: Tensor) -> Tensor:
    """Return ``entries @ weights.mT`` for each lane, (lanes, entries, rows), of a few entries.

    The weights are read once. Their product with a single column is a slow one of BLAS.
    """
    (_, count, columns), rows = entries.shape, weights.shape[1]
    if not (count * columns * rows >= PRODUCT_PAYS_FROM and _is_fast(entries, weights)):
        return torch.bmm(entries, weights.mT)
    sums = entries.new_empty(len(entries), count, rows)
    for part, lane, of_lane in zip(sums, entries, weights, strict=True):
        part.copy_(private_torch.onednn_linear(lane, of_lane.contiguous(), None))
    return sums


def _is_fast(a: Tensor, b: Tensor) -> bool:
    """True if oneDNN's product is faster, whose operands need rows, or columns of b, in memory."""
    return (
        a.stride(2) == 1
        and 1 in b.stride()[1:]
        and private_torch.HAS_ONEDNN_LINEAR
        and product_here().product == "onednn"
        and may_use_onednn(a, b)
    )


def cut_tile(tensor: Tensor, tile: Tile, rows: slice, heads: slice, dtype: torch.dtype) -> Tensor:
    """Cut (batch, heads, length, width) to a tile: (batches * heads, length, width)."""
    return tensor[tile.batches, heads, rows].to(dtype).flatten(0, 1)


def cut_tile_by_kv_head(tensor: Tensor, tile: Tile, group: int, dtype: torch.dtype) -> Tensor:
    """Concatenate the rows of each kv head's query heads: (kv lanes, group * rows, width)."""
    cut = tensor[tile.batches, tile.heads, tile.rows].to(dtype)
    batches, kv_heads, _, rows, _ = tile.axis_sizes(group)
    return cut.reshape(batches * kv_heads, group * rows, cut.shape[-1])


def tile_scores(
    problem: KernelInput,
    tile: Tile,
    keys: KeysByColumn,
    scratch: Scratch,
    slope: Scratch | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the scores of one tile in the reference's order: scale, softcap, score bias, mask.

    Return scores (batches, heads, rows, columns) in scratch memory, the scaled queries
    (batches * kv_heads, group * rows, head_dim), and with ``slope`` the softcap's derivative.
    """
    batches, kv_heads, group, rows, columns = tile.axis_sizes(problem.group)
    q = cut_tile_by_kv_head(problem.q, tile, group, problem.accumulation_dtype) * problem.scale
    s = scratch.view(batches, kv_heads * group, rows, columns)
    multiply(q, keys.cut(tile), s.view(len(q), group * rows, columns))
    derivative = None
    if problem.softcap is not None:
        s.div_(problem.softcap).tanh_()
        if slope is not None:
            derivative = slope.view(*s.shape)
            torch.mul(s, s, out=derivative).neg_().add_(1)
        s.mul_(problem.softcap)
    parts = problem.bias.parts_of_block(tile.batches, tile.heads, tile.rows, tile.columns)
    for part in cast_biases_for_sum(parts, s.dtype):
        s.add_(part)
    _apply_mask(problem, tile, s)
    return s, q, derivative


def sum_diagonals(block: Tensor) -> Tensor:
    """Sum (heads, rows, columns) over equal column - row: (heads, rows + columns - 1)."""
    heads, rows, columns = block.shape
    # Flip the rows and shorten them by one column: row i then starts i positions to the right.
    padded = torch.nn.functional.pad(block.flip(1), (0, rows)).flatten(1)
    return padded[:, : rows * (rows + columns - 1)].view(heads, rows, -1).sum(1)


def _apply_mask(problem: KernelInput, tile: Tile, s: Tensor) -> None:
    """Write -inf where the mask hides; for a band, only in the columns at its edges."""
    mask, whole = problem.mask, tile.columns
    without_range = []
    for clause in mask.clauses:
        open_range = clause.fully_allowed_key_range(tile.rows.start, tile.rows.stop)
        if open_range is None:
            without_range.append(clause)
            continue
        for columns in yield_subranges_outside_span(whole, open_range):
            _hide_by_clauses(s, mask, tile, columns, (clause,))
    if without_range:
        _hide_by_clauses(s, mask, tile, whole, without_range)


def _hide_by_clauses(
    s: Tensor, mask: BoundMask, tile: Tile, columns: slice, clauses: Iterable[Clause]
) -> None:
    allowed = mask.evaluate_block(tile.batches, tile.heads, tile.rows, columns, clauses)
    assert allowed is not None
    first = tile.columns.start
    s[..., columns.start - first : columns.stop - first].masked_fill_(~allowed, -torch.inf)


def yield_subranges_outside_span(whole: slice, inside: Span) -> Iterator[slice]:
    """Yield the nonempty parts of a range before and after another range."""
    left = min(max(inside.first, whole.start), whole.stop)
    right = min(max(inside.stop, left), whole.stop)
    for part in (slice(whole.start, left), slice(right, whole.stop)):
        if part.start < part.stop:
            yield part


# ---- pooled map: sums over blocks of queries and blocks of keys ---------------------------------

# Blocks of at least this many columns are summed by `sum`: index_add_ adds the numbers in sequence,
# which rounds more.
LONG_BLOCK = 64


@dataclass(frozen=True)
class BlockMap:
    """Blocks of an axis that overlap a span of its positions; i of n is in i * blocks // n."""

    span: slice
    length: int
    blocks: int

    @property
    def touched_blocks(self) -> slice:
        if self.span.start == self.span.stop:
            return slice(0, 0)
        first = self.span.start * self.blocks // self.length
        return slice(first, (self.span.stop - 1) * self.blocks // self.length + 1)

    @property
    def touched_block_count(self) -> int:
        return int(self.touched_blocks.stop - self.touched_blocks.start)

    def positions_per_block(self) -> list[int]:
        touched = range(self.touched_blocks.start, self.touched_blocks.stop + 1)
        starts = [-(-block * self.length // self.blocks) for block in touched]
        inside = [min(max(start, self.span.start), self.span.stop) for start in starts]
        return [stop - start for start, stop in pairwise(inside)]

    def index(self, like: Tensor) -> Tensor:
        """Return the block of each position, counted from the first touched block."""
        position = torch.arange(self.span.start, self.span.stop, device=like.device)
        return (position * self.blocks // self.length).sub_(self.touched_blocks.start)


def add_tile(cells: Tensor, problem: KernelInput, tile: Tile, p: Tensor) -> None:
    """Add the weights of one tile to their cells, (batch, heads, query blocks, key blocks).

    Queries first: adding whole rows of a tile is fast.
    """
    rows, columns = _block_maps_of_tile(cells, problem, tile)
    if rows.touched_block_count != p.shape[2]:
        summed = p.new_zeros(*p.shape[:2], rows.touched_block_count, p.shape[3])
        p = summed.index_add_(2, rows.index(p), p)
    if columns.touched_block_count * LONG_BLOCK <= p.shape[3]:
        blocks = p.split(columns.positions_per_block(), dim=-1)
        p = torch.stack([block.sum(-1) for block in blocks], dim=-1)
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
