"""Attention matrix as an operator: exact products and streamed reductions, never written down.

It holds queries, keys and all that shapes the scores; its weights are those before dropout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, SupportsIndex

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from headwise import reference
from headwise.errors import OptionError
from headwise.kernels import block_map, dense, sdpa
from headwise.kernels.bound_scores import BoundScores, accumulation_dtype
from headwise.kernels.dispatch import run
from headwise.kernels.explain import Explanation, explain
from headwise.kernels.kernel import Task
from headwise.kernels.observe_tiles import ObservedTile, observe, seen_by
from headwise.kernels.tiled import KernelResult, Requested, shift_of
from headwise.kernels.weight_rows import largest, weights_at
from headwise.masks.bias_dtype import cast_biases
from headwise.masks.bound_mask import BoundMask
from headwise.masks.mask import Mask
from headwise.masks.operand_checks import (
    EVERYTHING,
    ROWS_IS_QUERIES,
    SDPA_WORDS,
    ZERO,
    check_limit,
    check_operand,
    check_options,
    check_probability,
    check_queries_and_keys,
    check_queries_seen,
    checked_blocks,
    checked_offset,
    checked_rows,
    refuse_operand,
    require_mask,
    require_score_bias,
)
from headwise.masks.score_bias import BoundBias, ScoreBias
from headwise.support.arguments import explains, require_tensors
from headwise.support.axes import MATRIX_AXES, broadcasts, describe_value, human_bytes
from headwise.support.integers import as_count
from headwise.support.matmul import LeftOperand
from headwise.support.tracing import is_traced, without_autocast

SMALL_MAP = 64  # blocks of an axis: up to here the fused kernel computes a map, above it the tiles


class Statistics(NamedTuple):
    """What one pass over the matrix tells of its rows and columns."""

    logsumexp: Float[Tensor, "batch heads queries"]
    entropy: Float[Tensor, "batch heads queries"]
    maximum: Float[Tensor, "batch heads queries"]
    received: Float[Tensor, "batch heads keys"]


class AttentionMatrix(LeftOperand):
    """The weights (batch, heads, queries, keys) of scaled dot-product attention, as an operator.

    Args:
        q: queries, (batch, heads, queries, head_dim).
        k: keys, (batch, kv_heads, keys, head_dim); query head h reads h // (heads // kv_heads).
        mask: who may be attended (True = may attend).
        score_bias: added to the scores after the softcap.
        scale: factor of q.k; 1/sqrt(head_dim) by default.
        softcap: scores become softcap * tanh(scores / softcap).
        sink: (heads,), a logit that takes weight and gives nothing.

    Raises:
        ShapeError, DTypeError, DeviceError, OptionError, MaskError: what does not fit together.
    """

    @explains(SDPA_WORDS)
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
        check_queries_and_keys(q, k)
        check_options(q, scale, softcap, sink)
        self.q, self.k, self.sink, self.softcap = q, k, sink, softcap
        self.mask, self.score_bias = require_mask(mask), require_score_bias(score_bias)
        self.scale = reference.default_scale(q) if scale is None else scale
        is_shaped = self.mask is not EVERYTHING or self.score_bias is not ZERO
        self._is_plain = not is_shaped and softcap is None and sink is None
        self._bound = self.mask.bind(**self._sizes, device=q.device) if is_shaped else None
        if is_shaped:
            self.score_bias.check(**self._sizes, device=q.device)

    # ---- what it is -------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""
        batch, heads, queries, _ = self.q.shape
        return batch, heads, queries, self.k.shape[2]

    @property
    def bound_mask(self) -> BoundMask:
        """The mask at the sizes of this matrix."""
        return self._bound or self.mask.bind(**self._sizes, device=self.q.device)

    def __repr__(self) -> str:
        dtype = str(self.q.dtype).removeprefix("torch.")
        options = [*(f"{axis}={n}" for axis, n in self._sizes.items()), dtype]
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
        return f"AttentionMatrix({', '.join(options)}; dense would be {human_bytes(self._bytes())})"

    def explain(self, v: Float[Tensor, "..."] | None = None) -> Explanation:
        """Which kernel computes what, why, and what it costs; ``v`` as in ``A @ v``."""
        return explain(*self._problem_for(self.k if v is None else v))

    # ---- products ---------------------------------------------------------------------------

    def __matmul__(
        self, v: Float[Tensor, "#batch value_heads keys value_dim"]
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Head outputs. ``value_heads``: kv_heads, heads, or 1 for values that all heads share."""
        plain = sdpa.plain_outputs(self.q, self.k, v, scale=self.scale) if self._is_plain else None
        return run(Task(*self._problem_for(v))).out if plain is None else plain

    def dropped(
        self, v: Float[Tensor, "#batch value_heads keys value_dim"], *, dropout_p: float
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """``A @ v`` with weights dropped at random, for training: this writes queries x keys."""
        check_probability(dropout_p)
        return run(Task(*self._problem_for(v), dropout_p=dropout_p)).out

    def outputs_and_average(
        self, v: Float[Tensor, "#batch value_heads keys value_dim"]
    ) -> tuple[Float[Tensor, "batch heads queries value_dim"], Float[Tensor, "batch queries keys"]]:
        """``A @ v`` and ``A.head_average()``; in inference one pass serves both."""
        require_tensors(v=v)
        # A trace is checked in another grad mode than it was made in, and must not differ.
        if is_traced() or self._needs_gradient(v):
            # Two passes forward: the fused kernel's backward is worth more than the pass.
            return self @ v, self.head_average()
        if row := self._one_row(v):
            return row
        reading = run(Task(*self._problem_for(v), wanted=Requested(average=True)))
        return reading.out, reading.average

    @property
    def mT(self) -> TransposedMatrix:  # noqa: N802 (torch's name for it)
        """The transposed matrix, for ``A.mT @ y``."""
        return TransposedMatrix(self)

    # ---- parts ------------------------------------------------------------------------------

    def rows(self, index: Integer[Tensor, " rows"]) -> Float[Tensor, "batch heads rows keys"]:
        """The weights of chosen queries, written down.

        Raises:
            OptionError: ``index`` is no 1-D integer tensor, or names a query that does not exist.
        """
        return weights_at(self._problem(), checked_rows(index, self.shape[2], call="rows(index)"))

    def dense(self, *, limit: int | None = 2**31) -> Float[Tensor, "batch heads queries keys"]:
        """The whole matrix: the one door to queries x keys memory.

        Raises:
            LimitError: it would take more than ``limit`` bytes (None: no limit).
            OptionError: a limit that is no number.
        """
        check_limit(limit, self._bytes(), self)
        return self.rows(torch.arange(self.q.shape[2], device=self.q.device))

    def diagonal(self, offset: SupportsIndex = 0) -> Float[Tensor, "batch heads diagonal"]:
        """The weight from query i to key i + offset, for every i where that key exists.

        ``offset=-1`` is the previous token; where no such key exists the result is empty, as
        torch's diagonal is. Beside it only the row sums are computed.
        """
        _, heads, queries, keys = self.shape
        offset = checked_offset(offset, queries, keys)
        first, stop = max(0, -offset), max(max(0, -offset), min(queries, keys - offset))
        rows = torch.arange(first, stop, device=self.q.device)
        exact = accumulation_dtype(self.q.dtype)
        q = self.q[:, :, first:stop].to(exact)
        k = self.k[:, :, first + offset : stop + offset].to(exact)
        s = self.scale * (q * reference.share_heads(k, heads=heads)).sum(-1)
        if self.softcap is not None:
            s = self.softcap * torch.tanh(s / self.softcap)
        for part in cast_biases(self._bias.pairs(rows, rows + offset), exact):
            s = s + part
        s = s.masked_fill(~self.bound_mask.pairs(rows, rows + offset), -torch.inf)
        reading = run(Task(self._problem()))
        shift = shift_of(reading.peak.detach(), self._detached_sink())[..., first:stop]
        return torch.exp(s - shift - reading.log_sum[..., first:stop]).to(self.q.dtype)

    @explains(ROWS_IS_QUERIES)
    def topk(
        self, k: SupportsIndex, queries: Integer[Tensor, " rows"] | None = None
    ) -> tuple[Float[Tensor, "batch heads rows k"], Int[Tensor, "batch heads rows k"]]:
        """The k largest weights of each query, and their keys; ``queries`` chooses some of them.

        Hidden keys have weight 0 and may be among the k where fewer keys are allowed.

        Raises:
            OptionError: a ``k`` that is no number of keys, or ``queries`` that do not exist.
        """
        count = as_count(k)
        if count is None or not 0 <= count <= self.shape[3]:
            raise OptionError(
                saw=f"topk({describe_value(k)}) over {self.shape[3]} keys",
                needed=f"k from 0 to {self.shape[3]}",
                do="ask for fewer keys" if count else f"e.g. topk({min(5, self.shape[3])})",
            )
        if queries is None:
            queries = torch.arange(self.shape[2], device=self.q.device)
        else:
            queries = checked_rows(queries, self.shape[2], call=f"topk({count}, queries=index)")
        return largest(self._problem(), count, queries)

    def pool(self, queries: int, keys: int) -> Float[Tensor, "batch heads {queries} {keys}"]:
        """A map of this many cells: weight from a block of queries to a block of keys.

        A cell is the mean over the block's queries of the weight summed over the block's keys, so
        a row of the map sums to 1 where every query attends. Blocks are as equal as they can be:
        position i of n is in block floor(i * blocks / n).
        """
        queries = checked_blocks("queries", queries, self.shape[2])
        keys = checked_blocks("keys", keys, self.shape[3])
        if max(queries, keys) > SMALL_MAP:
            wanted = Requested(query_blocks=queries, key_blocks=keys)
            sums = run(Task(self._problem(), wanted=wanted)).cells
        else:
            by_key = self @ block_map.membership(self.shape[3], keys, self.q)[None, None]
            # Counts of queries leave the range of float16 and the precision of bfloat16.
            by_key = by_key.to(accumulation_dtype(self.q.dtype))
            with without_autocast(self.q):
                members = block_map.membership(self.shape[2], queries, by_key)
                sums = members.transpose(-2, -1) @ by_key
        return (sums / block_map.sizes(self.shape[2], queries, sums)[:, None]).to(self.q.dtype)

    # ---- reductions -------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Logsumexp, entropy, maximum and received, from one pass over the matrix."""
        reading = run(Task(self._problem(), wanted=Requested(entropy=True, received=True)))
        return Statistics(
            self._logsumexp(reading), reading.entropy, self._maximum(reading), reading.received
        )

    def logsumexp(self) -> Float[Tensor, "batch heads queries"]:
        """log sum exp of each query's scores, the sink included; -inf where there is neither."""
        return self._logsumexp(run(Task(self._problem())))

    def entropy(self) -> Float[Tensor, "batch heads queries"]:
        """-sum p log p of each query's weights, in nats; a sink counts as one more outcome."""
        return run(Task(self._problem(), wanted=Requested(entropy=True))).entropy

    def maximum(self) -> Float[Tensor, "batch heads queries"]:
        """The largest weight of each query; 0 where it may attend to nothing."""
        return self._maximum(run(Task(self._problem())))

    def received(self) -> Float[Tensor, "batch heads keys"]:
        """The weight each key receives, summed over queries."""
        return run(Task(self._problem(), wanted=Requested(received=True))).received

    def seen_by(self, queries: Bool[Tensor, "batch queries"]) -> Int[Tensor, "batch _ keys"]:
        """How many of these queries may attend to each key; one axis of heads where all agree.

        Raises:
            ShapeError: ``queries`` is no bool tensor of (batch, queries).
        """
        check_queries_seen(queries, batch=self.shape[0], length=self.shape[2])
        return seen_by(self._problem(), queries)

    def head_average(self) -> Float[Tensor, "batch queries keys"]:
        """The mean of the weights over heads, without the weights of single heads."""
        return run(Task(self._problem(), wanted=Requested(average=True))).average

    def tiles(
        self, *, with_scores: bool = False, with_lowest: bool = False
    ) -> Iterator[ObservedTile]:
        """The weights, tile by tile, for a reduction of one's own; without gradients.

        `headwise.scanning.statistics` is made of such. A tile's memory is reused by the next.
        """
        parts = observe(self._problem(), with_scores=with_scores, with_lowest=with_lowest)
        while True:
            with torch.no_grad():  # never around a yield: the reader's own gradients would go off
                part = next(parts, None)
            if part is None:
                return
            yield part

    # ---- within -----------------------------------------------------------------------------

    @property
    def _sizes(self) -> dict[str, int]:
        return dict(zip(MATRIX_AXES, self.shape, strict=True))

    @property
    def _bias(self) -> BoundBias:
        # Bound for each reading: a table by distance belongs to the graph of the reading.
        (_, _, queries, keys), device = self.shape, self.q.device
        dtype = accumulation_dtype(self.q.dtype)
        return self.score_bias.bound(queries=queries, keys=keys, device=device, dtype=dtype)

    def _problem(self) -> BoundScores:
        mask, bias = self.bound_mask, self._bias
        return BoundScores(self.q, self.k, mask, bias, self.scale, self.softcap, self.sink)

    def _problem_for(self, v: Tensor) -> tuple[BoundScores, Tensor]:
        """The problem with as many kv heads as the values have, and the values at full size."""
        require_tensors(v=v)
        batch, heads, _, keys = self.shape
        kv_heads = self.k.shape[1]
        fits = v.dim() == 4 and broadcasts(v.shape[0], batch) and v.shape[2] == keys
        own_heads = fits and broadcasts(v.shape[1], kv_heads)
        if not fits or not (own_heads or v.shape[1] == heads):
            refuse_operand(
                "A @ v", v, f"(batch {batch}, kv_heads {kv_heads}, keys {keys}, value_dim)"
            )
        check_operand("v", v, self.q)
        k = self.k if own_heads else reference.share_heads(self.k, heads=heads)
        return replace(self._problem(), k=k), v.expand(batch, k.shape[1], *v.shape[2:])

    def _one_row(self, v: Tensor) -> tuple[Tensor, Tensor] | None:
        return dense.one_row(self.q, self.k, v, self.scale) if self._is_plain else None

    def _needs_gradient(self, v: Tensor) -> bool:
        """True if a product with these values is recorded for a backward pass."""
        leaves = (self.q, self.k, v) if self.sink is None else (self.q, self.k, v, self.sink)
        needs = self.score_bias.requires_grad or any(x.requires_grad for x in leaves)
        return needs and torch.is_grad_enabled()

    def _detached_sink(self) -> Tensor | None:
        return None if self.sink is None else self.sink.detach()

    def _logsumexp(self, reading: KernelResult) -> Tensor:
        peak = reading.peak.detach()
        if self.sink is not None:
            peak = torch.maximum(peak, self.sink.detach().to(peak.dtype)[:, None])
        return peak + reading.log_sum

    def _maximum(self, reading: KernelResult) -> Tensor:
        shift = shift_of(reading.peak.detach(), self._detached_sink())
        return torch.exp(reading.peak - shift - reading.log_sum)

    def _bytes(self) -> int:
        return math.prod(self.shape) * self.q.element_size()


class TransposedMatrix(LeftOperand):
    """(batch, heads, keys, queries): what keys receive. Made by ``A.mT``."""

    def __init__(self, matrix: AttentionMatrix) -> None:
        self.mT = matrix

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, keys, queries)."""
        return *self.mT.shape[:2], self.mT.shape[3], self.mT.shape[2]

    def __matmul__(
        self, y: Float[Tensor, "#batch #heads queries y_dim"]
    ) -> Float[Tensor, "batch heads keys y_dim"]:
        """For each key, the sum over queries of weight times ``y``."""
        require_tensors(y=y)
        batch, heads, _, queries = self.shape
        fits = y.dim() == 4 and y.shape[2] == queries
        if not fits or not (broadcasts(y.shape[0], batch) and broadcasts(y.shape[1], heads)):
            refuse_operand(
                "A.mT @ y", y, f"(batch {batch}, heads {heads}, queries {queries}, y_dim)"
            )
        check_operand("y", y, self.mT.q)
        y = y.expand(batch, heads, *y.shape[2:])
        return run(Task(self.mT._problem(), y=y)).transposed

    def __repr__(self) -> str:
        return f"{self.mT!r}.mT"
