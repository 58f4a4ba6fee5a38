"""Records of a running model: one attention call, and one forward pass of a module."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.function import stages
from headwise.matrix.kernels.kernel import accumulation_dtype
from headwise.matrix.operator import AttentionMatrix
from headwise.support.tensors import convert_to_int64
from headwise.support.text import describe_sizes

SAMPLES = 64  # sampled rows of each sequence, at most
KEPT_PAIRS = 2**20  # of a key and an earlier one with its token, which take 24 MB
T = TypeVar("T")


class SampledRows:
    """Whole rows of the weights, for sampled queries of each sequence.

    The sample depends on the sequence alone, never on padding or on the rest of the batch. A short
    sequence has fewer samples: where ``real`` is False, ``queries`` (batch, samples) are any.
    """

    def __init__(
        self, matrix: AttentionMatrix, real_queries: Bool[Tensor, "batch queries"]
    ) -> None:
        batch, heads, _, keys = matrix.shape
        self.queries, self.real = evenly_spaced_positions(real_queries, at_most=SAMPLES)
        size, exact = (batch, heads, self.queries.shape[1]), accumulation_dtype(matrix.q.dtype)
        self.weights = matrix.q.new_zeros((*size, keys), dtype=exact)
        self.sink = matrix.q.new_zeros(size, dtype=exact)
        self.counted = matrix.q.new_zeros(size, dtype=torch.bool)  # may attend to a key


def evenly_spaced_positions(
    real: Bool[Tensor, "batch length"], *, at_most: int
) -> tuple[Int[Tensor, "batch samples"], Bool[Tensor, "batch samples"]]:
    """Return all positions or middles of equal stretches, and False where a sequence has fewer."""
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
        tokens = convert_to_int64(tokens, "tokens")
        # Padding and unknown tokens share the index 0 and never count as repeats.
        is_token = real & (tokens >= 0)
        index = torch.unique(tokens, return_inverse=True)[1] + 1
        index = index.masked_fill(~is_token, 0)
        self._order = index.argsort(dim=-1, stable=True)
        in_order = index.gather(1, self._order)
        self._first = torch.searchsorted(in_order, index)  # where the token's keys begin
        nth = torch.arange(index.shape[1], device=index.device).expand_as(index)
        rank = torch.empty_like(index).scatter_(1, self._order, nth)
        self.earlier = (rank - self._first).masked_fill(~is_token, 0)
        """(batch, keys): number of earlier keys with the token of this key."""
        self._keeps = bool(self.earlier.sum() <= KEPT_PAIRS)
        self._pairs: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def earlier_repeat_pairs(self, batches: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return (batch, row, key) of every earlier key with a row's token, keys counted from 0."""
        at = batches.start, batches.stop, keys.start, keys.stop
        if (pairs := self._pairs.get(at)) is None:
            pairs = self._find_pairs(batches, keys)
            if self._keeps:  # the tiles of other heads ask for the same rows
                self._pairs[at] = pairs
        return pairs

    def _find_pairs(self, batches: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor]:
        rows = keys.stop - keys.start
        earlier = self.earlier[batches, keys].flatten()
        row = torch.repeat_interleave(torch.arange(len(earlier), device=earlier.device), earlier)
        nth = torch.arange(len(row), device=row.device) - (earlier.cumsum(0) - earlier)[row]
        rank = self._first[batches, keys].flatten()[row] + nth
        batch = row // max(1, rows)
        return batch, row - batch * rows, self._order[batches][batch, rank]


class OriginalHeads(NamedTuple):
    """Heads of a layer before some were taken out, as its module states them in `ORIGINAL`."""

    total: int
    numbers: tuple[int, ...]  # of each head that is left, in the original layer


ORIGINAL = "original_heads"  # attribute of a module that lost heads


