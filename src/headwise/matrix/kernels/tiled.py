"""Tiled kernel: results of the attention matrix in one pass, their gradients in a second one.

For the scores s of one query, shifted by m = max(s, sink) (0 in a row without keys and sink):

    e = exp(s - m)            Z = sum e + exp(sink - m)            weights p = e / Z
    out         = (e @ v) / Z                      head outputs
    transposed  = p^T @ y                          weighted sums over queries
    received    = p^T @ 1
    average     = mean of p over heads
    cells       = sum of p over a block of queries and a block of keys
    log_sum     = log Z                            logsumexp = m + log_sum
    entropy     = log Z + sum p (m - s)            the sink counts as an outcome

All terms of the entropy are nonnegative; ``logsumexp - sum p s`` would cancel at large scores.
Weights are divided by Z, not by exp(logsumexp), so that rows sum to 1.

Backward: every result is a function of p, or of log Z, whose gradient for fixed m is that of the
logsumexp. All gradients are therefore summed in dp = dL/dp, followed by one softmax backward:

    dp = dout v^T + y dtransposed^T + dreceived + daverage / heads + dcells - dentropy log p
    ds = p (dp - sum p dp + dlog_sum)              (+ dpeak at the row's maximum)

(the softmax backward of FlashAttention, arXiv:2205.14135 appendix B, for more results).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.matrix.kernels import tiles
from headwise.matrix.kernels.kernel import KernelInput, KernelResult, Requested, accumulation_dtype
from headwise.matrix.kernels.tiles import KeysByColumn, Scratch, Tile, cut_tile

# exp(x) is computed as exp2(x log2 e), three times faster on CPU. The shift is subtracted first, so
# rounding is relative to s - m <= 0: at most 0.37 eps of the largest weight.
LOG2_E = 1.4426950408889634


def least_shifted_score(dtype: torch.dtype) -> float:
    """Return a finite bound: shifted scores below it have weight 0 in ``dtype``."""
    return -800.0 if dtype == torch.float64 else -200.0


def softmax_shift(peak: Tensor, sink: Tensor | None) -> Tensor:
    """Return m, the maximum of scores and sink, or 0 if it is -inf; the shape is that of peak."""
    if sink is not None:
        peak = torch.maximum(peak, sink.to(peak.dtype)[:, None])
    return peak.masked_fill(peak == -torch.inf, 0.0)


def row_logsumexp(sink: Tensor | None, result: KernelResult) -> Tensor:
    """Return log sum exp of each row's scores and sink, (batch, heads, queries)."""
    peak = result.peak.detach()
    if sink is not None:
        peak = torch.maximum(peak, sink.detach().to(peak.dtype)[:, None])
    return peak + result.log_sum


def row_largest_weight(sink: Tensor | None, result: KernelResult) -> Tensor:
    """Return the largest weight of each row, (batch, heads, queries)."""
    shift = softmax_shift(result.peak.detach(), None if sink is None else sink.detach())
    return torch.exp(result.peak - shift - result.log_sum)


# ---- forward -----------------------------------------------------------------------------------


def compute_results(
    problem: KernelInput, v: Tensor | None, y: Tensor | None, requested: Requested
) -> KernelResult:
    result = initial_result(problem.q, problem.k, v, y, requested)
    # Sums over queries stay in the accumulation dtype and are cast once at the end.
    transposed = result.transposed.to(problem.accumulation_dtype)
    scratch, second, keys = Scratch(problem), Scratch(problem), KeysByColumn(problem)
    for tile in tiles.plan_tiles(problem, all_heads=requested.average):
        at = tile.batches, tile.heads, tile.rows
        if tile.columns.start == tile.columns.stop:
            continue
        s, _, _ = tiles.tile_scores(problem, tile, keys, scratch)
        result.peak[at] = s.amax(-1)
        shift = softmax_shift(result.peak[at], _cut_sink(problem, tile))
        e, total, entropy = compute_exponentials(problem, tile, s, shift, second, requested.entropy)
        result.log_sum[at] = total.log()
        if entropy is not None:
            result.entropy[at] = entropy
        if v is not None:
            values = cut_tile(v, tile, tile.columns, tile.kv_heads, e.dtype)
            out = tiles.multiply(e.view(len(values), -1, e.shape[-1]), values)
            result.out[at] = out.view(*e.shape[:3], -1) / total[..., None]
        _add_column_sums(tile, e, total, y, transposed, result.received)
        if requested.average or result.cells.numel():
            e.div_(total[..., None])
        if result.cells.numel():
            tiles.add_tile(result.cells, problem, tile, e)
        if requested.average:
            mean = e.sum(1).div_(e.shape[1])
            result.average[tile.batches, tile.rows, tile.columns] = mean.to(result.average.dtype)
    return result._replace(transposed=transposed.to(problem.q.dtype))


