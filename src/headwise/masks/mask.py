"""Masks: the (query, key) pairs that may attend, as a lazy value. True always means "may attend".

A `Mask` is a conjunction of clauses, none of which is queries x keys by nature: bands (causal and
sliding window), lengths and starts (padding on either side), segments (several sequences in one
row), a prefix, a function of the caller's, and dense boolean tensors for everything else.

``bind`` fixes the sizes; kernels then evaluate one block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import SupportsIndex, TypeVar

import torch
from jaxtyping import Bool, Integer
from torch import Tensor

from headwise.errors import MaskError, OptionError
from headwise.masks.bound import BoundMask, bind_clauses
from headwise.masks.clause import BOUNDLESS, Align, Clause, MatrixSizes, require_align
from headwise.masks.clauses import band, segments
from headwise.masks.clauses.dense import Dense, with_matrix_axes
from headwise.masks.clauses.lengths import KEYS, QUERIES, Lengths, Side, Starts, require_lengths
from headwise.masks.clauses.predicate import Predicate, PredicateClause
from headwise.masks.polarity import warn_of_polarity
from headwise.support import arguments, lazy, text, tracing
from headwise.support.tensors import convert_to_int64, convert_to_int_or_none

OneKind = TypeVar("OneKind", bound=Clause)


@dataclass(frozen=True, eq=False)
class Mask(lazy.ShownInNotebook):
    """A lazy mask. Build one with a classmethod, combine with ``&``; ``Mask()`` allows all."""

    clauses: tuple[Clause, ...] = ()

    # ---- construction -----------------------------------------------------------------------

    @classmethod
    def causal(cls, *, align: Align | None = None) -> Mask:
        """A query sees no later key.

        ``align`` must be named where queries != keys: ``top-left`` aligns the first query with
        the first key, ``bottom-right`` the last with the last (what a key/value cache means).
        """
        return cls.window(left=None, right=0, align=align)

    @classmethod
    def window(
        cls, left: SupportsIndex | None, right: SupportsIndex | None, *, align: Align | None = None
    ) -> Mask:
        """A query sees ``left`` keys before its own position and ``right`` after it.

        A side may be any integer: Python's, NumPy's, or a tensor with one integer.

        Raises:
            OptionError: a negative side, or an alignment that does not exist.
        """
        require_align(align)
        return cls(
            (band.Band(_window_side_int("left", left), _window_side_int("right", right), align),)
        )

    @classmethod
    def lengths(
        cls,
        keys: Integer[Tensor, " batch"] | None = None,
        queries: Integer[Tensor, " batch"] | None = None,
        *,
        side: Side = "right",
    ) -> Mask:
        """Only ``keys[b]`` of the keys, and ``queries[b]`` of the queries, are real.

        ``side`` is where the padding stands: behind the tokens (``"right"``), or before them
        (``"left"``), as transformers pads for generation. A query that is padding attends to
        nothing, so its weights and head outputs are zero.

        Raises:
            MaskError: lengths that are no 1-D tensor of integers.
            OptionError: a side that does not exist.
        """
        if side not in ("left", "right"):
            raise OptionError(
                saw=f"lengths(side={text.describe_value(side)})",
                needed='"right" where padding stands behind the tokens, "left" where before them',
                do='Mask.lengths(keys=n, side="left")',
            )
        return cls(
            tuple(
                Lengths(require_lengths(numbers, name), axis, side)
                for name, axis, numbers in _iterate_given_key_and_query_lengths(keys, queries)
            )
        )

    @classmethod
    def starts(
        cls,
        keys: Integer[Tensor, " batch"] | None = None,
        queries: Integer[Tensor, " batch"] | None = None,
    ) -> Mask:
        """Only the keys from place ``keys[b]`` on, and the queries from ``queries[b]``, are real.

        Raises:
            MaskError: starts that are no 1-D tensor of integers.
        """
        return cls(
            tuple(
                Starts(require_lengths(numbers, name, call="starts"), axis)
                for name, axis, numbers in _iterate_given_key_and_query_lengths(keys, queries)
            )
        )

    @classmethod
    def segments(
        cls,
        ids: Integer[Tensor, "batch queries"],
        key_ids: Integer[Tensor, "batch keys"] | None = None,
    ) -> Mask:
        """Queries see the keys that carry their own id; a negative id belongs to no segment.

        Raises:
            MaskError: ids that are no integers.
        """
        query_ids = segments.require_segment_ids(ids, "queries")
        others = query_ids if key_ids is None else segments.require_segment_ids(key_ids, "keys")
        return cls((segments.Segments(query_ids, others),))

    @classmethod
    def packed(
        cls,
        cu_seqlens: Integer[Tensor, " offsets"],
        key_cu_seqlens: Integer[Tensor, " key_offsets"] | None = None,
    ) -> Mask:
        """Sequences one after the other in one row, told by their cumulative lengths.

        Sequence s has the queries from ``cu_seqlens[s]`` up to ``cu_seqlens[s + 1]``, and sees the
        keys of the same sequence alone. Positions behind the last offset attend to nothing. With a
        cache, ``key_cu_seqlens`` counts all keys, the cached ones and those of the call.

        Raises:
            MaskError: no integers, or another number of sequences for the keys.
        """
        queries = keys = segments.require_offsets(cu_seqlens, "cu_seqlens")
        if key_cu_seqlens is not None:
            keys = segments.require_offsets(key_cu_seqlens, "key_cu_seqlens")
        if queries.shape != keys.shape:
            raise MaskError(
                saw=f"{len(queries)} offsets for the queries and {len(keys)} for the keys",
                needed="as many sequences of keys as of queries",
                do="give a sequence without keys the same offset twice",
            )
        return cls((segments.PackedRow(queries, keys),))

    @classmethod
    def prefix(
        cls, n: SupportsIndex | Integer[Tensor, " batch"], *, align: Align | None = None
    ) -> Mask:
        """Every query sees the first ``n`` keys, and of the others no later one than its own.

        ``n`` is one number, or one for each sequence. ``align`` as in `causal`.

        Raises:
            OptionError: a number below 0, or an alignment that does not exist.
        """
        require_align(align)
        return cls((band.make_prefix(n, align),))

    @classmethod
    def where(cls, function: Predicate) -> Mask:
        """The function says who may attend: asked for each tile, never for queries x keys at once.

        Args:
            function: given four integer tensors (batch, head, query, key) that broadcast, it
                returns a bool tensor that broadcasts to the same shape. It is called in eager mode
                alone, and more than once. With a cache, queries and keys are counted from the first
                token of the cache.
        """
        if not callable(function):
            raise MaskError(
                saw=f"Mask.where({text.describe_value(function)})",
                needed="a function of (batch, head, query, key) indices",
                do="a bool tensor is Mask.may_attend(t, axes=...)",
            )
        return cls((PredicateClause(function),))

    @classmethod
    def may_attend(cls, allowed: Bool[Tensor, "..."], *, axes: str) -> Mask:
        """A boolean tensor, True = may attend, whose axes are named: ``"batch keys"`` and so on.

        Raises:
            MaskError: ``allowed`` is not boolean, or ``axes`` does not name its axes.
        """
        arguments.require_tensors(allowed=allowed)
        if allowed.dtype != torch.bool:
            raise MaskError(
                saw=f"Mask.may_attend with a tensor of dtype {allowed.dtype}",
                needed="bool: True = may attend. An integer mask may mean either polarity",
                do="t.bool() if nonzero means may attend, t == 0 if nonzero means blocked; "
                "a float that is added to the scores is a ScoreBias",
            )
        return cls((Dense(with_matrix_axes(allowed, axes)),))

    @classmethod
    def from_torch(cls, attn_mask: Tensor, *, num_heads: int | None = None) -> Mask:
        """The ``attn_mask`` of `torch.nn.MultiheadAttention`: bool True = blocked, float 0 or -inf.

        2-D is (queries, keys); 3-D is (batch*heads, queries, keys), heads fastest, and needs
        ``num_heads``. A float mask with other values is a `ScoreBias`.

        Raises:
            MaskError: another dtype, shape or float value.
        """
        return cls((Dense(to_allowed_matrix(attn_mask, num_heads, true_attends=False)),))

    @classmethod
    def from_torch_padding(cls, key_padding_mask: Tensor) -> Mask:
        """`torch.nn.MultiheadAttention`'s ``key_padding_mask`` (batch, keys): True = ignored.

        Warns, as `headwise.MultiheadAttention` does, of signs of the reverse polarity.

        Raises:
            MaskError: another dtype, shape or float value.
        """
        allowed = to_allowed_entries(key_padding_mask, true_attends=False)
        code = "Mask.from_torch_padding({})"
        warn_of_polarity(key_padding_mask, None, argument=code, stacklevel=2)
        return cls((Dense(with_matrix_axes(allowed, "batch keys")),))

    @classmethod
    def from_sdpa(cls, attn_mask: Tensor) -> Mask:
        """The ``attn_mask`` of `scaled_dot_product_attention`: bool True = may attend.

        2-D is (queries, keys), 4-D is (batch, heads, queries, keys), broadcastable.

        Raises:
            MaskError: another dtype, shape or float value.
        """
        return cls((Dense(to_allowed_matrix(attn_mask, None, true_attends=True)),))

    def __and__(self, other: Mask) -> Mask:
        require_mask_type(other, "Mask & ")
        return Mask(self.clauses + other.clauses)

    # ---- use --------------------------------------------------------------------------------

    def clauses_of_kind(self, kind: type[OneKind]) -> tuple[OneKind, ...]:
        """The clauses of one class."""
        return tuple(clause for clause in self.clauses if isinstance(clause, kind))

    def without_kind(self, kind: type[Clause]) -> Mask:
        """The mask without the clauses of one class."""
        return Mask(tuple(clause for clause in self.clauses if not isinstance(clause, kind)))

    def aligned(self, align: Align) -> Mask:
        """The same mask, with this alignment for the clauses that need one and name none."""
        require_align(align)
        return Mask(tuple(clause.aligned(align) for clause in self.clauses))

    def bind(
        self, *, batch: int, heads: int, queries: int, keys: int, device: torch.device
    ) -> BoundMask:
        """Fix the sizes, resolve alignments and check every tensor against them.

        Raises:
            MaskError: made for other sizes, or an alignment that is needed and not named.
            DeviceError: a tensor on another device than the queries and keys.
        """
        return bind_clauses(self.clauses, MatrixSizes(batch, heads, queries, keys), device)

    def draw(
        self, queries: int | None = None, keys: int | None = None, *, batch: int = 0, head: int = 0
    ) -> str:
        """The mask as a picture: a row per query, 1 = may attend. Known sizes may be left out.

        Raises:
            OptionError: sizes that are no numbers, or a sequence or a head that is not there.
        """
        rows = self.dense(queries, keys, batch=batch, head=head)
        return "\n".join(" ".join("1" if x else "0" for x in row) for row in rows.tolist())

    def dense(
        self, queries: int | None = None, keys: int | None = None, *, batch: int = 0, head: int = 0
    ) -> Bool[Tensor, "_queries _keys"]:
        """Return which queries of a sequence may attend to which keys, as `draw` shows it."""
        shape = self.known_sizes(
            _require_whole_number_or_none("queries", queries),
            _require_whole_number_or_none("keys", keys),
        )
        if shape["batch"] == 0:
            return torch.zeros(0, 0, dtype=torch.bool)
        for name, index, size in (("batch", batch, shape["batch"]), ("head", head, shape["heads"])):
            number = convert_to_int_or_none(index)
            if number is None or not -size <= number < size:
                raise OptionError(
                    saw=f"draw({name}={text.describe_value(index)}) of a mask for {size}",
                    needed=f"a whole number from 0 to {size - 1}",
                    do=f"leave {name} out for the first",
                )
        bound = self.bind(**shape, device=self._find_device())
        rows = bound.evaluate_rows(torch.arange(shape["queries"], device=self._find_device()))
        return rows.expand(shape["batch"], shape["heads"], -1, -1)[batch, head]

    def known_sizes(self, queries: int | None = None, keys: int | None = None) -> dict[str, int]:
        """Return the sizes of batch, heads, queries and keys that the clauses name, else 1."""
        known = [clause.known_sizes() for clause in self.clauses]
        batch, heads, mask_queries, mask_keys = (
            max((sizes[axis] for sizes in known), default=1) for axis in range(4)
        )
        queries = mask_queries if queries is None else queries
        if keys is None:  # those of the mask, or as many as there are queries
            names_every_key = any(clause.names_every_key for clause in self.clauses)
            keys = mask_keys if names_every_key else max(mask_keys, queries)
        return {"batch": batch, "heads": heads, "queries": queries, "keys": keys}

    def _find_device(self) -> torch.device:
        tensors = (t for clause in self.clauses for t in clause.tensors())
        return next((t.device for t in tensors), torch.device("cpu"))

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on ``device``."""
        return self._map_clauses(
            lambda clause: clause.map_tensors(lambda tensor: tensor.to(device))
        )

    def of_heads(self, index: Integer[Tensor, " chosen"]) -> Mask:
        """The mask of chosen heads alone."""
        index = convert_to_int64(index, "heads")
        return self._map_clauses(lambda clause: clause.of_heads(index))

    def _map_clauses(self, function: Callable[[Clause], Clause]) -> Mask:
        return Mask(tuple(map(function, self.clauses)))

    def __str__(self) -> str:
        return " & ".join(map(str, self.clauses)) or "everything"

    def __repr__(self) -> str:
        return f"Mask({self})"


