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
from headwise.kernels.problem import Problem
from headwise.kernels.tiles import TILE_ELEMENTS, KeysByColumn, Scratch, Tile, plan, tile_scores
from headwise.masks.bound_mask import BoundMask
from headwise.support.eager import without_autocast


@dataclass(frozen=True, eq=False)
class Observed:
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
    problem: Problem, *, with_scores: bool = False, with_lowest: bool = False
) -> Iterator[Observed]:
    """Every tile in which something may be attended, in one pass."""
    scratch, second, third = Scratch(problem), Scratch(problem), Scratch(problem)
    keys, bands = KeysByColumn(problem), problem.mask if _is_banded_only(problem) else None
    for tile in plan(problem):
        if tile.columns.start == tile.columns.stop:
            continue
        with without_autocast(problem.q):
            s, _, _ = tile_scores(problem, tile, keys, scratch)
            kept = third.view(*s.shape).copy_(s) if with_scores else None
            lowest = _lowest(bands, tile, s, second) if with_lowest else None
            allowed = _allowed(bands, tile, s)
            peak = s.amax(-1)
            sink = None if problem.sink is None else problem.sink[tile.heads]
            shift = tiled.shift_of(peak, sink)
            e, total, entropy = tiled.exponentials(problem, tile, s, shift, second, True)
            assert entropy is not None
            weights = e.div_(total[..., None])
        top = peak if sink is None else torch.maximum(peak, sink.to(peak.dtype)[:, None])
        yield Observed(
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


def seen_by(problem: Problem, queries: Tensor) -> Tensor:
    """How many of the chosen queries, (batch, queries) bool, may attend to each key.

    (batch, heads, keys), or (batch, 1, keys) where it is the same for all heads.
    """
    if not _is_banded_only(problem):
        return _seen_one_by_one(problem, queries)
    mask, length = problem.mask, problem.q.shape[2]
    if mask.query_lengths is not None:
        queries = queries & (
            torch.arange(length, device=queries.device) < mask.query_lengths[:, None]
        )
    before = torch.nn.functional.pad(queries.long().cumsum(-1), (1, 0))
    keys = torch.arange(mask.keys, device=queries.device)
    first = torch.zeros_like(keys) if mask.upper is None else (keys - mask.upper).clamp(0, length)
    stop = torch.full_like(keys, length)
    if mask.lower is not None:
        stop = (keys - mask.lower + 1).clamp(0, length)
    found = (before[:, stop] - before[:, first]).clamp(min=0)
    if mask.key_lengths is not None:
        found = found.masked_fill(keys >= mask.key_lengths[:, None], 0)
    return found[:, None]


def _seen_one_by_one(problem: Problem, queries: Tensor) -> Tensor:
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


def _is_banded_only(problem: Problem) -> bool:
    """Whether bands and lengths are all that may hide."""
    return not (problem.bias.may_hide or problem.mask.dense or problem.mask.segment_ids)


def _lowest(bands: BoundMask | None, tile: Tile, s: Tensor, spare: Scratch) -> Tensor:
    """The smallest score of each row that is not hidden; inf without one.

    ``bands``: the mask, where bands and lengths are all that hides.
    """
    start, stop = tile.columns.start, tile.columns.stop
    left, right = start, start  # keys in [left, right) are allowed to every row
    if bands is not None and bands.is_plain:
        left, right = bands.band_edges(tile.rows.start, tile.rows.stop)
        left = min(max(left, start), stop)
        right = min(max(right, left), stop)
    found = s.new_full(s.shape[:3], torch.inf)
    if left < right:
        found = s[..., left - start : right - start].amin(-1)
    for first, last in ((start, left), (right, stop)):
        if first < last:
            edge = s[..., first - start : last - start]
            shown = spare.view(*edge.shape)
            torch.nan_to_num(edge, torch.nan, neginf=torch.inf, posinf=torch.inf, out=shown)
            found = torch.minimum(found, shown.amin(-1))
    return found


def _allowed(mask: BoundMask | None, tile: Tile, s: Tensor) -> Tensor:
    """Keys that each query may attend to, (batches, heads, rows); ``mask`` as in `_lowest`."""
    if mask is None:
        return (s > -torch.inf).sum(-1)
    rows = torch.arange(tile.rows.start, tile.rows.stop, device=s.device)
    last = torch.full_like(rows, mask.keys - 1)
    first = torch.zeros_like(rows)
    if mask.upper is not None:
        last = torch.minimum(last, rows + mask.upper)
    if mask.lower is not None:
        first = torch.maximum(first, rows + mask.lower)
    last, first = last[None], first[None]
    if mask.key_lengths is not None:
        last = torch.minimum(last, mask.key_lengths[tile.batches, None] - 1)
    if mask.query_lengths is not None:
        given_up = rows >= mask.query_lengths[tile.batches, None]
        last = last.masked_fill(given_up, -1)
    return (last - first + 1).clamp(min=0)[:, None].expand(s.shape[:3])
