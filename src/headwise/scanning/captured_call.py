"""Attention call of a running model: the one record that capture fills and statistics read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from headwise import reference
from headwise.attention_matrix import AttentionMatrix
from headwise.errors import ShapeError
from headwise.kernels.bound_scores import accumulation_dtype
from headwise.support.axes import sizes
from headwise.support.integers import as_int64

CELLS = 64  # a map is this many blocks of queries by this many blocks of keys
SAMPLES = 64  # rows that are kept of each sequence, at most
Known = TypeVar("Known")


class SampledRows:
    """The rows of some queries of each sequence, out of all tiles.

    Which ones depends on the sequence alone, never on what else is in its batch or on padding.

    Attributes:
        places: (batch, samples), the queries; any number where there is no such sample.
        real: (batch, samples), whether there is one.
        weights: (batch, heads, samples, keys).
        sink: (batch, heads, samples), the sink's share; 0 without a sink.
        counted: (batch, heads, samples), whether the query may attend to something.
    """

    def __init__(
        self, matrix: AttentionMatrix, real_queries: Bool[Tensor, "batch queries"]
    ) -> None:
        batch, heads, _, keys = matrix.shape
        self.places, self.real = evenly_spaced(real_queries, at_most=SAMPLES)
        samples, device = self.places.shape[1], matrix.q.device
        exact = accumulation_dtype(matrix.q.dtype)
        self.weights = torch.zeros(batch, heads, samples, keys, dtype=exact, device=device)
        self.sink = torch.zeros(batch, heads, samples, dtype=exact, device=device)
        self.counted = torch.zeros(batch, heads, samples, dtype=torch.bool, device=device)


def evenly_spaced(
    real: Bool[Tensor, "batch length"], *, at_most: int
) -> tuple[Int[Tensor, "batch samples"], Bool[Tensor, "batch samples"]]:
    """The middles of as many equal stretches of each sequence; all of a sequence that is shorter.

    Returns:
        Places, and whether there is one: sequences differ in length.
    """
    samples = min(at_most, real.shape[1])
    count = real.sum(-1, keepdim=True)
    nth = torch.arange(samples, device=real.device)
    spread = (2 * nth + 1) * count // (2 * max(1, samples))
    nth = torch.where(count > samples, spread, nth)
    in_order = (~real).int().argsort(dim=-1, stable=True)  # the real ones first
    return in_order.gather(1, nth.clamp(max=max(0, real.shape[1] - 1))), nth < count


class RepeatedTokens:
    """For each key, the earlier keys that hold the same token.

    Keys are sorted by token once, so the work grows with the number of repeats: no tile of
    queries x keys is compared.
    """

    def __init__(
        self, tokens: Integer[Tensor, "batch keys"], real: Bool[Tensor, "batch keys"]
    ) -> None:
        tokens = as_int64(tokens, "tokens")
        # Padding, and what is not known, is a token of its own that nothing asks about.
        known = real & (tokens >= 0)
        name = torch.unique(tokens, return_inverse=True)[1] + 1
        name = name.masked_fill(~known, 0)
        self._order = name.argsort(dim=-1, stable=True)
        in_order = name.gather(1, self._order)
        self._first = torch.searchsorted(in_order, name)  # where the token's keys begin
        nth = torch.arange(name.shape[1], device=name.device).expand_as(name)
        place = torch.empty_like(name).scatter_(1, self._order, nth)
        self.earlier = (place - self._first).masked_fill(~known, 0)
        """(batch, keys): how many earlier keys hold the token of this one."""

    def pairs(self, batches: slice, own: Int[Tensor, " rows"]) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, row, key) of every earlier key with the token of one of the rows' own keys."""
        earlier = self.earlier[batches][:, own].flatten()
        row = torch.repeat_interleave(torch.arange(len(earlier), device=own.device), earlier)
        nth = torch.arange(len(row), device=own.device) - (earlier.cumsum(0) - earlier)[row]
        place = self._first[batches][:, own].flatten()[row] + nth
        batch = row // max(1, len(own))
        return batch, row - batch * len(own), self._order[batches][batch, place]


