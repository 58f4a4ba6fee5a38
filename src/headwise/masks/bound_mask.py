"""A mask at known sizes, evaluated one block at a time, and the checks that bind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwise.errors import DeviceError, MaskError, OptionError
from headwise.support.axes import MATRIX_AXES, broadcasts, describe_value, sizes
from headwise.support.eager import may_check_values
from headwise.support.integers import as_int64, is_integer

Align = Literal["top-left", "bottom-right"]
WHOLE = slice(None)


@dataclass(frozen=True, eq=False)
class BoundMask:
    """A mask at known sizes: ``lower <= key - query <= upper``, and every other clause."""

    queries: int
    keys: int
    lower: int | None
    upper: int | None
    key_lengths: Tensor | None
    query_lengths: Tensor | None
    segment_ids: tuple[tuple[Tensor, Tensor], ...]
    dense: tuple[Tensor, ...]

    @property
    def is_banded(self) -> bool:
        """Whether a band hides anything at these sizes."""
        hides_late = self.upper is not None and self.upper < self.keys - 1
        hides_early = self.lower is not None and self.lower > 1 - self.queries
        return hides_late or hides_early

    @property
    def is_causal(self) -> bool:
        """Whether the bands are exactly the top-left causal one."""
        return self.lower is None and self.upper is not None and bool(self.upper == 0)

    @property
    def is_plain(self) -> bool:
        """Whether the bands are the whole mask."""
        pieces = (self.dense, self.segment_ids)
        return not any(pieces) and self.key_lengths is None and self.query_lengths is None

    def key_range(self, first: int, stop: int) -> tuple[int, int]:
        """Keys outside [start, end) are hidden from every query in [first, stop) by the bands."""
        start = 0 if self.lower is None else min(max(0, first + self.lower), self.keys)
        end = self.keys if self.upper is None else max(0, min(self.keys, stop + self.upper))
        return start, max(start, end)

    def band_edges(self, first: int, stop: int) -> tuple[int, int]:
        """Keys in [left, right) are seen by every query in [first, stop), as far as bands go."""
        left = 0 if self.lower is None else stop - 1 + self.lower
        right = self.keys if self.upper is None else first + self.upper + 1
        return left, right

    def hides_by_band(
        self, rows: Int[Tensor, " rows"], columns: Int[Tensor, " columns"]
    ) -> Bool[Tensor, "rows columns"]:
        """True where a band hides the key from the query."""
        distance = columns - rows[:, None]
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.lower is not None:
            hidden = hidden | (distance < self.lower)
        if self.upper is not None:
            hidden = hidden | (distance > self.upper)
        return hidden

    def block(
        self, batches: slice, heads: slice, rows: slice | Tensor, columns: slice
    ) -> Tensor | None:
        """All clauses but the bands, for one block, or None where they allow everything.

        Bool, broadcastable to (batches, heads, rows, columns).
        """
        device = next((t.device for t in self._per_sequence()), None)
        parts = [cut(dense, batches, heads, rows, columns) for dense in self.dense]
        for query_ids, key_ids in self.segment_ids:
            # One row of ids serves every sequence; cut leaves such an axis as it is.
            own = cut(query_ids[:, None, :, None], batches, WHOLE, rows, WHOLE)
            other = cut(key_ids[:, None, None, :], batches, WHOLE, WHOLE, columns)
            parts.append((own == other) & (other >= 0))
        if self.key_lengths is not None:
            position = torch.arange(self.keys, device=device)[columns]
            parts.append((position < self.key_lengths[batches, None])[:, None, None, :])
        if self.query_lengths is not None:
            position = _take(torch.arange(self.queries, device=device), 0, rows)
            parts.append((position < self.query_lengths[batches, None])[:, None, :, None])
        if not parts:
            return None
        allowed = parts[0]
        for part in parts[1:]:
            allowed = allowed & part
        return allowed

    def at(self, rows: Int[Tensor, " rows"]) -> Bool[Tensor, "..."]:
        """The whole mask at chosen queries, broadcastable to (batch, heads, rows, keys)."""
        columns = torch.arange(self.keys, device=rows.device)
        allowed = ~self.hides_by_band(rows, columns)[None, None]
        others = self.block(WHOLE, WHOLE, rows, WHOLE)
        return allowed if others is None else allowed & others

    def pairs(
        self, rows: Int[Tensor, " pairs"], columns: Int[Tensor, " pairs"]
    ) -> Bool[Tensor, "..."]:
        """The whole mask at chosen (query, key) pairs, broadcastable to (batch, heads, pairs)."""
        distance = columns - rows
        allowed = torch.ones_like(distance, dtype=torch.bool)[None, None]
        if self.lower is not None:
            allowed = allowed & (distance >= self.lower)
        if self.upper is not None:
            allowed = allowed & (distance <= self.upper)
        for dense in self.dense:
            allowed = allowed & at_pairs(dense, rows, columns)
        for query_ids, key_ids in self.segment_ids:
            own, other = query_ids[:, None, rows], key_ids[:, None, columns]
            allowed = allowed & (own == other) & (other >= 0)
        if self.key_lengths is not None:
            allowed = allowed & (columns < self.key_lengths[:, None, None])
        if self.query_lengths is not None:
            allowed = allowed & (rows < self.query_lengths[:, None, None])
        return allowed

    def piece(self, sequence: slice, rows: slice, columns: slice) -> BoundMask:
        """The mask of a rectangle that lengths and segments allow whole: bands and dense parts."""
        shift = columns.start - rows.start
        return BoundMask(
            queries=rows.stop - rows.start,
            keys=columns.stop - columns.start,
            lower=None if self.lower is None else self.lower - shift,
            upper=None if self.upper is None else self.upper - shift,
            key_lengths=None,
            query_lengths=None,
            segment_ids=(),
            dense=tuple(cut(dense, sequence, WHOLE, rows, columns) for dense in self.dense),
        )

    def _per_sequence(self) -> list[Tensor]:
        return [n for n in (self.key_lengths, self.query_lengths) if n is not None]


def require_align(align: str | None) -> None:
    """Raise OptionError unless the alignment is one of the two, or left out."""
    if align not in (None, "top-left", "bottom-right"):
        raise OptionError(
            saw=f"align={describe_value(align)}",
            needed='"top-left", "bottom-right", or None where queries == keys',
            do='a key/value cache means align="bottom-right"',
        )


def resolve_align(align: Align | None, queries: int, keys: int, *, what: str) -> int:
    """The key position that stands at query 0's own position: 0, or keys - queries.

    Raises:
        MaskError: queries != keys and no alignment was named.
    """
    if align == "bottom-right":
        return keys - queries
    if align is None and queries != keys:
        raise MaskError(
            saw=f"{what} over {queries} queries and {keys} keys, without an alignment",
            needed='align="top-left" (first query at first key) or align="bottom-right" '
            "(last query at last key, what a key/value cache means)",
            do='name it where it is made: align="bottom-right", or align="top-left"',
        )
    return 0


def with_matrix_axes(tensor: Tensor, axes: str) -> Tensor:
    """View a tensor whose axes are named as one broadcastable to (batch, heads, queries, keys)."""
    names = axes.split()
    if not names or [a for a in MATRIX_AXES if a in names] != names:
        raise MaskError(
            saw=f"axes={describe_value(axes)}",
            needed=f"names among {MATRIX_AXES}, in this order, each once",
            do='e.g. axes="batch keys" for a padding mask; transpose the tensor where needed',
        )
    if tensor.dim() != len(names):
        raise MaskError(
            saw=f"a tensor of shape {tuple(tensor.shape)} with axes={describe_value(axes)}",
            needed=f"{len(names)} axes, one for each name",
            do="name every axis of the tensor",
        )
    shape = dict(zip(names, tensor.shape, strict=True))
    return tensor.reshape([shape.get(a, 1) for a in MATRIX_AXES])


def check_fits(tensor: Tensor, batch: int, heads: int, queries: int, keys: int, what: str) -> None:
    """Raise MaskError unless ``tensor`` broadcasts to (batch, heads, queries, keys)."""
    expected = (batch, heads, queries, keys)
    if not all(broadcasts(n, want) for n, want in zip(tensor.shape, expected, strict=True)):
        raise MaskError(
            saw=f"{what} for {sizes(tensor, MATRIX_AXES)}",
            needed=f"sizes that broadcast to (batch {batch}, heads {heads}, "
            f"queries {queries}, keys {keys})",
            do="build it for these sizes, or leave out the axes it does not depend on",
        )


def at_pairs(tensor: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """A tensor broadcastable to (batch, heads, queries, keys), read at (query, key) pairs."""
    row_index = rows if tensor.shape[2] != 1 else torch.zeros_like(rows)
    column_index = columns if tensor.shape[3] != 1 else torch.zeros_like(columns)
    return tensor[:, :, row_index, column_index]


def check_bound(bound: BoundMask, batch: int, heads: int, device: torch.device) -> None:
    """Raise MaskError or DeviceError unless every tensor of the mask fits these sizes."""
    for dense in bound.dense:
        check_fits(dense, batch, heads, bound.queries, bound.keys, "a mask")
    ranks = {"queries": bound.queries, "keys": bound.keys}
    for pair in bound.segment_ids:
        for (axis, size), ids in zip(ranks.items(), pair, strict=True):
            if ids.dim() != 2 or not broadcasts(ids.shape[0], batch) or ids.shape[1] != size:
                raise MaskError(
                    saw=f"segment ids of shape {tuple(ids.shape)} and dtype {ids.dtype} "
                    f"for the {axis}",
                    needed=f"integers of shape (batch {batch}, {axis} {size})",
                    do="give one id for each position of each row",
                )
    for (axis, size), lengths in zip(
        reversed(ranks.items()), (bound.key_lengths, bound.query_lengths), strict=True
    ):
        if lengths is not None:
            _check_lengths(lengths, batch, axis, size)
    tensors = [
        *bound.dense,
        *(t for pair in bound.segment_ids for t in pair),
        *bound._per_sequence(),
    ]
    for tensor in tensors:
        if tensor.device != device:
            raise DeviceError(
                saw=f"a mask on {tensor.device} for queries and keys on {device}",
                needed="one device",
                do=f'mask.to("{device}")',
            )


def segment_ids_of(ids: object, axis: str) -> Tensor:
    """Return segment ids in int64. Raise MaskError unless they are a tensor of integers."""
    if isinstance(ids, Tensor) and (is_integer(ids) or ids.dtype == torch.bool):
        return as_int64(ids, "segment ids")
    raise MaskError(
        saw=f"segment ids of dtype {ids.dtype} for the {axis}"
        if isinstance(ids, Tensor)
        else f"segment ids that are a {type(ids).__name__}, for the {axis}",
        needed=f"a tensor of integers (batch, {axis}); a negative id belongs to no segment",
        do="e.g. Mask.segments(torch.tensor([[0, 0, 1, 1, -1]]))",
    )


def lengths_of(lengths: object, axis: str) -> Tensor | None:
    """Return lengths in int64. Raise MaskError unless they are a 1-D tensor of integers or None."""
    if lengths is None:
        return None
    if not isinstance(lengths, Tensor) or lengths.dim() != 1:
        seen = (
            f"of shape {tuple(lengths.shape)}"
            if isinstance(lengths, Tensor)
            else describe_value(lengths)
        )
    elif not is_integer(lengths):
        seen = f"of dtype {lengths.dtype}"
    else:
        return as_int64(lengths, f"lengths of the {axis}")
    raise MaskError(
        saw=f"lengths {seen} for the {axis}",
        needed="a tensor with one integer for each sequence: (batch,)",
        do="e.g. Mask.lengths(keys=torch.tensor([24, 17, 29]))",
    )


def _check_lengths(lengths: Tensor, batch: int, axis: str, size: int) -> None:
    if lengths.shape != (batch,):
        raise MaskError(
            saw=f"lengths of shape {tuple(lengths.shape)} for the {axis}",
            needed=f"one integer for each sequence: shape (batch {batch},)",
            do="e.g. Mask.lengths(keys=torch.tensor([24, 17, 29]))",
        )
    if not may_check_values(lengths) or lengths.numel() == 0:
        return
    if int(lengths.min()) < 0 or int(lengths.max()) > size:
        raise MaskError(
            saw=f"lengths between {int(lengths.min())} and {int(lengths.max())} for {size} {axis}",
            needed=f"lengths from 0 to {size}",
            do="pad the sequences to the longest, or correct the lengths",
        )


def _take(tensor: Tensor, dim: int, index: slice | Tensor) -> Tensor:
    if isinstance(index, Tensor):
        return tensor.index_select(dim, index)
    return tensor[(WHOLE,) * dim + (index,)]


def cut(tensor: Tensor, *index: slice | Tensor) -> Tensor:
    """Index each axis of a broadcastable 4-D tensor, leaving axes of size one as they are."""
    for dim, part in enumerate(index):
        if tensor.shape[dim] != 1:
            tensor = _take(tensor, dim, part)
    return tensor