NO_MASK = Mask()  # the default of calls, recognised by identity


def require_mask_type(value: object, call: str) -> Mask:
    """Return a Mask as it is, or raise MaskError; for a tensor, it names both conventions."""
    if isinstance(value, Mask):
        return value
    if not isinstance(value, Tensor):
        raise MaskError(
            saw=f"{call}{text.describe_value(value)}", needed="a Mask", do="e.g. Mask.causal()"
        )
    added = ", or ScoreBias.dense(t, axes=...)" if value.is_floating_point() else ""
    raise MaskError(
        saw=f"{call}{text.describe_value(value)}",
        needed="a Mask: a bare tensor may mean True = may attend "
        "(scaled_dot_product_attention) or True = blocked (nn.MultiheadAttention)",
        do=f"Mask.from_sdpa(t), Mask.from_torch(t), or Mask.may_attend(t, axes=...){added}",
    )


def _iterate_given_key_and_query_lengths(
    keys: Tensor | None, queries: Tensor | None
) -> Iterator[tuple[str, int, Tensor]]:
    if keys is not None:
        yield "keys", KEYS, keys
    if queries is not None:
        yield "queries", QUERIES, queries


def _window_side_int(name: str, side: object) -> int:
    if side is None:
        return BOUNDLESS
    count = convert_to_int_or_none(side)
    if isinstance(count, int) and count >= BOUNDLESS:
        return BOUNDLESS
    if count is not None and count >= 0:
        return count
    raise OptionError(
        saw=f"a window with {name}={text.describe_value(side)}",
        needed=f"{name}: a whole number from 0, or None for no bound on that side",
        do="count keys beside the query's own position, "
        f"e.g. {name}={4 if count is None else -count}",
    )


