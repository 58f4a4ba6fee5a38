"""Masks: who may attend to whom, as a lazy value. True always means "may attend".

A `Mask` is a conjunction of clauses, none of which is queries x keys by nature:

* bands: ``-left <= key - query <= right`` (causal and sliding window), with a named alignment;
* lengths: how many keys (and, when told, queries) of each sequence are real;
* segments: several sequences packed into one row see only themselves;
* dense boolean tensors with named axes, for everything else.

``bind`` fixes the sizes; kernels then ask for one block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import SupportsIndex

import torch
from jaxtyping import Bool, Integer
from torch import Tensor

from headwise.errors import MaskError, OptionError
from headwise.masks.bound_mask import (
    Align,
    BoundMask,
    check_bound,
    lengths_of,
    require_align,
    resolve_align,
    segment_ids_of,
    with_matrix_axes,
)
from headwise.masks.conventions import allowed_by, from_convention, require_bool
from headwise.support.axes import describe_value
from headwise.support.integers import as_count, as_int64

BOUNDLESS = 2**62  # keys: a side of a window that bounds nothing


@dataclass(frozen=True)
class Band:
    """Keys from ``left`` before to ``right`` after the query's own position; None is unbounded."""

    left: int | None
    right: int | None
    align: Align | None

    def __str__(self) -> str:
        align = f" {self.align}" if self.align else ""
        if self.left is None and self.right == 0:
            return f"causal{align}"
        return f"window(left={self.left}, right={self.right}){align}"


