"""The weights of a matrix, tile by tile, for whoever wants to reduce them in a way of their own.

Every query's row is whole in one tile, so what is said of a row is final when its tile is seen. The
tiles' memory is reused: what is kept of one must be copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels import tiled
from headwise.kernels.bound_scores import BoundScores
from headwise.kernels.tiles import (
    TILE_ELEMENTS,
    KeysByColumn,
    Scratch,
    Tile,
    edges,
    plan,
    tile_scores,
)
from headwise.masks.bound_mask import BoundMask
from headwise.masks.clause import Span
from headwise.support.tracing import without_autocast


@dataclass(frozen=True, eq=False)
class ObservedTile:
    """One tile; shapes are (batches, heads, rows) or (batches, heads, rows, columns) of it.

    Attributes:
        place: where in the matrix the tile lies.
        weights: a row sums to 1, less the sink's share; to 0 where nothing may be attended.
        scores: hidden ones are -inf; None where they were not asked for.
        highest: the largest score; -inf where nothing may be attended.
        lowest: the smallest score that is not hidden; inf where nothing may be attended, None
            where it was not asked for.
        maximum: the largest weight.
        logsumexp: of the scores, and the sink; -inf where there is neither.
        entropy: nats, the sink counting as one more outcome.
        sink: the sink's share; None where there is no sink.
        allowed: how many keys may be attended.
    """

    place: Tile
    weights: Tensor
    scores: Tensor | None
    highest: Tensor
    lowest: Tensor | None
    maximum: Tensor
    logsumexp: Tensor
    entropy: Tensor
    sink: Tensor | None
    allowed: Tensor


def observe(
    problem: BoundScores, *, with_scores: bool = False, with_lowest: bool = False
) -> Iterator[ObservedTile]:
    """Every tile in which something may be attended, in one pass."""
    scratch, second, third = Scratch(problem), Scratch(problem), Scratch(problem)
    keys, mask = KeysByColumn(problem), _mask_alone(problem)
    for tile in plan(problem):
        if tile.columns.start == tile.columns.stop:
            continue
        with without_autocast(problem.q):
            s, _, _ = tile_scores(problem, tile, keys, scratch)
            kept = third.view(*s.shape).copy_(s) if with_scores else None
            lowest = _lowest(mask, tile, s, second) if with_lowest else None
            allowed = _allowed(mask, tile, s)
            peak = s.amax(-1)
            sink = None if problem.sink is None else problem.sink[tile.heads]
            shift = tiled.shift_of(peak, sink)
            e, total, entropy = tiled.exponentials(problem, tile, s, shift, second, True)
            assert entropy is not None
            weights = e.div_(total[..., None])
        top = peak if sink is None else torch.maximum(peak, sink.to(peak.dtype)[:, None])
        yield ObservedTile(
            place=tile,
            weights=weights,
            scores=kept,
            highest=peak,
            lowest=lowest,
            maximum=torch.exp(peak - shift) / total,
            logsumexp=top + total.log(),
            entropy=entropy,
            sink=None if sink is None else (sink.to(s.dtype)[:, None] - shift).exp() / total,
            allowed=allowed,
        )


def seen_by(problem: BoundScores, queries: Tensor) -> Tensor:
    """How many of the chosen queries, (batch, queries) bool, may attend to each key.

    (batch, heads, keys), or (batch, 1, keys) where it is the same for all heads.
    """
    batch, length = queries.shape
    mask = _mask_alone(problem)
    found = None if mask is None else mask.interval(_rows(slice(0, length), queries))
    if mask is None or found is None:
        return _seen_one_by_one(problem, queries)
    # One more from a query's first key on, one fewer from its stop on.
    keys, counts = mask.sizes.keys, queries.long()
    changes = counts.new_zeros(batch, keys + 1)
    for places, change in zip(found, (counts, -counts), strict=True):
        changes.scatter_add_(1, places.clamp(0, keys).expand(batch, -1), change)
    return changes.cumsum(1)[:, None, :keys]


def _seen_one_by_one(problem: BoundScores, queries: Tensor) -> Tensor:
    """The same for a mask of any kind: it is written down, some rows at a time."""
    batch, heads, length, _ = problem.q.shape
    keys = problem.k.shape[2]
    found = torch.zeros(batch, heads, keys, dtype=torch.long, device=queries.device)
    step = max(1, TILE_ELEMENTS // max(1, batch * heads * keys))
    for rows in torch.arange(length, device=queries.device).split(step):
        allowed = problem.mask.at(rows)
        for part in problem.bias.at(rows):
            allowed = allowed & (part > -torch.inf)
        found += (allowed & queries[:, None, rows, None]).sum(2)
    return found


def _mask_alone(problem: BoundScores) -> BoundMask | None:
    """The mask, where nothing else may hide a key."""
    return None if problem.bias.may_hide else problem.mask


def _rows(rows: slice, like: Tensor) -> Tensor:
    return torch.arange(rows.start, rows.stop, device=like.device)


def _lowest(mask: BoundMask | None, tile: Tile, s: Tensor, spare: Scratch) -> Tensor:
    """The smallest score of each row that is not hidden; inf without one. See `_mask_alone`."""
    start, opened = tile.columns.start, Span(0, 0)
    if mask is not None:
        opened = mask.open_range(tile.rows.start, tile.rows.stop)
    opened = opened.within(Span(start, tile.columns.stop))
    found = s.new_full(s.shape[:3], torch.inf)
    if opened.size:
        found = s[..., opened.first - start : opened.stop - start].amin(-1)
    for edge in edges(tile.columns, opened):
        hidden = s[..., edge.start - start : edge.stop - start]
        shown = spare.view(*hidden.shape)
        torch.nan_to_num(hidden, torch.nan, neginf=torch.inf, posinf=torch.inf, out=shown)
        found = torch.minimum(found, shown.amin(-1))
    return found


def _allowed(mask: BoundMask | None, tile: Tile, s: Tensor) -> Tensor:
    """Keys that each query may attend to, (batches, heads, rows). See `_mask_alone`."""
    found = None if mask is None else mask.interval(_rows(tile.rows, s), tile.batches)
    if found is None:
        return (s > -torch.inf).sum(-1)
    first, stop = found
    return (stop - first)[:, None].expand(s.shape[:3])