def initial_result(
    q: Tensor, k: Tensor, v: Tensor | None, y: Tensor | None, requested: Requested
) -> KernelResult:
    """Return the result before the first tile: that of queries that may attend to nothing."""
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    exact = accumulation_dtype(q.dtype)
    rows, columns = (batch, heads, queries), (batch, heads, keys)
    blocks = (batch, heads, requested.query_blocks, requested.key_blocks)

    def zeros(shape: tuple[int, ...], dtype: torch.dtype, needed: bool) -> Tensor:
        return q.new_zeros(shape if needed else (0,), dtype=dtype)

    return KernelResult(
        out=zeros((*rows, v.shape[-1] if v is not None else 0), q.dtype, v is not None),
        transposed=zeros((*columns, y.shape[-1] if y is not None else 0), q.dtype, y is not None),
        peak=q.new_full(rows, -torch.inf, dtype=exact),
        log_sum=zeros(rows, exact, True),
        entropy=zeros(rows, exact, requested.entropy),
        received=zeros(columns, exact, requested.received),
        average=zeros((batch, queries, keys), q.dtype, requested.average),
        cells=zeros(blocks, exact, requested.query_blocks > 0),
    )


def _cut_sink(problem: KernelInput, tile: Tile) -> Tensor | None:
    return None if problem.sink is None else problem.sink[tile.heads]


