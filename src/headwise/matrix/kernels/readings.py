"""Readings of the weights beside products: rows, diagonals, largest weights, tiles and counts.

A custom reduction iterates over tiles. Every query's row is complete in one tile, so its statistics
are final. Tiles share their memory: copy what you keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise.function import stages
from headwise.masks.bound import BoundMask
from headwise.masks.clause import Span
from headwise.masks.score_bias import cast_biases_for_sum
from headwise.matrix.kernels import tiled, tiled_op, tiles
from headwise.matrix.kernels.dispatch import run_kernel
from headwise.matrix.kernels.kernel import KernelInput, Task
from headwise.matrix.kernels.tiles import Scratch, Tile
from headwise.support.tracing import needs_plain_torch, without_autocast


def weights_of_queries(problem: KernelInput, index: Tensor) -> Tensor:
    with without_autocast(problem.q):
        s = problem.scores_of_queries(index)
        return stages.weights_from_scores(s, problem.sink).to(problem.q.dtype)


def diagonal_weights(problem: KernelInput, offset: int) -> Tensor:
    """Return the weights of the pairs (query i, key i + offset), (batch, heads, pairs)."""
    (_, heads, queries, _), keys = problem.q.shape, problem.k.shape[2]
    first, stop = max(0, -offset), max(max(0, -offset), min(queries, keys - offset))
    rows = torch.arange(first, stop, device=problem.q.device)
    exact = problem.accumulation_dtype
    q = problem.q[:, :, first:stop].to(exact)
    k = problem.k[:, :, first + offset : stop + offset].to(exact)
    s = problem.scale * (q * stages.repeat_kv_heads(k, heads=heads)).sum(-1)
    if problem.softcap is not None:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    for part in cast_biases_for_sum(problem.bias.parts_at_pairs(rows, rows + offset), exact):
        s = s + part
    s = s.masked_fill(~problem.mask.evaluate_pairs(rows, rows + offset), -torch.inf)
    result = run_kernel(Task(problem))
    sink = None if problem.sink is None else problem.sink.detach()
    shift = tiled.softmax_shift(result.peak.detach(), sink)[..., first:stop]
    return torch.exp(s - shift - result.log_sum[..., first:stop]).to(problem.q.dtype)


def largest_weights(problem: KernelInput, count: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest weights and their keys, in blocks of queries of about one tile."""
    batch, heads, _, _ = problem.q.shape
    step = max(1, tiles.TILE_ELEMENTS // max(1, batch * heads * problem.k.shape[2]))
    # ONNX cannot split at a length that varies, and its graph is dense in any case.
    blocks = (index,) if torch.onnx.is_in_onnx_export() else torch.split(index, step)
    pairs = [_largest_weights_of_query_block(problem, count, block) for block in blocks]
    values, indices = zip(*pairs, strict=True)
    return torch.cat(values, 2), torch.cat(indices, 2)


def _largest_weights_of_query_block(
    problem: KernelInput, count: int, index: Tensor
) -> tuple[Tensor, Tensor]:
    tensors, form = tiled_op.separate_tensors((tiled_op.pack_arguments(problem), index))
    has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    # torch.func does not support checkpoint.
    if not has_gradient or needs_plain_torch():
        return torch.topk(weights_of_queries(problem, index), count, dim=-1)

    # Recompute rows in the backward pass: saved rows would add up to queries x keys. Every tensor
    # is an argument, so that torch saves it and detects in-place changes.
    def recomputed(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        packed, rows = tiled_op.restore_tensors(tensors, form)
        weights = weights_of_queries(tiled_op.unpack_arguments(packed), rows)
        return torch.topk(weights, count, dim=-1)

    largest: tuple[Tensor, Tensor] = checkpoint(
        recomputed, *tensors, use_reentrant=False, preserve_rng_state=False
    )
    return largest


# ---- tiles -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ObservedTile:
    """Weights and row statistics of one tile.

    ``weights`` and ``scores`` are (batches, heads, rows, columns); the other tensors are
    (batches, heads, rows), one number for each query.
    """

    place: Tile  # index ranges in the matrix
    weights: Tensor  # a row sums to 1 less the sink's share, or to 0 without allowed keys
    scores: Tensor | None  # -inf where hidden; None unless requested by ``with_scores``
    highest: Tensor  # the largest score; -inf without allowed keys
    lowest: Tensor | None  # the smallest score that is not hidden, or inf; by ``with_lowest``
    maximum: Tensor  # the largest weight
    logsumexp: Tensor  # of the scores and the sink; -inf without either
    entropy: Tensor  # in nats; the sink counts as an outcome
    sink: Tensor | None  # the sink's weight; None without a sink
    allowed: Tensor  # the number of keys that the query may attend to


def yield_observed_tiles(
    problem: KernelInput, with_scores: bool, with_lowest: bool
) -> Iterator[ObservedTile]:
    """Yield every tile with an allowed key, in one pass over the matrix."""
    scratch, second, third = Scratch(problem), Scratch(problem), Scratch(problem)
    keys, mask = tiles.KeysByColumn(problem), _mask_if_bias_hides_nothing(problem)
    count_allowed = _AllowedKeys(mask)
    for tile in tiles.plan_tiles(problem):
        if tile.columns.start == tile.columns.stop:
            continue
        # Not around the yield: that would turn off the caller's gradients.
        with torch.no_grad(), without_autocast(problem.q):
            s, _, _ = tiles.tile_scores(problem, tile, keys, scratch)
            scores = third.view(*s.shape).copy_(s) if with_scores else None
            lowest = _lowest_visible_score_per_row(mask, tile, s, second) if with_lowest else None
            allowed, peak = count_allowed(tile, s), s.amax(-1)
            sink = None if problem.sink is None else problem.sink[tile.heads]
            shift = tiled.softmax_shift(peak, sink)
            e, total, entropy = tiled.compute_exponentials(problem, tile, s, shift, second, True)
            assert entropy is not None
            weights = e.div_(total[..., None])
            top = peak if sink is None else torch.maximum(peak, sink.to(peak.dtype)[:, None])
            observed = ObservedTile(
                place=tile,
                weights=weights,
                scores=scores,
                highest=peak,
                lowest=lowest,
                maximum=torch.exp(peak - shift) / total,
                logsumexp=top + total.log(),
                entropy=entropy,
                sink=None if sink is None else (sink.to(s.dtype)[:, None] - shift).exp() / total,
                allowed=allowed,
            )
        yield observed


def count_attending_queries(problem: KernelInput, queries: Tensor) -> Tensor:
    """Count the queries (batch, queries) that may attend to each key: (batch, heads or 1, keys)."""
    batch, length = queries.shape
    mask, every = _mask_if_bias_hides_nothing(problem), torch.arange(length, device=queries.device)
    interval = None if mask is None else mask.key_interval_per_query(every)
    if mask is None or interval is None:
        return _count_attending_by_dense_mask(problem, queries)
    # +1 at a query's first key, -1 at its stop; the running sum is the count.
    keys, counts = mask.sizes.keys, queries.long()
    changes = counts.new_zeros(batch, keys + 1)
    for positions, change in zip(interval, (counts, -counts), strict=True):
        changes.scatter_add_(1, positions.clamp(0, keys).expand(batch, -1), change)
    return changes.cumsum(1)[:, None, :keys]


def _count_attending_by_dense_mask(problem: KernelInput, queries: Tensor) -> Tensor:
    (batch, heads, length, _), keys = problem.q.shape, problem.k.shape[2]
    counts = torch.zeros(batch, heads, keys, dtype=torch.long, device=queries.device)
    step = max(1, tiles.TILE_ELEMENTS // max(1, batch * heads * keys))
    for rows in torch.arange(length, device=queries.device).split(step):
        allowed = problem.mask.evaluate_rows(rows)
        for part in problem.bias.parts_at_rows(rows):
            allowed = allowed & (part > -torch.inf)
        counts += (allowed & queries[:, None, rows, None]).sum(2)
    return counts


def _mask_if_bias_hides_nothing(problem: KernelInput) -> BoundMask | None:
    return None if problem.bias.may_hide else problem.mask


def _lowest_visible_score_per_row(
    mask: BoundMask | None, tile: Tile, s: Tensor, spare: Scratch
) -> Tensor:
    """Return the smallest score of each row that is not hidden, or inf."""
    start, opened = tile.columns.start, Span(0, 0)
    if mask is not None:
        opened = mask.fully_allowed_key_range(tile.rows.start, tile.rows.stop)
    opened = opened.intersection(Span(start, tile.columns.stop))
    lowest = s.new_full(s.shape[:3], torch.inf)
    if opened.size:
        lowest = s[..., opened.first - start : opened.stop - start].amin(-1)
    for edge in tiles.yield_subranges_outside_span(tile.columns, opened):
        scores = s[..., edge.start - start : edge.stop - start]
        finite = spare.view(*scores.shape)
        torch.nan_to_num(scores, torch.nan, neginf=torch.inf, posinf=torch.inf, out=finite)
        lowest = torch.minimum(lowest, finite.amin(-1))
    return lowest


class _AllowedKeys:
    """Numbers of the keys that each query may attend to; tiles of other heads have the same."""

    def __init__(self, mask: BoundMask | None) -> None:
        self._mask = mask
        self._known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, tile: Tile, s: Tensor) -> Tensor:
        """Count the keys of each query of the tile, (batches, heads, rows)."""
        at = (tile.batches.start, tile.batches.stop, tile.rows.start, tile.rows.stop)
        if (counts := self._known.get(at)) is None:
            rows = torch.arange(*at[2:], device=s.device)
            mask = self._mask
            interval = None if mask is None else mask.key_interval_per_query(rows, tile.batches)
            if interval is None:
                return (s > -torch.inf).sum(-1)
            counts = self._known[at] = (interval[1] - interval[0])[:, None]
        return counts.expand(s.shape[:3])