def _require_whole_number_or_none(name: str, size: object) -> int | None:
    count = None if size is None else convert_to_int_or_none(size)
    if size is None or (count is not None and count >= 0):
        return count
    raise OptionError(
        saw=f"draw({name}={text.describe_value(size)})",
        needed=f"how many {name} to draw, from 0",
        do=f"e.g. draw({name}=8), or leave it out where the mask knows it",
    )


# ---- conventions of other functions ------------------------------------------------------------


def to_allowed_matrix(mask: Tensor, num_heads: int | None, *, true_attends: bool) -> Tensor:
    """Return another library's mask as bools with named axes, True = may attend.

    The shape is (batch, heads, queries, keys), or broadcasts to it.
    """
    allowed = to_allowed_entries(mask, true_attends=true_attends)
    if allowed.dim() == 2:
        return with_matrix_axes(allowed, "queries keys")
    if allowed.dim() == 4 and true_attends:
        return allowed
    if allowed.dim() == 3 and not true_attends and num_heads and allowed.shape[0] % num_heads == 0:
        by_head: Tensor = allowed.unflatten(0, (-1, num_heads))
        return by_head
    shapes = "(queries, keys) or (batch, heads, queries, keys)"
    if not true_attends:
        shapes = "(queries, keys), or (batch*heads, queries, keys) together with num_heads"
    raise MaskError(
        saw=f"a mask of shape {tuple(mask.shape)}"
        + (f" and num_heads={num_heads}" if num_heads else ""),
        needed=f"{shapes}; a 3-D mask may also mean (batch, queries, keys) "
        "or (heads, queries, keys)",
        do='name the axes: Mask.may_attend(allowed, axes="batch queries keys")',
    )