@dataclass(frozen=True, eq=False)
class Mask:
    """A lazy mask. Build one with a classmethod, combine with ``&``; ``Mask()`` allows all."""

    bands: tuple[Band, ...] = ()
    key_lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    segment_ids: tuple[tuple[Tensor, Tensor], ...] = ()
    dense: tuple[Tensor, ...] = ()

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
        cls,
        left: SupportsIndex | None,
        right: SupportsIndex | None,
        *,
        align: Align | None = None,
    ) -> Mask:
        """A query sees ``left`` keys before its own position and ``right`` after it.

        A side may be any integer: Python's, NumPy's, or a tensor with one integer.

        Raises:
            OptionError: a negative side, or an alignment that does not exist.
        """
        require_align(align)
        return cls(bands=(Band(_side("left", left), _side("right", right), align),))

    @classmethod
    def lengths(
        cls,
        keys: Integer[Tensor, " batch"] | None = None,
        queries: Integer[Tensor, " batch"] | None = None,
    ) -> Mask:
        """Only the first ``keys[b]`` keys, and the first ``queries[b]`` queries, are real.

        A query past its length attends to nothing, so its weights and head outputs are zero.

        Raises:
            MaskError: lengths that are no 1-D tensor of integers.
        """
        return cls(
            key_lengths=lengths_of(keys, "keys"),
            query_lengths=lengths_of(queries, "queries"),
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
        ids = segment_ids_of(ids, "queries")
        return cls(
            segment_ids=((ids, ids if key_ids is None else segment_ids_of(key_ids, "keys")),)
        )

    @classmethod
    def may_attend(cls, allowed: Bool[Tensor, "..."], *, axes: str) -> Mask:
        """A boolean tensor, True = may attend, whose axes are named: ``"batch keys"`` and so on."""
        require_bool(allowed, "Mask.may_attend")
        return cls(dense=(with_matrix_axes(allowed, axes),))

    @classmethod
    def from_torch(cls, attn_mask: Tensor, *, num_heads: int | None = None) -> Mask:
        """The ``attn_mask`` of `torch.nn.MultiheadAttention`: bool True = blocked, float 0 or -inf.

        2-D is (queries, keys); 3-D is (batch*heads, queries, keys), heads fastest, and needs
        ``num_heads``. A float mask with other values is a `ScoreBias`.
        """
        return cls(dense=(from_convention(attn_mask, num_heads, true_attends=False),))

    @classmethod
    def from_torch_padding(cls, key_padding_mask: Tensor) -> Mask:
        """`torch.nn.MultiheadAttention`'s ``key_padding_mask`` (batch, keys): True = ignored."""
        allowed = allowed_by(key_padding_mask, true_attends=False)
        return cls(dense=(with_matrix_axes(allowed, "batch keys"),))

    @classmethod
    def from_sdpa(cls, attn_mask: Tensor) -> Mask:
        """The ``attn_mask`` of `scaled_dot_product_attention`: bool True = may attend.

        2-D is (queries, keys), 4-D is (batch, heads, queries, keys), broadcastable.
        """
        return cls(dense=(from_convention(attn_mask, None, true_attends=True),))

    def __and__(self, other: Mask) -> Mask:
        refuse_what_is_no_mask(other, "Mask & ")
        return Mask(
            bands=self.bands + other.bands,
            key_lengths=_shorter(self.key_lengths, other.key_lengths),
            query_lengths=_shorter(self.query_lengths, other.query_lengths),
            segment_ids=self.segment_ids + other.segment_ids,
            dense=self.dense + other.dense,
        )

    # ---- use --------------------------------------------------------------------------------

    def aligned(self, align: Align) -> Mask:
        """The same mask, with this alignment for the bands that name none."""
        require_align(align)
        bands = tuple(replace(band, align=band.align or align) for band in self.bands)
        return replace(self, bands=bands)

    def bind(
        self, *, batch: int, heads: int, queries: int, keys: int, device: torch.device
    ) -> BoundMask:
        """Fix the sizes, resolve alignments and check every tensor against them.

        Raises:
            MaskError: made for other sizes, or an alignment that is needed and not named.
            DeviceError: a tensor on another device than the queries and keys.
        """
        lower, upper = None, None
        for band in self.bands:
            offset = resolve_align(band.align, queries, keys, what=str(band))
            if band.left is not None:
                lower = offset - band.left if lower is None else max(lower, offset - band.left)
            if band.right is not None:
                upper = offset + band.right if upper is None else min(upper, offset + band.right)
        bound = BoundMask(
            queries=queries,
            keys=keys,
            lower=lower,
            upper=upper,
            key_lengths=self.key_lengths,
            query_lengths=self.query_lengths,
            segment_ids=self.segment_ids,
            dense=self.dense,
        )
        check_bound(bound, batch, heads, device)
        return bound

    def draw(
        self,
        queries: int | None = None,
        keys: int | None = None,
        *,
        batch: int = 0,
        head: int = 0,
    ) -> str:
        """The mask as a picture: a row per query, 1 = may attend. Known sizes may be left out.

        Raises:
            OptionError: sizes that are no numbers, or a sequence or a head that is not there.
        """
        shape = self._known_sizes(_drawn("queries", queries), _drawn("keys", keys))
        if shape["batch"] == 0:
            return ""
        for name, place, size in (("batch", batch, shape["batch"]), ("head", head, shape["heads"])):
            number = as_count(place)
            if number is None or not -size <= number < size:
                raise OptionError(
                    saw=f"draw({name}={describe_value(place)}) of a mask for {size}",
                    needed=f"a whole number from 0 to {size - 1}",
                    do=f"leave {name} out for the first",
                )
        bound = self.bind(**shape, device=self._device())
        rows = bound.at(torch.arange(shape["queries"], device=self._device()))
        rows = rows.expand(shape["batch"], shape["heads"], -1, -1)[batch, head]
        return "\n".join(" ".join("1" if x else "0" for x in row) for row in rows.tolist())

    def _known_sizes(self, queries: int | None, keys: int | None) -> dict[str, int]:
        known: list[tuple[int, ...]] = [t.shape for t in self.dense]
        known += [
            (ids.shape[0], 1, ids.shape[1], other.shape[1]) for ids, other in self.segment_ids
        ]
        known += [(n.shape[0], 1, *longest) for n, longest in self._longest()]
        batch, heads, own_queries, own_keys = (
            max((shape[axis] for shape in known), default=1) for axis in range(4)
        )
        queries = own_queries if queries is None else queries
        if keys is None:  # those of the mask, or as many as there are queries
            keys = own_keys if self.dense or self.segment_ids else max(own_keys, queries)
        return {"batch": batch, "heads": heads, "queries": queries, "keys": keys}

    def _longest(self) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """Lengths, and the (queries, keys) that the longest of them needs."""
        if self.key_lengths is not None:
            yield self.key_lengths, (1, _largest(self.key_lengths))
        if self.query_lengths is not None:
            yield self.query_lengths, (_largest(self.query_lengths), 1)

    def _device(self) -> torch.device:
        return next((t.device for t in self._tensors()), torch.device("cpu"))

    def _tensors(self) -> list[Tensor]:
        lengths = [n for n in (self.key_lengths, self.query_lengths) if n is not None]
        return [*self.dense, *(t for pair in self.segment_ids for t in pair), *lengths]

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on ``device``."""
        return replace(
            self,
            key_lengths=None if self.key_lengths is None else self.key_lengths.to(device),
            query_lengths=None if self.query_lengths is None else self.query_lengths.to(device),
            segment_ids=tuple((a.to(device), b.to(device)) for a, b in self.segment_ids),
            dense=tuple(t.to(device) for t in self.dense),
        )

    def of_heads(self, index: Integer[Tensor, " chosen"]) -> Mask:
        """The mask of chosen heads alone."""
        index = as_int64(index, "heads")
        return replace(self, dense=tuple(_of_heads(t, index) for t in self.dense))

    def __str__(self) -> str:
        parts = [str(band) for band in self.bands]
        lengths = {"keys": self.key_lengths, "queries": self.query_lengths}
        if named := [name for name, n in lengths.items() if n is not None]:
            parts.append(f"lengths({', '.join(named)})")
        parts += ["segments"] * len(self.segment_ids)
        parts += [f"may_attend{tuple(t.shape)}" for t in self.dense]
        return " & ".join(parts) or "everything"

    def __repr__(self) -> str:
        return f"Mask({self})"


# ---- conventions of other libraries ------------------------------------------------------------


def refuse_what_is_no_mask(value: object, place: str) -> Mask:
    """Return a Mask as it is; refuse all else, a bare tensor with both of its readings."""
    if isinstance(value, Mask):
        return value
    if not isinstance(value, Tensor):
        raise MaskError(
            saw=f"{place}{describe_value(value)}", needed="a Mask", do="e.g. Mask.causal()"
        )
    added = ", or ScoreBias.dense(t, axes=...)" if value.is_floating_point() else ""
    raise MaskError(
        saw=f"{place}{describe_value(value)}",
        needed="a Mask: a bare tensor may mean True = may attend "
        "(scaled_dot_product_attention) or True = blocked (nn.MultiheadAttention)",
        do=f"Mask.from_sdpa(t), Mask.from_torch(t), or Mask.may_attend(t, axes=...){added}",
    )


def _side(name: str, side: object) -> int | None:
    """Return one side of a window as Python's integer, or as the symbol of a compiled graph."""
    if side is None:
        return None
    count = as_count(side)
    if isinstance(count, int) and count >= BOUNDLESS:
        return None
    if count is not None and count >= 0:
        return count
    raise OptionError(
        saw=f"a window with {name}={describe_value(side)}",
        needed=f"{name}: a whole number from 0, or None for no bound on that side",
        do="count keys beside the query's own position, "
        f"e.g. {name}={4 if count is None else -count}",
    )


def _largest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def _drawn(name: str, size: object) -> int | None:
    count = None if size is None else as_count(size)
    if size is None or (count is not None and count >= 0):
        return count
    raise OptionError(
        saw=f"draw({name}={describe_value(size)})",
        needed=f"how many {name} to draw, from 0",
        do=f"e.g. draw({name}=8), or leave it out where the mask knows it",
    )


def _shorter(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    if a.shape != b.shape:
        raise MaskError(
            saw=f"lengths of shape {tuple(a.shape)} and of shape {tuple(b.shape)} in one mask",
            needed="one length for each sequence of the same batch",
            do="build both for the same batch",
        )
    return torch.minimum(a, b)


def _of_heads(dense: Tensor, index: Tensor) -> Tensor:
    return dense if dense.shape[1] == 1 else dense.index_select(1, index)