@dataclass(eq=False, kw_only=True)
class CapturedCall:
    """What a layer computes, and what is known around it.

    What is None is not known; statistics that need it are left out.

    Attributes:
        matrix: the attention matrix.
        real_queries: False where a query is padding. Padding attends, but means nothing.
        real_keys: False where a key is padding.
        own_key: the key that stands where query 0 stands: 0 in self-attention, the number of
            earlier keys with a cache; None in cross attention, where no key is a query's own.
        tokens: the token of each key; below 0 where it is not known.
        separators: True where a key holds a separator, such as a full stop or [SEP].
        specials: True where a key holds one of the tokenizer's special tokens.
        dropped: how many keys before the first one a cache holds no more: no query sees them.
        values: what is attended to.
        outputs: the head outputs, before any output projection.
        out_proj: each head's part of the output projection, known once that was called.
        residual: what the layer's output is added to: the state that its block was given. Known
            for the first attention of a block, if the state was not changed since.
        unembedding: what turns a residual into a score for each token of the vocabulary.
        layer: its name in the model; "(2)" where the same module runs again in one pass, and
            "(call 2)" where one run of it attends once more for the same tokens.
        module: the module that ran; None outside of any.
        state: the first floating-point tensor that the module was given.
        is_cross: whether keys come from elsewhere than queries.
    """

    matrix: AttentionMatrix
    real_queries: Bool[Tensor, "batch queries"]
    real_keys: Bool[Tensor, "batch keys"]
    own_key: int | None
    tokens: Integer[Tensor, "batch keys"] | None = None
    separators: Bool[Tensor, "batch keys"] | None = None
    specials: Bool[Tensor, "batch keys"] | None = None
    dropped: int = 0
    values: Float[Tensor, "batch kv_heads keys value_dim"] | None = None
    outputs: Float[Tensor, "batch heads queries value_dim"] | None = None
    out_proj: Float[Tensor, "heads value_dim embed_dim"] | None = None
    residual: Float[Tensor, "batch queries embed_dim"] | None = None
    unembedding: Float[Tensor, "vocabulary embed_dim"] | None = None
    layer: str = "attention"
    module: nn.Module | None = None
    state: Tensor | None = None
    is_cross: bool = False

    def __post_init__(self) -> None:
        batch, _, queries, keys = self.matrix.shape
        lengths = dict.fromkeys(("real_keys", "tokens", "separators", "specials"), keys)
        for name, length in {"real_queries": queries, **lengths}.items():
            given, axis = getattr(self, name), "queries" if name == "real_queries" else "keys"
            if given is not None and given.shape != (batch, length):
                raise ShapeError(
                    saw=f"{name} {sizes(given, ('batch', axis))}",
                    needed=f"(batch {batch}, {axis} {length})",
                    do=f"say it of each of the {axis} of each sequence",
                )

    @classmethod
    def of(
        cls,
        matrix: AttentionMatrix,
        *,
        real: Bool[Tensor, "batch keys"] | None = None,
        own_key: int | None = 0,
        **known: Any,
    ) -> CapturedCall:
        """Return a call of self-attention, where queries are keys.

        Args:
            matrix: its attention matrix.
            real: False where a key, and the query that stands there, is padding; none is if None.
            own_key: as in the class; None for cross attention, whose queries are all real.
            known: any other attribute.
        """
        batch, _, queries, keys = matrix.shape
        if real is None:
            real = torch.ones(batch, keys, dtype=torch.bool, device=matrix.q.device)
        real_queries = (
            real.new_ones(batch, queries)
            if own_key is None
            else real[:, own_key : own_key + queries]
        )
        return cls(
            matrix=matrix, real_queries=real_queries, real_keys=real, own_key=own_key, **known
        )

    def of_heads(self, heads: Int[Tensor, " heads"]) -> CapturedCall:
        """Return the call of some query heads, each with the keys and the values that it reads."""
        matrix, count = self.matrix, self.matrix.shape[1]

        def chosen(shared: Tensor | None) -> Tensor | None:
            if shared is None:
                return None
            return reference.share_heads(shared, heads=count).index_select(1, heads)

        return replace(
            self,
            matrix=AttentionMatrix(
                matrix.q.index_select(1, heads),
                reference.share_heads(matrix.k, heads=count).index_select(1, heads),
                mask=matrix.mask.of_heads(heads),
                score_bias=matrix.score_bias.of_heads(heads),
                scale=matrix.scale,
                softcap=matrix.softcap,
                sink=None if matrix.sink is None else matrix.sink.index_select(0, heads),
            ),
            values=chosen(self.values),
            outputs=chosen(self.outputs),
            out_proj=None if self.out_proj is None else self.out_proj.index_select(0, heads),
        )

    @cached_property
    def first_key(self) -> Int[Tensor, " batch"]:
        """The first key of each sequence that is no padding."""
        # There may be no keys at all.
        return torch.nn.functional.pad(self.real_keys.int(), (0, 1)).argmax(-1)

    @cached_property
    def query_cells(self) -> Int[Tensor, "batch queries"]:
        """The block of a map that each query is in, -1 for padding."""
        if self.own_key is None:
            return _cells(self.real_queries)
        queries = self.matrix.shape[2]
        cells = _cells(self.real_keys)[:, self.own_key : self.own_key + queries]
        return cells.masked_fill(~self.real_queries, -1)

    @cached_property
    def key_cells(self) -> Float[Tensor, "batch keys cells"]:
        """1 where a key is in a block of a map."""
        cells = _cells(self.real_keys)
        return (cells[..., None] == torch.arange(CELLS, device=cells.device)).float()

    @cached_property
    def seen_by(self) -> Int[Tensor, "batch _ keys"]:
        """How many real queries may attend to each key; one axis of heads where all agree."""
        return self.matrix.seen_by(self.real_queries)

    @cached_property
    def repeats(self) -> RepeatedTokens:
        """Where tokens stand again."""
        return RepeatedTokens(known(self.tokens), self.real_keys)

    @cached_property
    def samples(self) -> SampledRows:
        """Whole rows of some queries, which the tiles fill in."""
        return SampledRows(self.matrix, self.real_queries)

    @cached_property
    def out_proj_factors(self) -> Float[Tensor, "heads value_dim width"]:
        """F with ‖z W_O‖ = ‖z F‖ for every z, no wider than z: the cheap way to a norm."""
        # W_O^T = Q R, and Q keeps norms. Squaring W_O would lose half of the digits.
        factors: Tensor = torch.linalg.qr(known(self.out_proj).double().mT, mode="r")[1].mT
        return factors

    @cached_property
    def value_norms(self) -> Float[Tensor, "batch heads keys"]:
        """The norm of what each head would write if it looked at one key alone."""
        values = known(self.values)
        batch, heads, _, keys = self.matrix.shape
        group = heads // values.shape[1]
        exact = accumulation_dtype(values.dtype)
        norms = torch.empty(batch, heads, keys, dtype=exact, device=values.device)
        for head, factor in enumerate(self.out_proj_factors.to(exact)):
            written = values[:, head // group].to(exact) @ factor
            norms[:, head] = torch.linalg.vector_norm(written, dim=-1)
        return norms


def known(fact: Known | None) -> Known:
    """Return what a statistic reads of a call; its ``needs`` say that it is not None."""
    assert fact is not None, "a statistic that reads this says so in its needs"
    return fact


def _cells(real: Bool[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
    """Block floor(i * CELLS / n) for the i-th of n real positions, -1 for padding."""
    place = real.long().cumsum(-1) - 1
    count = real.sum(-1, keepdim=True).clamp(min=1)
    return (place * CELLS // count).masked_fill(~real, -1)