def compute_exponentials(
    problem: KernelInput, tile: Tile, s: Tensor, shift: Tensor, second: Scratch, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return e (in scratch memory), Z (1 in rows without keys and sink), and entropy or None."""
    s.sub_(shift[..., None])
    entropy = None
    if with_entropy:
        s.clamp_(min=least_shifted_score(s.dtype)).mul_(LOG2_E)
        e = torch.exp2(s, out=second.view(*s.shape))
        entropy = s.mul_(e).sum(-1).div_(-LOG2_E)
    else:
        e = s.mul_(LOG2_E).exp2_()
    total = e.sum(-1)
    sink = _cut_sink(problem, tile)
    if sink is not None:
        gap = (sink.to(s.dtype)[:, None] - shift).clamp_(min=least_shifted_score(s.dtype))
        total = total + gap.exp()
        entropy = entropy - gap * gap.exp() if entropy is not None else None
    total = total.masked_fill(total == 0, 1.0)
    return e, total, None if entropy is None else entropy / total + total.log()


def _add_column_sums(
    tile: Tile, e: Tensor, total: Tensor, y: Tensor | None, transposed: Tensor, received: Tensor
) -> None:
    """Add this tile's part of p^T @ y and p^T @ 1."""
    batches, heads, rows, columns = e.shape
    per_head = e.view(batches * heads, rows, columns)
    at = tile.batches, tile.heads, tile.columns
    if y is not None:
        divided = y[tile.batches, tile.heads, tile.rows].to(e.dtype) / total[..., None]
        divided = divided.reshape(batches * heads, rows, y.shape[-1])
        transposed[at] += tiles.multiply_transposed(per_head, divided).unflatten(
            0, (batches, heads)
        )
    if received.numel():
        share = total.reciprocal().view(batches * heads, 1, rows)
        received[at] += torch.bmm(share, per_head).view(batches, heads, columns)


# ---- backward ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class UpstreamGradients:
    """Gradients of the results; None for results without a gradient."""

    out: Tensor | None = None
    transposed: Tensor | None = None
    peak: Tensor | None = None
    log_sum: Tensor | None = None
    entropy: Tensor | None = None
    received: Tensor | None = None
    average: Tensor | None = None
    cells: Tensor | None = None
    row_means: Tensor | None = None  # sum p dp of rows of which the problem is a part


def compute_gradients(
    problem: KernelInput,
    v: Tensor | None,
    y: Tensor | None,
    row_statistics: tuple[Tensor, Tensor],
    upstream: UpstreamGradients,
    bias_needs: tuple[bool, list[bool]],
) -> Gradients:
    """Recompute each tile's weights from the row's peak and log_sum; add its gradients."""
    gradients = Gradients(problem, v, y, upstream, bias_needs)
    scratch, second, slope = Scratch(problem), Scratch(problem), Scratch(problem)
    k = problem.k.to(problem.accumulation_dtype).contiguous()
    keys = KeysByColumn(problem)
    # Three buffers of half a tile: both passes take 0.80 to 0.88 of the time of whole ones.
    for tile in tiles.plan_tiles(problem, parts=2):
        if tile.columns.start == tile.columns.stop and problem.sink is None:
            continue
        s, q, derivative = tiles.tile_scores(problem, tile, keys, scratch, slope)
        peak, log_sum = (t[tile.batches, tile.heads, tile.rows] for t in row_statistics)
        # The maximum is recomputed, since another tiling than the saved peak's rounds differently.
        needs_peak = upstream.peak is not None and s.shape[-1] > 0
        at_peak = s == s.amax(-1, keepdim=True) if needs_peak else None
        shift = softmax_shift(peak, _cut_sink(problem, tile))
        s.sub_(shift[..., None]).sub_(log_sum[..., None])
        dp = second.view(*s.shape)
        gradients.write_gradient_of_weights(tile, s, dp)
        p = s.mul_(LOG2_E).exp2_()
        gradients.add_to_v_and_y(tile, p)
        ds = gradients.gradient_of_scores(tile, p, dp, log_sum, shift)
        if at_peak is not None and upstream.peak is not None:
            dpeak = upstream.peak[tile.batches, tile.heads, tile.rows, None]
            share = dpeak / at_peak.sum(-1, keepdim=True)  # of equal scores, as in amax
            ds.add_(torch.where(at_peak & share.isfinite(), share, 0.0))
        gradients.add_to_bias(tile, ds)
        if derivative is not None:
            ds.mul_(derivative)
        gradients.add_to_queries_and_keys(tile, ds, q, k)
    return gradients


class Gradients:
    """Gradients of the inputs in the accumulation dtype, added tile by tile; None if not needed."""

    def __init__(
        self,
        problem: KernelInput,
        v: Tensor | None,
        y: Tensor | None,
        upstream: UpstreamGradients,
        bias_needs: tuple[bool, list[bool]],
    ) -> None:
        def zeros(tensor: Tensor | None, needed: bool = True) -> Any:
            if tensor is None or not needed:
                return None
            return tensor.new_zeros(tensor.shape, dtype=problem.accumulation_dtype)

        self._problem, self._upstream, self._values, self._rows_of_y = problem, upstream, v, y
        self.q, self.k, self.v, self.y = map(zeros, (problem.q, problem.k, v, y))
        self.sink, self.table = zeros(problem.sink), zeros(problem.bias.table, bias_needs[0])
        pairs = zip(problem.bias.tensors, bias_needs[1], strict=True)
        self.tensors = [zeros(*pair) for pair in pairs]

    def write_gradient_of_weights(self, tile: Tile, log_p: Tensor, dp: Tensor) -> None:
        """Write dp, and clamp ``log_p`` in place."""
        batches, heads, rows, columns = log_p.shape
        upstream, v, y, exact = self._upstream, self._values, self._rows_of_y, log_p.dtype
        group = self._problem.group
        if upstream.out is not None and v is not None:
            values = cut_tile(v, tile, tile.columns, tile.kv_heads, exact)
            dout = tiles.cut_tile_by_kv_head(upstream.out, tile, group, exact)
            tiles.multiply(dout, values.mT, dp.view(len(dout), group * rows, columns))
        else:
            dp.zero_()
        if upstream.transposed is not None and y is not None:
            rows_of_y = cut_tile(y, tile, tile.rows, tile.heads, exact)
            received = cut_tile(upstream.transposed, tile, tile.columns, tile.heads, exact)
            dp.view(batches * heads, rows, columns).baddbmm_(rows_of_y, received.mT)
        if upstream.received is not None:
            dp.add_(upstream.received[tile.batches, tile.heads, None, tile.columns])
        if upstream.average is not None:
            share = upstream.average[tile.batches, None, tile.rows, tile.columns].to(exact)
            dp.add_(share, alpha=1.0 / self._problem.q.shape[1])
        if upstream.cells is not None:
            dp.add_(tiles.expand_to_tile(upstream.cells, self._problem, tile))
        if upstream.entropy is not None:
            log_p.clamp_(min=least_shifted_score(exact))
            dentropy = upstream.entropy[tile.batches, tile.heads, tile.rows, None]
            dp.addcmul_(log_p, dentropy, value=-1.0)

    def add_to_v_and_y(self, tile: Tile, p: Tensor) -> None:
        """Add dv = p^T dout and write dy = p dtransposed."""
        batches, heads, rows, columns = p.shape
        group, upstream = self._problem.group, self._upstream
        if upstream.out is not None and self.v is not None:
            dout = tiles.cut_tile_by_kv_head(upstream.out, tile, group, p.dtype)
            dv = tiles.multiply_transposed(p.view(len(dout), group * rows, columns), dout)
            at = tile.batches, tile.kv_heads, tile.columns
            self.v[at] += dv.unflatten(0, (batches, heads // group))
        if upstream.transposed is not None and self.y is not None:
            received = cut_tile(upstream.transposed, tile, tile.columns, tile.heads, p.dtype)
            dy = tiles.multiply(p.view(batches * heads, rows, columns), received)
            self.y[tile.batches, tile.heads, tile.rows] = dy.unflatten(0, (batches, heads))

    def gradient_of_scores(
        self, tile: Tile, p: Tensor, dp: Tensor, log_sum: Tensor, shift: Tensor
    ) -> Tensor:
        """Return ds = p (dp - sum p dp + dlog_sum) in dp's memory; add the sink's gradient."""
        at, upstream = (tile.batches, tile.heads, tile.rows), self._upstream
        known, given = upstream.row_means, upstream.log_sum
        mean = torch.linalg.vecdot(p, dp) if known is None else known[at].clone()
        constant = torch.zeros_like(mean) if given is None else given[at].clone()
        sink = _cut_sink(self._problem, tile)
        if sink is not None and self.sink is not None:
            gap = sink.to(p.dtype)[:, None] - shift - log_sum
            gap.clamp_(min=least_shifted_score(p.dtype))
            p_sink = gap.exp()
            entropy = upstream.entropy
            dp_sink = torch.zeros_like(gap) if entropy is None else -gap * entropy[at]
            mean += p_sink * dp_sink
            self.sink[tile.heads] += (p_sink * (dp_sink - mean + constant)).sum((0, 2))
        return dp.add_((constant - mean)[..., None]).mul_(p)

    def add_to_queries_and_keys(self, tile: Tile, ds: Tensor, q: Tensor, k: Tensor) -> None:
        """Write dq = scale ds k and add dk = ds^T (scale q); ``q`` is already scaled."""
        batches, heads, rows, columns = ds.shape
        group = self._problem.group
        ds = ds.view(len(q), group * rows, columns)
        keys = cut_tile(k, tile, tile.columns, tile.kv_heads, k.dtype)
        dq = tiles.multiply(ds, keys).mul_(self._problem.scale)
        self.q[tile.batches, tile.heads, tile.rows] = dq.view(batches, heads, rows, q.shape[-1])
        dk = tiles.multiply_transposed(ds, q).unflatten(0, (batches, heads // group))
        self.k[tile.batches, tile.kv_heads, tile.columns] += dk

    def add_to_bias(self, tile: Tile, ds: Tensor) -> None:
        index = (tile.batches, tile.heads, tile.rows, tile.columns)
        for gradient in self.tensors:
            if gradient is not None:
                sizes = zip(index, gradient.shape, strict=True)
                part = tuple(i if n != 1 else slice(None) for i, n in sizes)
                shared = [axis for axis, n in enumerate(gradient.shape) if n == 1]
                gradient[part] += ds.sum(shared, keepdim=True) if shared else ds
        if self.table is not None:
            diagonals = tiles.sum_diagonals(ds.sum(0))
            first = tile.columns.start - tile.rows.stop + self._problem.mask.sizes.queries
            span = slice(first, first + diagonals.shape[-1])
            if self.table.shape[0] == 1:
                self.table[0, span] += diagonals.sum(0)
            else:
                self.table[tile.heads, span] += diagonals