def to_allowed_entries(mask: Tensor, *, true_attends: bool) -> Tensor:
    """Return a bool mask of either polarity, or a float one of 0 and -inf, as True = may attend."""
    arguments.require_tensors(mask=mask)
    if mask.dtype == torch.bool:
        return mask if true_attends else ~mask
    if not mask.is_floating_point():
        nonzero, zero = ("may attend", "blocked") if true_attends else ("blocked", "may attend")
        raise MaskError(
            saw=f"a mask of dtype {mask.dtype}",
            needed=f"bool, where True = {nonzero} in this convention, or float, 0 or -inf. "
            "An integer mask may mean either polarity",
            do=f"t.bool() if nonzero means {nonzero}, t == 0 if nonzero means {zero}",
        )
    allowed = mask == 0
    if tracing.may_check_values(mask) and not bool((allowed | (mask == -torch.inf)).all()):
        raise MaskError(
            saw=f"a float mask with values other than 0 and -inf (dtype {mask.dtype}, e.g. "
            f"{float(mask[~allowed & (mask != -torch.inf)].flatten()[0]):g})",
            needed="only 0 (may attend) and -inf (blocked): a float mask is added to the scores",
            do="pass it as a score bias, ScoreBias.dense(t, axes=...); finfo.min does not block",
        )
    return allowed
