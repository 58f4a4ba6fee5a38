"""One attention call as statistics see it: its matrix, and what is known around it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from headwise.errors import ShapeError
from headwise.kernels.problem import accumulation_dtype
from headwise.matrix import AttentionMatrix
from headwise.scanning.statistics.repeats import Repeats
from headwise.scanning.statistics.samples import Samples
from headwise.support.axes import sizes

CELLS = 64  # a map is this many blocks of queries by this many blocks of keys


@dataclass(frozen=True, eq=False, kw_only=True)
class Sequences:
    """What is known of the tokens that attend and are attended to.

    Attributes:
        real_queries: False where a query is padding. Padding attends, but means nothing.
        real_keys: False where a key is padding.
        own_key: the key that stands where query 0 stands: 0 in self-attention, the number of
            earlier keys with a cache; None in cross attention, where no key is a query's own.
        tokens: the token of each key; below 0 where it is not known.
        separators: True where a key holds a separator, such as a full stop or [SEP].
        specials: True where a key holds one of the tokenizer's special tokens.
        dropped: how many keys before the first one a cache holds no more: no query sees them.
    """

    real_queries: Bool[Tensor, "batch queries"]
    real_keys: Bool[Tensor, "batch keys"]
    own_key: int | None
    tokens: Integer[Tensor, "batch keys"] | None = None
    separators: Bool[Tensor, "batch keys"] | None = None
    specials: Bool[Tensor, "batch keys"] | None = None
    dropped: int = 0

    @classmethod
    def of(
        cls,
        matrix: AttentionMatrix,
        *,
        real: Bool[Tensor, "batch keys"] | None = None,
        own_key: int | None = 0,
        tokens: Integer[Tensor, "batch keys"] | None = None,
        separators: Bool[Tensor, "batch keys"] | None = None,
        specials: Bool[Tensor, "batch keys"] | None = None,
    ) -> Sequences:
        """Those of self-attention, where queries are keys; all tokens are real if not said."""
        batch, _, queries, keys = matrix.shape
        if real is None:
            real = torch.ones(batch, keys, dtype=torch.bool, device=matrix.q.device)
        real_queries = (
            torch.ones(batch, queries, dtype=torch.bool, device=real.device)
            if own_key is None
            else real[:, own_key : own_key + queries]
        )
        return cls(
            real_queries=real_queries,
            real_keys=real,
            own_key=own_key,
            tokens=tokens,
            separators=separators,
            specials=specials,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Observation:
    """One attention call of a layer.

    What is None is not known; statistics that need it are left out.

    Attributes:
        matrix: its attention matrix.
        sequences: what is known of its tokens.
        values: what is attended to, (batch, kv_heads, keys, value_dim).
        outputs: the head outputs, before any output projection.
        out_proj: each head's part of the output projection.
        residual: what the layer's output is added to.
        unembedding: what turns a residual into a score for each token of the vocabulary.
    """

    matrix: AttentionMatrix
    sequences: Sequences
    values: Float[Tensor, "batch kv_heads keys value_dim"] | None = None
    outputs: Float[Tensor, "batch heads queries value_dim"] | None = None
    out_proj: Float[Tensor, "heads value_dim embed_dim"] | None = None
    residual: Float[Tensor, "batch queries embed_dim"] | None = None
    unembedding: Float[Tensor, "vocabulary embed_dim"] | None = None

    def __post_init__(self) -> None:
        batch, _, queries, keys = self.matrix.shape
        known = self.sequences
        for name, axis, size in (
            ("real_queries", "queries", queries),
            ("real_keys", "keys", keys),
            ("tokens", "keys", keys),
            ("separators", "keys", keys),
            ("specials", "keys", keys),
        ):
            given = getattr(known, name)
            if given is not None and given.shape != (batch, size):
                raise ShapeError(
                    saw=f"{name} {sizes(given, ('batch', axis))}",
                    needed=f"(batch {batch}, {axis} {size})",
                    do=f"say it of each of the {axis} of each sequence",
                )

    @cached_property
    def first_key(self) -> Int[Tensor, " batch"]:
        """The first key of each sequence that is no padding."""
        real = self.sequences.real_keys.int()
        return torch.nn.functional.pad(real, (0, 1)).argmax(-1)  # there may be no keys at all

    @cached_property
    def query_cells(self) -> Int[Tensor, "batch queries"]:
        """The block of a map that each query is in, -1 for padding."""
        known = self.sequences
        if known.own_key is None:
            return _cells(known.real_queries)
        queries = self.matrix.shape[2]
        cells = _cells(known.real_keys)[:, known.own_key : known.own_key + queries]
        return cells.masked_fill(~known.real_queries, -1)

    @cached_property
    def key_cells(self) -> Float[Tensor, "batch keys cells"]:
        """1 where a key is in a block of a map."""
        cells = _cells(self.sequences.real_keys)
        return (cells[..., None] == torch.arange(CELLS, device=cells.device)).float()

    @cached_property
    def seen_by(self) -> Int[Tensor, "batch _ keys"]:
        """How many real queries may attend to each key; one axis of heads where all agree."""
        return self.matrix.seen_by(self.sequences.real_queries)

    @cached_property
    def repeats(self) -> Repeats:
        """Where tokens stand again."""
        assert self.sequences.tokens is not None, 'a statistic that asks for this needs "tokens"'
        return Repeats(self.sequences.tokens, self.sequences.real_keys)

    @cached_property
    def samples(self) -> Samples:
        """Whole rows of some queries, which the tiles fill in."""
        return Samples(self.matrix, self.sequences.real_queries)

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
