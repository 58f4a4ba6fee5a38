"""Attention call of a running model: the one record that capture fills and statistics read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from headwise import reference
from headwise.errors import ShapeError
from headwise.kernels.problem import accumulation_dtype
from headwise.matrix import AttentionMatrix
from headwise.scanning.call_rows import Repeats, Samples
from headwise.support.axes import sizes

CELLS = 64  # a map is this many blocks of queries by this many blocks of keys


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
    def repeats(self) -> Repeats:
        """Where tokens stand again."""
        assert self.tokens is not None, 'a statistic that asks for this needs "tokens"'
        return Repeats(self.tokens, self.real_keys)

    @cached_property
    def samples(self) -> Samples:
        """Whole rows of some queries, which the tiles fill in."""
        return Samples(self.matrix, self.real_queries)

    @cached_property
    def out_proj_factors(self) -> Float[Tensor, "heads value_dim width"]:
        """F with ‖z W_O‖ = ‖z F‖ for every z, no wider than z: the cheap way to a norm."""
        assert self.out_proj is not None, 'a statistic that asks for this needs "out_proj"'
        # W_O^T = Q R, and Q keeps norms. Squaring W_O would lose half of the digits.
        factors: Tensor = torch.linalg.qr(self.out_proj.double().mT, mode="r")[1].mT
        return factors

    @cached_property
    def value_norms(self) -> Float[Tensor, "batch heads keys"]:
        """The norm of what each head would write if it looked at one key alone."""
        assert self.values is not None, 'a statistic that asks for this needs "values"'
        batch, heads, _, keys = self.matrix.shape
        group = heads // self.values.shape[1]
        exact = accumulation_dtype(self.values.dtype)
        norms = torch.empty(batch, heads, keys, dtype=exact, device=self.values.device)
        for head, factor in enumerate(self.out_proj_factors.to(exact)):
            written = self.values[:, head // group].to(exact) @ factor
            norms[:, head] = torch.linalg.vector_norm(written, dim=-1)
        return norms


def _cells(real: Bool[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
    """Block floor(i * CELLS / n) for the i-th of n real positions, -1 for padding."""
    place = real.long().cumsum(-1) - 1
    count = real.sum(-1, keepdim=True).clamp(min=1)
    return (place * CELLS // count).masked_fill(~real, -1)
