"""Ring attention: keys and values travel from rank to rank, and no rank holds all of them.

Each rank attends with its queries to the part that has arrived, and merges: for outputs o_i of
weights with the maximum m_i and the sum Z_i of exp(s - m_i),

    m = max m_i,    w_i = Z_i exp(m_i - m),    o = sum w_i o_i / (sum w_i + exp(sink - m))

The sink is added once. Parts are computed and merged in the accumulation dtype. The backward pass
sends the keys and values around again, computes the weights of each part from m and Z of the whole
row, and takes sum p dp = dout . out of the whole row, so that ds = p (dp - dout . out) is exact.
Each rank then sends the gradient of a part directly to the rank that holds it (Liu et al. 2023,
arXiv:2310.01889, for the ring; Dao et al. 2022, arXiv:2205.14135, for the gradient).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise.function import stages
from headwise.masks.clause import MatrixPart
from headwise.masks.score_bias import BoundBias
from headwise.matrix.kernels import tiled
from headwise.matrix.kernels.kernel import KernelInput, KernelResult, Requested, accumulation_dtype
from headwise.matrix.kernels.tiled import softmax_shift
from headwise.sharding.collectives import Transfer, iterate_tensors_of_ranks
from headwise.sharding.sequence.scores import SequenceScores
from headwise.support.tracing import without_autocast


def attend_by_ring(q: Tensor, k: Tensor, v: Tensor, scores: SequenceScores) -> Tensor:
    """Return the head outputs of this rank's queries; see `headwise.sharding.attend`."""
    sizes, options = scores.sizes, scores.options
    dtype = accumulation_dtype(q.dtype)
    bias = options.score_bias.bind_unchecked(
        queries=sizes.queries, keys=sizes.keys, device=q.device, dtype=dtype
    )
    operands = (q, k, v, options.sink, bias.table, *bias.tensors)
    ring = _Ring.apply
    if torch.compiler.is_compiling():  # torch compiles no transfers, and would trace every tile
        ring = torch.compiler.disable(ring)
    with without_autocast(q):
        return ring(scores, *operands)  # type: ignore[no-any-return, no-untyped-call]


class _Block(NamedTuple):
    """A run of this rank's queries with a run of the keys that have arrived."""

    place: MatrixPart  # in the whole matrix
    rows: slice  # of this rank's queries
    columns: slice  # of the keys that have arrived


def _iterate_blocks(scores: SequenceScores, owner: int) -> Iterator[_Block]:
    row = 0
    for queries in scores.queries.runs:
        seen, column = scores.visible_key_span(queries), 0
        for run in scores.keys.layout.spans[owner]:
            keys = run.intersection(seen)
            if keys.size:
                first = column + keys.first - run.first
                yield _Block(
                    scores.matrix_part_of_all_sequences(queries, keys),
                    slice(row, row + queries.size),
                    slice(first, first + keys.size),
                )
            column += run.size
        row += queries.size


@dataclass(frozen=True, eq=False)
class _Operands:
    scores: SequenceScores
    q: Tensor  # in the accumulation dtype
    bias: BoundBias

    def cut_block(self, block: _Block, k: Tensor) -> KernelInput:
        """Return the scores of one block with its keys; without the sink, which is added once."""
        options = self.scores.options
        return KernelInput(
            q=self.q[:, :, block.rows],
            k=k,
            mask=self.scores.mask.cut_to_part(block.place),
            bias=self.bias.cut_to_part(block.place),
            scale=stages.default_scale(self.q) if options.scale is None else options.scale,
            softcap=options.softcap,
            sink=None,
        )


