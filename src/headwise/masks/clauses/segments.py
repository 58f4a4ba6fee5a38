"""Several sequences in one row, given by an id for each token or by offsets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headwise.errors import MaskError
from headwise.masks import clause
from headwise.masks.clause import MatrixPart, MatrixSizes, Rectangle, Span, index_axes
from headwise.masks.clauses.lengths import QUERIES
from headwise.support.tensors import convert_to_int64, has_integer_dtype
from headwise.support.text import axis_broadcasts_to
from headwise.support.tracing import may_check_values, may_read_values


@dataclass(frozen=True, eq=False)
class Segments(clause.Clause):
    """Queries see the keys that carry their own id; ids below 0 belong to no segment."""

    kind = "segments"
    tensor_fields = ("query_ids", "key_ids")
    names_every_key = True

    query_ids: Tensor  # (batch or 1, queries)
    key_ids: Tensor  # (batch or 1, keys)

    def bind(self, sizes: MatrixSizes) -> Segments:
        axes = (("queries", sizes.queries), ("keys", sizes.keys))
        for (axis, size), ids in zip(axes, self.tensors(), strict=True):
            if (
                ids.dim() != 2
                or not axis_broadcasts_to(ids.shape[0], sizes.batch)
                or ids.shape[1] != size
            ):
                raise MaskError(
                    saw=f"segment ids of shape {tuple(ids.shape)} and dtype {ids.dtype} "
                    f"for the {axis}",
                    needed=f"integers of shape (batch {sizes.batch}, {axis} {size})",
                    do="give one id for each position of each row",
                )
        return self

    def evaluate_block(self, block: clause.MaskBlock, sizes: MatrixSizes) -> Tensor:
        # One row of ids serves every sequence; cut leaves such an axis as it is.
        query_ids = index_axes(self.query_ids, block.batches, block.rows)[:, None, :, None]
        key_ids = index_axes(self.key_ids, block.batches, block.columns)[:, None, None, :]
        return (query_ids == key_ids) & (key_ids >= 0)

    def evaluate_pairs(self, rows: Tensor, columns: Tensor, sizes: MatrixSizes) -> Tensor:
        query_ids, key_ids = self.query_ids[:, None, rows], self.key_ids[:, None, columns]
        return (query_ids == key_ids) & (key_ids >= 0)

    def cut_to_part(self, place: MatrixPart, sizes: MatrixSizes) -> Segments:
        batches, queries, keys = (slice(*span) for span in place)
        return Segments(
            index_axes(self.query_ids, batches, queries), index_axes(self.key_ids, batches, keys)
        )

    def broadcast_shape(self, sizes: MatrixSizes) -> MatrixSizes:
        return MatrixSizes(self.query_ids.shape[0], 1, sizes.queries, sizes.keys)

    def rectangles(self, sizes: MatrixSizes) -> list[list[Rectangle]] | None:
        """None where a segment is not one stretch."""
        if not all(map(may_read_values, self.tensors())):
            return None
        query_runs, key_runs = (_find_segment_spans(ids, sizes.batch) for ids in self.tensors())
        if query_runs is None or key_runs is None:
            return None
        return [
            [
                Rectangle(batch, span, key_spans[name])
                for name, span in query_spans.items()
                if name in key_spans
            ]
            for batch, (query_spans, key_spans) in enumerate(zip(query_runs, key_runs, strict=True))
        ]

    def real_tokens(self, axis: int, sizes: MatrixSizes) -> Tensor:
        return self.tensors()[axis - QUERIES] >= 0

    def known_sizes(self) -> MatrixSizes:
        return MatrixSizes(
            self.query_ids.shape[0], 1, self.query_ids.shape[1], self.key_ids.shape[1]
        )

    def __str__(self) -> str:
        return "segments"


@dataclass(frozen=True, eq=False)
class PackedRow(clause.IntervalClause):
    """Sequence s of the one row has queries [q[s], q[s + 1]) and keys [k[s], k[s + 1])."""

    kind = "packed"
    tensor_fields = ("query_offsets", "key_offsets")
    names_every_key = True

    query_offsets: Tensor  # (sequences + 1,)
    key_offsets: Tensor  # (sequences + 1,); the same object where the caller gave none for keys

    def bind(self, sizes: MatrixSizes) -> PackedRow:
        if sizes.batch != 1:
            raise MaskError(
                saw=f"offsets of packed sequences for a batch of {sizes.batch}",
                needed="one row: all sequences one after the other",
                do="x.flatten(0, 1)[None], or Mask.segments with ids for each row",
            )
        axes = (("queries", sizes.queries), ("keys", sizes.keys))
        for (axis, size), offsets in zip(axes, self.tensors(), strict=True):
            ends = offsets.tolist() if may_check_values(offsets) else [0]
            if any(a > b for a, b in pairwise(ends)) or ends[0] < 0 or ends[-1] > size:
                raise MaskError(
                    saw=f"offsets {ends[:4]} to {ends[-1]} for {size} {axis}",
                    needed=f"cumulative lengths that do not fall, from 0 to at most {size}",
                    do="e.g. Mask.packed(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))",
                )
        return self

    def key_interval_per_query(
        self, rows: Tensor, batches: slice, sizes: MatrixSizes
    ) -> tuple[Tensor, Tensor]:
        count = self.query_offsets.shape[0] - 1
        if count == 0:
            return torch.zeros_like(rows)[None], torch.zeros_like(rows)[None]
        segment = torch.searchsorted(self.query_offsets, rows.contiguous(), right=True) - 1
        inside = (segment >= 0) & (segment < count)
        segment = segment.clamp(0, count - 1)
        first, stop = self.key_offsets[segment], self.key_offsets[segment + 1]
        return first[None], torch.where(inside, stop, first)[None]

    def cut_to_part(self, place: MatrixPart, sizes: MatrixSizes) -> PackedRow:
        spans = (place.queries, place.keys)
        return PackedRow(
            *(
                (offsets - span.first).clamp(0, span.size)
                for offsets, span in zip(self.tensors(), spans, strict=True)
            )
        )

    def broadcast_shape(self, sizes: MatrixSizes) -> MatrixSizes:
        return MatrixSizes(1, 1, sizes.queries, sizes.keys)

    def rectangles(self, sizes: MatrixSizes) -> list[list[Rectangle]] | None:
        if not all(map(may_read_values, self.tensors())):
            return None
        queries, keys = (pairwise(offsets.tolist()) for offsets in self.tensors())
        return [[Rectangle(0, Span(*q), Span(*k)) for q, k in zip(queries, keys, strict=True)]]

    def real_tokens(self, axis: int, sizes: MatrixSizes) -> Tensor:
        offsets = self.tensors()[axis - QUERIES]
        position = torch.arange(sizes[axis], device=offsets.device)
        return ((position >= offsets[0]) & (position < offsets[-1]))[None]

    def known_sizes(self) -> MatrixSizes:
        return MatrixSizes(1, 1, *(int(offsets[-1]) for offsets in self.tensors()))

    def __str__(self) -> str:
        return f"packed({self.query_offsets.shape[0] - 1})"


def require_segment_ids(ids: object, axis: str) -> Tensor:
    """Return segment ids in int64. Raise MaskError unless they are a tensor of integers."""
    if isinstance(ids, Tensor) and (has_integer_dtype(ids) or ids.dtype == torch.bool):
        return convert_to_int64(ids, "segment ids")
    raise MaskError(
        saw=f"segment ids of dtype {ids.dtype} for the {axis}"
        if isinstance(ids, Tensor)
        else f"segment ids that are a {type(ids).__name__}, for the {axis}",
        needed=f"a tensor of integers (batch, {axis}); a negative id belongs to no segment",
        do="e.g. Mask.segments(torch.tensor([[0, 0, 1, 1, -1]]))",
    )


def require_offsets(offsets: object, name: str) -> Tensor:
    """Return cumulative lengths in int64. Raise MaskError unless they are 1-D integers."""
    fits = isinstance(offsets, Tensor) and offsets.dim() == 1 and offsets.shape[0] > 0
    if fits and isinstance(offsets, Tensor) and has_integer_dtype(offsets):
        return convert_to_int64(offsets, name)
    description = type(offsets).__name__
    if isinstance(offsets, Tensor):
        description = f"tensor of dtype {offsets.dtype} and shape {tuple(offsets.shape)}"
    raise MaskError(
        saw=f"{name} that is a {description}",
        needed="a 1-D tensor of integers: where each sequence begins, and the end of the last one",
        do="e.g. Mask.packed(torch.tensor([0, 24, 41, 70]))",
    )


def _find_segment_spans(ids: Tensor, batch: int) -> list[dict[int, Span]] | None:
    """Return the span of each segment of each row; None where a segment is in several pieces."""
    rows = []
    for row in ids:
        names, counts = torch.unique_consecutive(row, return_counts=True)
        stops = counts.cumsum(0)
        spans = list(map(Span, (stops - counts).tolist(), stops.tolist()))
        runs = [(n, span) for n, span in zip(names.tolist(), spans, strict=True) if n >= 0]
        if len(dict(runs)) < len(runs):
            return None
        rows.append(dict(runs))
    return rows * batch if len(rows) == 1 else rows
