"""The attention matrix as a linear operator, without queries x keys memory.

Outputs are exact products, statistics are reductions over tiles. Weights are before dropout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, SupportsIndex

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from headwise.function import stages
from headwise.masks.bound import BoundMask
from headwise.masks.mask import NO_MASK, Mask, require_mask_type
from headwise.masks.score_bias import NO_BIAS, ScoreBias, require_score_bias_type
from headwise.matrix import checks
from headwise.matrix.kernels import dense, readings, sdpa, tiled, tiles
from headwise.matrix.kernels.dispatch import Explanation, explain_kernels, run_kernel
from headwise.matrix.kernels.kernel import KernelInput, Requested, Task, accumulation_dtype
from headwise.matrix.kernels.readings import ObservedTile
from headwise.support import arguments, lazy, text, tracing

SMALL_MAP = 64  # blocks of an axis: up to this many `pool` uses the fused kernel, above it tiles


class Statistics(NamedTuple):
    """Named tuple of statistics from one pass, defined by the methods of the same name.

    The first three fields are (batch, heads, queries); `received` is (batch, heads, keys).
    """

    logsumexp: Float[Tensor, "batch heads queries"]
    entropy: Float[Tensor, "batch heads queries"]
    maximum: Float[Tensor, "batch heads queries"]
    received: Float[Tensor, "batch heads keys"]


class AttentionMatrix(tracing.LeftOperand, lazy.ShownInNotebook):
    """The weights (batch, heads, queries, keys) of scaled dot-product attention, as an operator.

    ``A @ v`` gives head outputs, ``A.mT @ y`` sums over queries. Statistics of half types are
    float32; other results have the dtype of ``q``.

    Args:
        q: queries, (batch, heads, queries, head_dim).
        k: keys, (batch, kv_heads, keys, head_dim); query head h uses h // (heads // kv_heads).
        mask: which keys each query may attend to (True = may attend); all by default.
        score_bias: added to the scores after the softcap.
        scale: factor of q.k; 1/sqrt(head_dim) by default.
        softcap: scores become softcap * tanh(scores / softcap).
        sink: (heads,), a logit for each head that adds to the softmax's denominator only.

    Padding that lengths, starts or segments of the mask state contributes nothing, NaN or not.

    Raises:
        ShapeError: shapes that do not fit together.
        DTypeError, DeviceError: operands of different dtypes, or on different devices.
        OptionError: a scale or softcap outside its range.
        MaskError: a mask or a score bias for other sizes.
    """

    _is_zeroed = False  # True if the padding of queries, keys and values is finite already

    @arguments.explain_arguments(checks.SDPA_ADVICE)
    def __init__(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch kv_heads keys head_dim"],
        *,
        mask: Mask | None = None,
        score_bias: ScoreBias | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Float[Tensor, " heads"] | None = None,
    ) -> None:
        checks.check_queries_and_keys(q, k)
        if scale is not None or softcap is not None or sink is not None:
            checks.check_scale_softcap_and_sink(q, scale, softcap, sink)
        self.q, self.k, self.sink, self.softcap = q, k, sink, softcap
        self.mask = NO_MASK if mask is None else require_mask_type(mask, "mask=")
        self.score_bias = NO_BIAS
        if score_bias is not None:
            self.score_bias = require_score_bias_type(score_bias, "score_bias=")
        self.scale = stages.default_scale(q) if scale is None else scale
        is_shaped = self.mask is not NO_MASK or self.score_bias is not NO_BIAS
        self._is_plain = not is_shaped and softcap is None and sink is None
        self._bound = self.mask.bind(**self._axis_sizes, device=q.device) if is_shaped else None
        if is_shaped:
            self.score_bias.check(**self._axis_sizes, device=q.device)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""
        batch, heads, queries, _ = self.q.shape
        return batch, heads, queries, self.k.shape[2]

    @property
    def bound_mask(self) -> BoundMask:
        """The mask, bound to the sizes of this matrix."""
        return self._bound or self.mask.bind(**self._axis_sizes, device=self.q.device)

    def __repr__(self) -> str:
        dtype = str(self.q.dtype).removeprefix("torch.")
        options = [*(f"{axis}={n}" for axis, n in self._axis_sizes.items()), dtype]
        if self.k.shape[1] != self.q.shape[1]:
            options.append(f"kv_heads={self.k.shape[1]}")
        if str(self.mask) != "everything":
            options.append(str(self.mask))
        if str(self.score_bias) != "zero":
            options.append(f"bias {self.score_bias}")
        if self.softcap is not None:
            options.append(f"softcap {self.softcap:g}")
        if self.sink is not None:
            options.append("sink")
        size = text.human_bytes(math.prod(self.shape) * self.q.element_size())
        return f"AttentionMatrix({', '.join(options)}; dense would be {size})"

    def explain(self, v: Float[Tensor, "..."] | None = None) -> Explanation:
        """Return a printable report: kernel, reason and cost of each operation, for values ``v``.

        Without ``v`` the report is that of values as wide as the keys.
        """
        return explain_kernels(*self._kernel_input_and_values(self.k if v is None else v))

    def __matmul__(
        self, v: Float[Tensor, "#batch value_heads keys value_dim"]
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Compute (batch, heads, queries, value_dim): each query's weighted sum of the values.

        ``value_heads`` is kv_heads, heads, or 1 for values that all heads share.

        Raises:
            ShapeError, DTypeError, DeviceError: values that do not fit the matrix.
        """
        q, k, scale = self.q, self.k, self.scale
        out = sdpa.head_outputs_without_options(q, k, v, scale=scale) if self._is_plain else None
        return run_kernel(Task(*self._kernel_input_and_values(v))).out if out is None else out

    def dropped(
        self, v: Float[Tensor, "#batch value_heads keys value_dim"], *, dropout_p: float
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Compute ``A @ v`` with dropout on the weights, for training.

        Dropout allocates queries x keys. ``dropout_p``, 0 to 1, is the probability of dropping each
        weight; the other weights are divided by ``1 - dropout_p``.

        Raises:
            OptionError: a probability outside 0 to 1.
            ShapeError, DTypeError, DeviceError: values that do not fit the matrix.
        """
        checks.check_probability(dropout_p)
        return run_kernel(Task(*self._kernel_input_and_values(v), dropout_p=dropout_p)).out

    def outputs_and_average(
        self, v: Float[Tensor, "#batch value_heads keys value_dim"]
    ) -> tuple[Float[Tensor, "batch heads queries value_dim"], Float[Tensor, "batch queries keys"]]:
        """Return ``A @ v`` and ``A.head_average()``; without gradients one pass computes both."""
        arguments.require_tensors(v=v)
        if row := self._outputs_and_average_of_single_query(v):
            return row
        # torch checks a trace in another grad mode than it was made in: both must take one path.
        if tracing.is_jit_tracing() or self._needs_gradient(v):
            # Two forward passes: the fused kernel's faster backward outweighs the second pass.
            return self @ v, self.head_average()
        task = Task(*self._kernel_input_and_values(v), statistics=Requested(average=True))
        result = run_kernel(task)
        return result.out, result.average

    @property
    def mT(self) -> TransposedMatrix:  # noqa: N802 (torch's name for it)
        """The transposed matrix, for ``A.mT @ y``."""
        return TransposedMatrix(self)

    def rows(self, index: Integer[Tensor, " rows"]) -> Float[Tensor, "batch heads rows keys"]:
        """Return the weights of the queries in ``index`` as a dense tensor.

        Raises:
            OptionError: ``index`` is no 1-D integer tensor, or names a query that does not exist.
        """
        index = checks.require_query_positions(index, self.shape[2], call="rows(index)")
        return readings.weights_of_queries(self._kernel_input().zeroed(), index.to(self.q.device))

    def dense(self, *, limit: int | None = 2**31) -> Float[Tensor, "batch heads queries keys"]:
        """Return the whole matrix, in queries x keys memory.

        Raises:
            LimitError: the result would take more than ``limit`` bytes (2 GiB; None: no limit).
            OptionError: a limit that is no number.
        """
        checks.check_dense_memory_limit(limit, math.prod(self.shape) * self.q.element_size(), self)
        return self.rows(torch.arange(self.q.shape[2], device=self.q.device))

    def diagonal(self, offset: SupportsIndex = 0) -> Float[Tensor, "batch heads diagonal"]:
        """Return the weight from query i to key i + offset, for every i where that key exists.

        ``offset=-1`` is the previous token. The result is empty where no such key exists, like
        torch's diagonal. Besides these weights only the row sums are computed.

        Raises:
            OptionError: an offset that is no integer.
        """
        offset = checks.require_diagonal_offset(offset, *self.shape[2:])
        return readings.diagonal_weights(self._kernel_input().zeroed(), offset)

    @arguments.explain_arguments(checks.ROWS_ADVICE)
    def topk(
        self, k: SupportsIndex, queries: Integer[Tensor, " rows"] | None = None
    ) -> tuple[Float[Tensor, "batch heads rows k"], Int[Tensor, "batch heads rows k"]]:
        """Return the k largest weights of each query, in descending order, and their keys.

        Hidden keys have weight 0 and may be among the k where fewer keys are allowed. ``queries``
        are the positions of some queries; all by default.

        Raises:
            OptionError: a ``k`` outside 0 to the number of keys, or ``queries`` that do not exist.
        """
        count, length = checks.require_top_key_count(k, self.shape[3]), self.shape[2]
        if queries is None:
            queries = torch.arange(length, device=self.q.device)
        else:
            call = f"topk({count}, queries=index)"
            queries = checks.require_query_positions(queries, length, call=call).to(self.q.device)
        return readings.largest_weights(self._kernel_input().zeroed(), count, queries)

    def pool(self, queries: int, keys: int) -> Float[Tensor, "batch heads {queries} {keys}"]:
        """Return a map of ``queries`` x ``keys`` cells: weight from block to block.

        A cell is the mean over the block's queries of the weight summed over the block's keys: a
        row sums to 1 where every query attends. Position i of n is in block floor(i * blocks / n).

        Raises:
            OptionError: a number of blocks outside 1 to the length of its axis.
        """
        queries = checks.require_block_count("queries", queries, self.shape[2])
        keys = checks.require_block_count("keys", keys, self.shape[3])
        if max(queries, keys) > SMALL_MAP:
            statistics = Requested(query_blocks=queries, key_blocks=keys)
            sums = run_kernel(Task(self._kernel_input(), statistics=statistics)).cells
        else:
            by_key = self @ tiles.block_membership(self.shape[3], keys, self.q)[None, None]
            # Counts of queries exceed the range of float16 and the precision of bfloat16.
            by_key = by_key.to(accumulation_dtype(self.q.dtype))
            with tracing.without_autocast(self.q):
                members = tiles.block_membership(self.shape[2], queries, by_key)
                sums = members.transpose(-2, -1) @ by_key
        sizes = tiles.block_sizes(self.shape[2], queries, sums)[:, None]
        return (sums / sizes).to(self.q.dtype)

    # ---- reductions -------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Return logsumexp, entropy, maximum and received from one pass over the matrix."""
        requested = Requested(entropy=True, received=True)
        result = run_kernel(Task(self._kernel_input(), statistics=requested))
        logsumexp = tiled.row_logsumexp(self.sink, result)
        maximum = tiled.row_largest_weight(self.sink, result)
        return Statistics(logsumexp, result.entropy, maximum, result.received)

    def logsumexp(self) -> Float[Tensor, "batch heads queries"]:
        """Return log sum exp of each query's scores and sink; -inf in a row without either."""
        return tiled.row_logsumexp(self.sink, run_kernel(Task(self._kernel_input())))

    def entropy(self) -> Float[Tensor, "batch heads queries"]:
        """Return -sum p log p of each query's weights, in nats; a sink counts as an outcome."""
        return run_kernel(Task(self._kernel_input(), statistics=Requested(entropy=True))).entropy

    def maximum(self) -> Float[Tensor, "batch heads queries"]:
        """Return the largest weight of each query; 0 for a query that may attend to nothing."""
        return tiled.row_largest_weight(self.sink, run_kernel(Task(self._kernel_input())))

    def received(self) -> Float[Tensor, "batch heads keys"]:
        """Return the sum over all queries of the weight that they give each key.

        The unit is one query: 2.0 is all the weight of two queries, and the most is the number of
        queries. A query gives 1 in all; less with a sink, and 0 if it sees no key.
        """
        return run_kernel(Task(self._kernel_input(), statistics=Requested(received=True))).received

    def seen_by(self, queries: Bool[Tensor, "batch queries"]) -> Int[Tensor, "batch _ keys"]:
        """Count the chosen queries (True) that may attend to each key.

        The axis of heads has length 1 where the mask is the same for all heads.

        Raises:
            ShapeError: ``queries`` is no bool tensor of (batch, queries).
        """
        checks.check_seen_by(queries, batch=self.shape[0], length=self.shape[2])
        return readings.count_attending_queries(self._kernel_input(), queries.to(self.q.device))

    def head_average(self) -> Float[Tensor, "batch queries keys"]:
        """Return the mean of the weights over heads, without storing those of single heads."""
        return run_kernel(Task(self._kernel_input(), statistics=Requested(average=True))).average

    def tiles(
        self, *, with_scores: bool = False, with_lowest: bool = False
    ) -> Iterator[ObservedTile]:
        """Yield the weights tile by tile, without gradients, for a custom reduction.

        The next tile reuses the memory of the last: copy what you keep. ``with_scores`` fills
        `ObservedTile.scores`, ``with_lowest`` fills `ObservedTile.lowest`.
        """
        problem = self._kernel_input().zeroed()
        yield from readings.yield_observed_tiles(problem, with_scores, with_lowest)

    # ---- internals --------------------------------------------------------------------------

    @property
    def _axis_sizes(self) -> dict[str, int]:
        return dict(zip(text.MATRIX_AXES, self.shape, strict=True))

    def _kernel_input(self) -> KernelInput:
        (_, _, queries, keys), q, bias = self.shape, self.q, self.score_bias
        # Bound anew for each operation: a table by distance belongs to that operation's graph.
        bound = bias.bind_unchecked(
            queries=queries, keys=keys, device=q.device, dtype=accumulation_dtype(q.dtype)
        )
        options = (self.scale, self.softcap, self.sink, self._is_zeroed)
        return KernelInput(q, self.k, self.bound_mask, bound, *options)

    def _kernel_input_and_values(self, v: Tensor) -> tuple[KernelInput, Tensor]:
        """Return the problem with as many kv heads as ``v``, and ``v`` expanded to full size."""
        arguments.require_tensors(v=v)
        (batch, heads, _, keys), kv_heads = self.shape, self.k.shape[1]
        fits = v.dim() == 4 and text.axis_broadcasts_to(v.shape[0], batch) and v.shape[2] == keys
        fits_kv_heads = fits and text.axis_broadcasts_to(v.shape[1], kv_heads)
        if not fits or not (fits_kv_heads or v.shape[1] == heads):
            needed = f"(batch {batch}, kv_heads {kv_heads}, keys {keys}, value_dim)"
            checks.raise_operand_error("A @ v", v, needed)
        checks.check_operand_dtype_and_device("v", v, self.q)
        k = self.k if fits_kv_heads else stages.repeat_kv_heads(self.k, heads=heads)
        return replace(self._kernel_input(), k=k), v.expand(batch, k.shape[1], *v.shape[2:])

    def _outputs_and_average_of_single_query(self, v: Tensor) -> tuple[Tensor, Tensor] | None:
        return dense.attend_one_query(self.q, self.k, v, self.scale) if self._is_plain else None

    def _needs_gradient(self, v: Tensor) -> bool:
        if not torch.is_grad_enabled():
            return False
        leaves = (self.q, self.k, v) if self.sink is None else (self.q, self.k, v, self.sink)
        return self.score_bias.requires_grad or any(x.requires_grad for x in leaves)


def with_finite_padding(matrix: AttentionMatrix) -> AttentionMatrix:
    """Let a matrix read its operands as they are: their padding holds neither NaN nor infinity."""
    matrix._is_zeroed = True
    return matrix


def describe_average(matrix: AttentionMatrix, v: Tensor, *, dropout_p: float) -> str:
    """Return how `AttentionMatrix.outputs_and_average` computes the mean, beside its outputs."""
    if dropout_p == 0 and matrix._outputs_and_average_of_single_query(v):
        return "mean over heads, from the single row of weights, which also replaces A @ v below"
    if dropout_p > 0 or matrix._needs_gradient(v):
        return "mean over heads, in a second pass; need_weights=False saves it"
    return (
        "mean over heads, in one tiled pass that also computes A @ v, instead of the kernel below; "
        "need_weights=False saves it"
    )


class TransposedMatrix(tracing.LeftOperand):
    """Transpose (batch, heads, keys, queries) of an `AttentionMatrix`, made by ``A.mT``."""

    def __init__(self, matrix: AttentionMatrix) -> None:
        self.mT = matrix

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, keys, queries)."""
        return *self.mT.shape[:2], self.mT.shape[3], self.mT.shape[2]

    def __matmul__(
        self, y: Float[Tensor, "#batch #heads queries y_dim"]
    ) -> Float[Tensor, "batch heads keys y_dim"]:
        """Compute (batch, heads, keys, y_dim): for each key the sum over queries of weight * y.

        Raises:
            ShapeError, DTypeError, DeviceError: ``y`` does not fit the matrix.
        """
        arguments.require_tensors(y=y)
        batch, heads, _, queries = self.shape
        fits = y.dim() == 4 and y.shape[2] == queries
        fits = fits and text.axis_broadcasts_to(y.shape[0], batch)
        if not fits or not text.axis_broadcasts_to(y.shape[1], heads):
            needed = f"(batch {batch}, heads {heads}, queries {queries}, y_dim)"
            checks.raise_operand_error("A.mT @ y", y, needed)
        checks.check_operand_dtype_and_device("y", y, self.mT.q)
        y = y.expand(batch, heads, *y.shape[2:])
        return run_kernel(Task(self.mT._kernel_input(), y=y)).transposed

    def __repr__(self) -> str:
        return f"{self.mT!r}.mT"