class _MergedOutputs:
    """Outputs of all parts that have been added, with the largest score and sum of each row."""

    def __init__(self, q: Tensor, value_dim: int) -> None:
        self.out = q.new_zeros(*q.shape[:3], value_dim)
        self.peak = q.new_full(q.shape[:3], -torch.inf)
        self.total = q.new_zeros(q.shape[:3])  # sum of exp(s - m), for m of the peak

    def add(self, rows: slice, part: KernelResult) -> None:
        out, peak, total = (x[:, :, rows] for x in (self.out, self.peak, self.total))
        largest = torch.maximum(peak, part.peak)
        shift = softmax_shift(largest, None)
        before = total * (peak - shift).exp()
        # A row without keys in this part has log_sum 0, and weight 0 by its peak of -inf.
        after = (part.peak - shift + part.log_sum).exp()
        both = before + after
        share = torch.where(both > 0, after / both, 0.0)
        out.lerp_(part.out, share[..., None])
        peak.copy_(largest)
        total.copy_(both)

    def finish(self, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        shift = softmax_shift(self.peak, sink)
        total = self.total * (self.peak - shift).exp()
        if sink is not None:
            both = total + (sink.to(shift.dtype)[:, None] - shift).exp()
            self.out.mul_(torch.where(both > 0, total / both, 0.0)[..., None])
            total = both
        return self.out, shift, total.masked_fill(total == 0, 1.0).log()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: SequenceScores,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        table: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        exact = accumulation_dtype(q.dtype)
        bias = BoundBias(scores.sizes.queries, scores.sizes.keys, table, tensors)
        operands = _Operands(scores, q.to(exact), bias)
        merged = _MergedOutputs(operands.q, v.shape[-1])
        for owner, parts in _pass_keys_and_values_around(k, v, scores):
            keys, values = (x.to(exact) for x in parts)
            for block in _iterate_blocks(scores, owner):
                problem = operands.cut_block(block, keys[:, :, block.columns])
                part = tiled.compute_results(
                    problem, values[:, :, block.columns], None, Requested()
                )
                merged.add(block.rows, part)
        out, shift, log_sum = merged.finish(sink)
        out = out.to(q.dtype)
        ctx.scores = scores
        ctx.save_for_backward(q, k, v, sink, table, out, shift, log_sum, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, table, out, shift, log_sum, *tensors = ctx.saved_tensors
        scores, exact = ctx.scores, accumulation_dtype(q.dtype)
        _, _, _, _, _, table_needed, *tensors_needed = ctx.needs_input_grad
        with without_autocast(q):
            bias = BoundBias(scores.sizes.queries, scores.sizes.keys, table, tuple(tensors))
            dout = upstream.to(exact)
            means = torch.linalg.vecdot(dout, out.to(exact))  # sum p dp of the whole row
            sums = _RingGradients(
                _Operands(scores, q.to(exact), bias),
                (dout, shift, log_sum, means),
                (table_needed, tensors_needed),
            )
            dk, dv = _ring_key_value_gradients(sums, k, v)
            dsink = None
            if sink is not None:
                p = (sink.to(exact)[:, None] - shift - log_sum).exp()
                dsink = -(p * means).sum((0, 2)).to(sink.dtype)
        return (None, sums.q.to(q.dtype), dk, dv, dsink, *sums.cast_bias_gradients())


def _pass_keys_and_values_around(
    k: Tensor, v: Tensor, scores: SequenceScores
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    tokens_first = tuple(x.movedim(2, 0).contiguous() for x in (k, v))
    for owner, parts in iterate_tensors_of_ranks(tokens_first, scores.keys):
        keys, values = (x.movedim(0, 2) for x in parts)
        yield owner, (keys, values)


class _RingGradients:
    def __init__(
        self,
        operands: _Operands,
        rows: tuple[Tensor, Tensor, Tensor, Tensor],
        needed: tuple[bool, list[bool]],
    ) -> None:
        self.operands, self._rows, self._needed = operands, rows, needed
        self.q = torch.zeros_like(operands.q)
        bias, exact = operands.bias, operands.q.dtype
        table, pairs = None, zip(bias.tensors, needed[1], strict=True)
        if bias.table is not None and needed[0]:
            table = torch.zeros_like(bias.table, dtype=exact)
        tensors = [torch.zeros_like(x, dtype=exact) for x, is_needed in pairs if is_needed]
        self._bias = BoundBias(bias.queries, bias.keys, table, tuple(tensors))

    def add_block(self, block: _Block, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradients of one block; return those of its keys and values."""
        problem = self.operands.cut_block(block, keys)
        dout, shift, log_sum, means = (x[:, :, block.rows] for x in self._rows)
        upstream = tiled.UpstreamGradients(out=dout, row_means=means)
        gradients = tiled.compute_gradients(
            problem, values, None, (shift, log_sum), upstream, self._needed
        )
        self.q[:, :, block.rows] += gradients.q
        # Views of the sums, for the entries of the bias that this block reads.
        sums = self._bias.cut_to_part(block.place)
        _add_each(sums.tensors, (x for x in gradients.tensors if x is not None))
        if sums.table is not None and gradients.table is not None:
            sums.table.add_(gradients.table)
        assert gradients.v is not None
        return gradients.k, gradients.v

    def cast_bias_gradients(self) -> list[Tensor | None]:
        bias, sums = self.operands.bias, iter(self._bias.tensors)
        table = self._bias.table
        if table is not None and bias.table is not None:
            table = table.to(bias.table.dtype)
        pairs = zip(bias.tensors, self._needed[1], strict=True)
        return [table, *(next(sums).to(x.dtype) if needed else None for x, needed in pairs)]


def _ring_key_value_gradients(sums: _RingGradients, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores, exact = sums.operands.scores, sums.operands.q.dtype
    rank, home = scores.keys.rank, None
    total = [torch.zeros_like(x, dtype=exact) for x in (k, v)]
    for owner, parts in _pass_keys_and_values_around(k, v, scores):
        gradients = [x.new_zeros(x.shape, dtype=exact) for x in parts]
        keys, values = (x.to(exact) for x in parts)
        for block in _iterate_blocks(scores, owner):
            at = (slice(None), slice(None), block.columns)
            _add_each([x[at] for x in gradients], sums.add_block(block, keys[at], values[at]))
        if home is not None:
            _add_each(total, home.wait())
            home = None  # its memory, before the next one
        if owner == rank:
            _add_each(total, gradients)
            continue
        home = Transfer(
            scores.keys,
            sent=[x.to(k.dtype) for x in gradients],
            to=owner,
            received=[torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v)],
            source=2 * rank - owner,
        )
    if home is not None:
        _add_each(total, home.wait())
    dk, dv = (x.to(k.dtype) for x in total)
    return dk, dv


def _add_each(totals: Iterable[Tensor], parts: Iterable[Tensor]) -> None:
    for total, part in zip(totals, parts, strict=True):
        total += part