@dataclass(eq=False, kw_only=True)
class CapturedCall:
    """One attention call of a layer, with what was observed around it.

    An attribute is None if it is unknown; statistics that need it are left out. ``own_key`` is the
    key at the position of query 0: 0 in self-attention, the number of earlier keys with a cache,
    and None in cross attention. ``outputs`` enter the output projection; ``mixed`` are the weights
    times the values, where an output gate follows. ``residual`` is the input state of the block, to
    which the layer's output is added: known for the first attention of a block, if the state has
    not changed since. ``unembedding`` maps a residual to a score for each token of the vocabulary.
    ``layer`` has "(2)" where the same module runs again in one pass, and "(call 2)" where one run
    attends once more for the same tokens.
    """

    matrix: AttentionMatrix
    real_queries: Bool[Tensor, "batch queries"]  # False for padding
    real_keys: Bool[Tensor, "batch keys"]
    own_key: int | None
    tokens: Integer[Tensor, "batch keys"] | None = None  # below 0 where it is unknown
    separators: Bool[Tensor, "batch keys"] | None = None  # such as a full stop or [SEP]
    specials: Bool[Tensor, "batch keys"] | None = None  # special tokens of the tokenizer
    dropped: int = 0  # number of earlier keys that a cache no longer holds; no query sees them
    read_tokens: Integer[Tensor, "batch read"] | None = None  # with those of dropped keys
    continues_text: bool = False  # the call before in the layer had the queries before these
    values: Float[Tensor, "batch kv_heads keys value_dim"] | None = None
    outputs: Float[Tensor, "batch heads queries value_dim"] | None = None
    mixed: Float[Tensor, "batch heads queries value_dim"] | None = None
    out_proj: Float[Tensor, "heads value_dim embed_dim"] | None = None  # known once it has run
    residual: Float[Tensor, "batch queries embed_dim"] | None = None
    unembedding: Float[Tensor, "vocabulary embed_dim"] | None = None
    layer: str = "attention"
    module: nn.Module | None = None  # None outside of modules
    state: Tensor | None = None  # the first floating-point input of the module
    is_cross: bool = False  # keys and queries are projected from different tensors
    layer_index: int = 0  # among the scanned layers, in call order
    heads: tuple[int, ...] | None = None  # numbers in their layer; None for all
    original: OriginalHeads | None = None  # of a layer that lost heads

    def __post_init__(self) -> None:
        batch, _, queries, keys = self.matrix.shape
        lengths = dict.fromkeys(("real_keys", "tokens", "separators", "specials"), keys)
        for name, length in {"real_queries": queries, **lengths}.items():
            tensor, axis = getattr(self, name), "queries" if name == "real_queries" else "keys"
            if tensor is not None and tensor.shape != (batch, length):
                saw = f"{name} {describe_sizes(tensor, ('batch', axis))}"
                do = f"give one entry for each of the {axis} of each sequence"
                raise ShapeError(saw=saw, needed=f"(batch {batch}, {axis} {length})", do=do)

    @classmethod
    def for_self_attention(
        cls,
        matrix: AttentionMatrix,
        *,
        real: Bool[Tensor, "batch keys"] | None = None,
        own_key: int | None = 0,
        **attributes: Any,
    ) -> CapturedCall:
        """Return a call of self-attention, where queries are keys.

        ``real`` is False where a key, and the query that stands there, is padding; none is if None.
        With ``own_key`` None, as in cross attention, all queries are real.
        """
        batch, _, queries, keys = matrix.shape
        if real is None:
            real = torch.ones(batch, keys, dtype=torch.bool, device=matrix.q.device)
        real_queries = real.new_ones(batch, queries)
        if own_key is not None:
            real_queries = real[:, own_key : own_key + queries]
        attributes |= {"real_queries": real_queries, "real_keys": real, "own_key": own_key}
        return cls(matrix=matrix, **attributes)

    def of_heads(self, heads: Int[Tensor, " heads"]) -> CapturedCall:
        """Return the call of some query heads, each with the keys and the values that it reads."""
        matrix, count = self.matrix, self.matrix.shape[1]

        def of_each_head(shared: Tensor) -> Tensor:
            return stages.repeat_kv_heads(shared, heads=count).index_select(1, heads)

        chosen = AttentionMatrix(
            matrix.q.index_select(1, heads),
            of_each_head(matrix.k),
            mask=matrix.mask.of_heads(heads),
            score_bias=matrix.score_bias.of_heads(heads),
            scale=matrix.scale,
            softcap=matrix.softcap,
            sink=None if matrix.sink is None else matrix.sink.index_select(0, heads),
        )
        names = ("values", "outputs", "mixed")
        known = {name: x for name in names if (x := getattr(self, name)) is not None}
        changes: dict[str, Any] = {name: of_each_head(x) for name, x in known.items()}
        if self.out_proj is not None:
            changes["out_proj"] = self.out_proj.index_select(0, heads)
        return replace(self, matrix=chosen, heads=tuple(heads.tolist()), **changes)

    @property
    def reason_not_whole(self) -> str | None:
        """The reason why the queries are no whole sequences, or None if they may be."""
        if self.own_key:
            return "the call continues a cache, so its queries are no whole sequences"
        return None

    @cached_property
    def first_real_key(self) -> Int[Tensor, " batch"]:
        """The first key of each sequence that is no padding."""
        # There may be no keys at all.
        return torch.nn.functional.pad(self.real_keys.int(), (0, 1)).argmax(-1)

    @cached_property
    def query_positions(self) -> Int[Tensor, "batch queries"]:
        """The number of each query among the real tokens of its sequence, −1 for padding."""
        if self.own_key is None:
            return _positions_of_real(self.real_queries)
        position = self.key_positions[:, self.own_key :][:, : self.matrix.shape[2]]
        return position.masked_fill(~self.real_queries, -1)

    @cached_property
    def key_positions(self) -> Int[Tensor, "batch keys"]:
        """The number of each key among the real tokens of its sequence, −1 for padding."""
        position = _positions_of_real(self.real_keys)
        return position.where(position < 0, position + self.dropped)

    @cached_property
    def seen_by(self) -> Int[Tensor, "batch _ keys"]:
        """Number of real queries that may attend to each key; one head if all heads agree."""
        return self.matrix.seen_by(self.real_queries)

    @cached_property
    def repeated_tokens(self) -> RepeatedTokens:
        """Earlier keys with the same token, for each key."""
        return RepeatedTokens(require_not_none(self.tokens), self.real_keys)

    @cached_property
    def sampled_rows(self) -> SampledRows:
        """Sampled rows, which the tiles fill in."""
        return SampledRows(self.matrix, self.real_queries)

    @cached_property
    def residual_norms(self) -> Float[Tensor, "batch queries"]:
        """The norm of the residual that the layer's output is added to."""
        residual = require_not_none(self.residual)
        norms: Tensor = torch.linalg.vector_norm(
            residual, dim=-1, dtype=accumulation_dtype(residual.dtype)
        )
        return norms

    @cached_property
    def norm_preserving_out_proj_factors(self) -> Float[Tensor, "heads value_dim width"]:
        """F with ‖z W_O‖ = ‖z F‖ for every z: no wider than z, so that norms are cheap."""
        # W_O^T = Q R, and Q keeps norms. Squaring W_O would lose half of the digits.
        out_proj = require_not_none(self.out_proj).double()
        factors: Tensor = torch.linalg.qr(out_proj.mT, mode="r")[1].mT
        return factors

    @cached_property
    def contribution_norms(self) -> Float[Tensor, "batch heads queries"]:
        """‖z W_O‖ of each query: the norm of each head's contribution."""
        outputs = require_not_none(self.outputs)
        exact = accumulation_dtype(outputs.dtype)
        factors = zip(outputs.unbind(1), self.norm_preserving_out_proj_factors, strict=True)
        norms = [torch.linalg.vector_norm(z.to(exact) @ F.to(exact), dim=-1) for z, F in factors]
        return torch.stack(norms, 1)

    @cached_property
    def projected_value_norms(self) -> Float[Tensor, "batch heads keys"]:
        """‖v W_O‖ of each key: the norm of the contribution of a head that attends to it alone."""
        values = require_not_none(self.values)
        group, exact = self.matrix.shape[1] // values.shape[1], accumulation_dtype(values.dtype)
        factors = enumerate(self.norm_preserving_out_proj_factors.to(exact))
        written = (values[:, head // group].to(exact) @ factor for head, factor in factors)
        return torch.stack([torch.linalg.vector_norm(each, dim=-1) for each in written], 1)


def require_not_none(value: T | None) -> T:
    """Return a value that must be there."""
    assert value is not None, "a statistic must list what it uses in its needs"
    return value


def _positions_of_real(real: Bool[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
    return (real.long().cumsum(-1) - 1).masked_fill(~real, -1)


# ---- modules that run ----------------------------------------------------------------------------


@dataclass(eq=False)
class ModuleCall:
    """One forward pass of one module, while the module runs."""

    module: nn.Module
    name: str  # with a number where the same module runs again in one pass
    is_block: bool = False  # a member of a list of modules of one class, which pass a state on
    state: Tensor | None = None  # the first floating-point input
    version: int = -1  # of the state: counts changes in place
    tokens: list[Tensor] = field(default_factory=list)  # integers (batch, length), maybe tokens
    has_source: bool = False  # an argument names another source to attend to
    # Inputs of the first two matrices inside since the last attention call.
    projected: list[Tensor] = field(default_factory=list)
    attended: int = 0  # number of attention calls inside
    # Keys of the module's last attention call, and True if that was cross attention.
    last_keys: tuple[Tensor, bool] | None = None
    # Explicit products inside, by the size of their results, and input and output of their softmax.
    scores: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    weights: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _turn: int = 1
    _covered: int = 0  # tokens whose queries this turn has had

    def turn_of_attention_call(self, queries: int) -> int:
        """Return the number of the turn that an attention call of so many queries belongs to.

        Calls are one turn until every input token has had its query. A later call attends once more
        for the same tokens, as in DiffLlama. With an unknown number of tokens, each call is a turn.
        """
        count = 0 if self.state is not None or not self.tokens else self.tokens[0].numel()
        # With four axes, the last but one may be the length, the height of a picture, or heads.
        if self.state is not None and not self.state.is_nested and self.state.dim() <= 3:
            count = self.state.shape[:-1].numel()
        if self._covered and self._covered + queries > count:
            self._turn, self._covered = self._turn + 1, 0
        self._covered += queries
        return self._turn


def version_counter(state: Tensor | None) -> int:
    """Return how often a tensor was changed in place; −1 where torch does not count."""
    return -1 if state is None or state.is_inference() else state._version


def tensors_equal(a: Tensor, b: Tensor) -> bool:
    """True if two tensors have the same shape and hold the same numbers."""
    return a is b or (a.shape == b.shape and bool(torch.equal(a, b)))
