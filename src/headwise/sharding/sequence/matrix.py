"""The attention matrix of a sequence whose tokens are divided over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import ShapeError
from headwise.masks.clause import Span
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix import checks
from headwise.matrix.kernels.dispatch import Explanation
from headwise.matrix.kernels.kernel import accumulation_dtype
from headwise.matrix.operator import AttentionMatrix, Statistics
from headwise.sharding.collectives import sum_forward_and_backward
from headwise.sharding.sequence.layout import SequenceLayout
from headwise.sharding.sequence.scores import SequenceOptions, agree_on_scores
from headwise.support.arguments import require_tensors
from headwise.support.text import MATRIX_AXES
from headwise.support.tracing import LeftOperand

CALL = "SequenceMatrix(q, k, mesh)"


class SequenceMatrix(LeftOperand):
    """The weights (batch, heads, queries, keys) of a sequence over ranks, as an operator.

    All keys are gathered once, so each row is complete on one rank, and readings of rows are exact
    without a merge. Results with an axis of queries hold this rank's queries, in the order of
    `positions`; those with an axis of keys all keys, but `received` and ``mT @ y``, which hold this
    rank's keys. `pool` returns the whole map on every rank.

    The constructor, ``@ v``, ``mT @ y``, `received`, `statistics`, `pool` and every
    backward pass are collectives: all ranks make the call. The readings are those of
    `headwise.AttentionMatrix`.

    Args:
        q: the queries of this rank, (batch, heads, local queries, head_dim).
        k: the keys of this rank, (batch, kv_heads, local keys, head_dim).
        mesh: a mesh of one dimension.
        layout: as in `headwise.sharding.attend`, and so are all other arguments.

    Raises:
        OptionError, ShapeError, DTypeError, DeviceError, MaskError: as `headwise.sharding.attend`.
    """

    def __init__(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        mesh: DeviceMesh,
        *,
        layout: SequenceLayout | None = None,
        key_layout: SequenceLayout | None = None,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, " heads"] | None = None,
    ) -> None:
        options = SequenceOptions.given(layout, key_layout, mask, score_bias, scale, softcap, sink)
        self.scores = scores = agree_on_scores(CALL, (q, k), mesh, options)
        self._queries = scores.queries
        keys = scores.keys.gather(k)
        runs = scores.queries.runs or (Span(0, 0),)
        sizes = [run.size for run in runs]
        whole = Span(0, scores.sizes.keys)
        self.parts: tuple[tuple[Span, AttentionMatrix], ...] = tuple(
            (run, scores.matrix_of_query_and_key_run(part, keys, queries=run, keys=whole))
            for run, part in zip(runs, q.split(sizes, 2), strict=True)
        )
        """The runs of this rank's queries, each with its matrix over all keys."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys) of the whole sequence."""
        return tuple(self.scores.sizes)  # type: ignore[return-value]

    @property
    def positions(self) -> Int[Tensor, " queries"]:
        """The positions of this rank's queries in the sequence."""
        return self._queries.layout.positions(self._queries.rank, device=self._q.device)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={n}" for axis, n in zip(MATRIX_AXES, self.shape, strict=True))
        runs = " and ".join(f"{run.first} to {run.stop}" for run, _ in self.parts)
        rank = f"rank {self._queries.rank} of {self._queries.size} has queries {runs}"
        return f"SequenceMatrix({sizes}, {self.scores.options.mask}; {rank})"

    def explain(self, v: Float[Tensor, "..."] | None = None) -> Explanation:
        """Return the kernels of this rank's readings, run by run; see `AttentionMatrix.explain`.

        ``v`` are values of all keys, or of their shape.
        """
        lines = [
            replace(line, reading=f"{line.reading} {run.first}+")
            for run, matrix in self.parts
            for line in matrix.explain(v).lines
        ]
        return Explanation(tuple(lines))

    # ---- products ---------------------------------------------------------------------------

    def __matmul__(
        self, v: Float[Tensor, "batch kv_heads keys value_dim"]
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Compute the head outputs of this rank's queries, for the values of its keys.

        Raises:
            ShapeError, DTypeError, DeviceError: values that do not fit the keys.
        """
        require_tensors(v=v)
        batch, length = self.shape[0], self.scores.keys.local_tokens
        if v.dim() != 4 or v.shape[0] != batch or v.shape[2] != length:
            checks.raise_operand_error(
                "A @ v", v, f"(batch {batch}, kv_heads, local keys {length}, value_dim)"
            )
        values = self.scores.keys.gather(v)
        return self._concatenate_over_runs(lambda matrix: matrix @ values)

    @property
    def mT(self) -> TransposedSequenceMatrix:  # noqa: N802 (torch's name for it)
        """The transposed matrix, for ``A.mT @ y``."""
        return TransposedSequenceMatrix(self)

    # ---- rows -------------------------------------------------------------------------------

    def logsumexp(self) -> Float[Tensor, "batch heads queries"]:
        """Return `AttentionMatrix.logsumexp` of this rank's queries."""
        return self._concatenate_over_runs(AttentionMatrix.logsumexp)

    def entropy(self) -> Float[Tensor, "batch heads queries"]:
        """Return `AttentionMatrix.entropy` of this rank's queries."""
        return self._concatenate_over_runs(AttentionMatrix.entropy)

    def maximum(self) -> Float[Tensor, "batch heads queries"]:
        """Return `AttentionMatrix.maximum` of this rank's queries."""
        return self._concatenate_over_runs(AttentionMatrix.maximum)

    def head_average(self) -> Float[Tensor, "batch queries keys"]:
        """Return `AttentionMatrix.head_average` of this rank's queries, over all keys."""
        return self._concatenate_over_runs(AttentionMatrix.head_average, dim=1)

    def rows(self, index: Integer[Tensor, " rows"]) -> Float[Tensor, "batch heads rows keys"]:
        """Return the weights of some of this rank's queries, over all keys.

        Args:
            index: numbers of queries among those of this rank, from 0.

        Raises:
            OptionError: ``index`` is no 1-D integer tensor, or names a query that is not here.
        """
        index = checks.require_query_positions(
            index, self._queries.local_tokens, call="rows(index)"
        )
        return self._read_chosen_queries(index, lambda matrix, some: (matrix.rows(some),))[0]

    def topk(
        self, k: SupportsIndex, queries: Integer[Tensor, " rows"] | None = None
    ) -> tuple[Float[Tensor, "batch heads rows k"], Int[Tensor, "batch heads rows k"]]:
        """Return the k largest weights of this rank's queries, and the positions of their keys.

        Args:
            k: how many.
            queries: numbers of queries among those of this rank; None for all.

        Raises:
            OptionError: as `AttentionMatrix.topk`.
        """
        if queries is None:
            queries = torch.arange(self._queries.local_tokens, device=self._q.device)
        queries = checks.require_query_positions(
            queries, self._queries.local_tokens, call=f"topk({k}, queries=index)"
        )
        weights, keys = self._read_chosen_queries(
            queries, lambda matrix, some: matrix.topk(k, some)
        )
        return weights, keys

    def diagonal(self, offset: SupportsIndex = 0) -> Float[Tensor, "batch heads diagonal"]:
        """Return the weight from query i to key i + offset, for this rank's queries.

        Queries for which that key does not exist are left out.

        Raises:
            OptionError: an offset that is no integer.
        """
        distance = checks.require_diagonal_offset(offset, *self.shape[2:])
        parts = [matrix.diagonal(run.first + distance) for run, matrix in self.parts]
        return torch.cat(parts, 2)

    # ---- sums over queries ------------------------------------------------------------------

    def received(self) -> Float[Tensor, "batch heads keys"]:
        """Return the weight that this rank's keys receive from all queries; a collective."""
        return self._sum_over_ranks_for_local_keys([matrix.received() for _, matrix in self.parts])

    def statistics(self) -> Statistics:
        """Return logsumexp, entropy, maximum and received from one pass; a collective."""
        parts = [matrix.statistics() for _, matrix in self.parts]
        *rows, received = zip(*parts, strict=True)
        logsumexp, entropy, maximum = (torch.cat(x, 2) for x in rows)
        return Statistics(
            logsumexp, entropy, maximum, self._sum_over_ranks_for_local_keys(list(received))
        )

    def pool(self, queries: int, keys: int) -> Float[Tensor, "batch heads {queries} {keys}"]:
        """Return the whole map of `AttentionMatrix.pool` on every rank; a collective.

        A rank needs the memory of its queries x ``keys`` blocks.

        Raises:
            OptionError: a number of blocks outside 1 to the length of its axis.
        """
        batch, heads, length, width = self.shape
        queries = checks.require_block_count("queries", queries, length)
        keys = checks.require_block_count("keys", keys, width)
        block = self.positions * queries // max(1, length)
        exact = accumulation_dtype(self._q.dtype)
        cells = torch.zeros(batch, heads, queries, keys, dtype=exact, device=self._q.device)
        rows = self._concatenate_over_runs(
            lambda matrix: matrix.pool(max(1, matrix.shape[2]), keys)
        )
        cells = cells.index_add(2, block, rows[:, :, : len(block)].to(exact))
        whole = torch.arange(length, device=self._q.device) * queries // max(1, length)
        counts = torch.bincount(whole, minlength=queries).clamp(min=1).to(exact)
        total = sum_forward_and_backward(cells, group=self._queries.group)
        return (total / counts[:, None]).to(self._q.dtype)

    @property
    def _q(self) -> Tensor:
        return self.parts[0][1].q

    def _concatenate_over_runs(
        self, read: Callable[[AttentionMatrix], Tensor], *, dim: int = 2
    ) -> Tensor:
        return torch.cat([read(matrix) for _, matrix in self.parts], dim)

    def _sum_over_ranks_for_local_keys(self, parts: list[Tensor]) -> Tensor:
        """Sum (batch, heads, keys, *) over runs and ranks, and keep this rank's keys."""
        return self.scores.keys.sum_over_ranks(torch.stack(parts).sum(0))

    def _read_chosen_queries(self, index: Tensor, read: Any) -> tuple[Tensor, ...]:
        """Read some queries of each run, and return the results in the order of ``index``."""
        results, places, first = [], [], 0
        for run, matrix in self.parts:
            chosen = (index >= first) & (index < first + run.size)
            results.append(read(matrix, index[chosen] - first))
            places.append(chosen.nonzero().squeeze(1))
            first += run.size
        order = torch.cat(places).argsort()
        return tuple(torch.cat(x, 2).index_select(2, order) for x in zip(*results, strict=True))


class TransposedSequenceMatrix(LeftOperand):
    """Transpose of a `SequenceMatrix`, made by ``A.mT``."""

    def __init__(self, matrix: SequenceMatrix) -> None:
        self.mT = matrix

    def __matmul__(
        self, y: Float[Tensor, "#batch #heads queries y_dim"]
    ) -> Float[Tensor, "batch heads keys y_dim"]:
        """Compute for each of this rank's keys the sum over all queries of weight * y.

        ``y`` belongs to this rank's queries. All ranks make the call.

        Raises:
            ShapeError, DTypeError, DeviceError: ``y`` does not fit the matrix.
        """
        require_tensors(y=y)
        parts, length = self.mT.parts, self.mT.scores.queries.local_tokens
        if y.dim() != 4 or y.shape[2] != length:
            raise ShapeError(
                saw=f"A.mT @ y with an operand of shape {tuple(y.shape)}",
                needed=f"(batch, heads, local queries {length}, y_dim)",
                do="pass the rows of this rank's queries",
            )
        each = y.split([run.size for run, _ in parts], 2)
        products = [matrix.mT @ rows for (_, matrix), rows in zip(parts, each, strict=True)]
        return self.mT._sum_over_ranks_for_local_keys(products)

    def __repr__(self) -> str:
        return f"{self.mT!r}.mT"
