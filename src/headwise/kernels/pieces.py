"""A padded or packed batch, one sequence at a time: only what is real is computed.

Lengths and segments leave a matrix of a few full rectangles among cells that are all hidden. Each
rectangle is a smaller matrix of its own, and any kernel takes it. Reading the lengths needs eager
mode; compiled, the same mask is evaluated cell by cell, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.kernels.problem import Problem
from headwise.masks.bound_mask import BoundMask
from headwise.support.eager import may_read_values

# What one more call of a kernel is worth, in multiply-adds: measured on two CPU cores
# (docs/log.md). For an accelerator it is an estimate, a thousand times as many.
CALL, CALL_OF_ACCELERATOR = 2**21, 2**31

Product = Callable[[Problem, Tensor], Tensor]


class Span(NamedTuple):
    """Positions [first, stop)."""

    first: int
    stop: int

    @property
    def size(self) -> int:
        return max(0, self.stop - self.first)


class Piece(NamedTuple):
    """A rectangle of one sequence's matrix, outside of which its queries and keys see nothing."""

    batch: int
    queries: Span
    keys: Span

    @property
    def cells(self) -> int:
        return self.queries.size * self.keys.size


def find(problem: Problem) -> tuple[Piece, ...]:
    """The pieces of a matrix, where taking them one by one is less work; else none."""
    mask, (batch, heads, queries, head_dim) = problem.mask, problem.q.shape
    lengths = (mask.key_lengths, mask.query_lengths)
    tensors = [n for n in lengths if n is not None] + list(sum(mask.segment_ids, ()))
    if not tensors or len(mask.segment_ids) > 1 or not all(map(may_read_values, tensors)):
        return ()
    cells, least = batch * queries * mask.keys, call_cost(problem.q.device)
    if cells * heads * head_dim <= least:
        return ()  # whatever the lengths are: reading them would wait for an accelerator
    pieces = of_mask(mask, batch)
    hidden = cells - sum(piece.cells for piece in pieces)
    return pieces if hidden * heads * head_dim > least * len(pieces) else ()


def call_cost(device: torch.device) -> int:
    """Multiply-adds that must be saved to be worth one more call."""
    return CALL if device.type == "cpu" else CALL_OF_ACCELERATOR


def of_mask(mask: BoundMask, batch: int) -> tuple[Piece, ...]:
    """Those of a mask with lengths or with one clause of segments, in the order of the queries."""
    return tuple(piece for piece in _pieces(mask, batch) if piece.cells)


def _pieces(mask: BoundMask, batch: int) -> Iterator[Piece]:
    """One for each sequence or segment; none at all where a segment is not one stretch."""
    query_ends = _ends(mask.query_lengths, batch, mask.queries)
    key_ends = _ends(mask.key_lengths, batch, mask.keys)
    if mask.segment_ids:
        query_runs, key_runs = (_runs(ids, batch) for ids in mask.segment_ids[0])
    else:
        query_runs = key_runs = [{0: Span(0, max(mask.queries, mask.keys))}] * batch
    if query_runs is None or key_runs is None:
        return
    for row in range(batch):
        for name, (first, stop) in query_runs[row].items():
            start, end = key_runs[row].get(name, (0, 0))
            queries = Span(first, min(stop, query_ends[row]))
            yield Piece(row, queries, Span(start, min(end, key_ends[row])))


def _ends(lengths: Tensor | None, batch: int, longest: int) -> list[int]:
    return [longest] * batch if lengths is None else lengths.tolist()


def _runs(ids: Tensor, batch: int) -> list[dict[int, Span]] | None:
    """Where each segment of each row begins and ends; None where one is not a single stretch."""
    rows = []
    for row in ids:
        names, counts = torch.unique_consecutive(row, return_counts=True)
        stops = counts.cumsum(0)
        spans = list(map(Span, (stops - counts).tolist(), stops.tolist()))
        found = [(n, span) for n, span in zip(names.tolist(), spans, strict=True) if n >= 0]
        if len(dict(found)) < len(found):
            return None
        rows.append(dict(found))
    return rows * batch if len(rows) == 1 else rows


# ---- the product -----------------------------------------------------------------------------


def head_outputs(
    problem: Problem, v: Tensor, pieces: tuple[Piece, ...], product: Product
) -> Tensor:
    """(batch, heads, queries, value_dim): each piece by ``product``, zeros elsewhere."""
    outputs = []
    for row, own in enumerate(matrices(problem, v, pieces)):
        found = [product(*matrix) for matrix in own]
        spans = [piece.queries for piece in pieces if piece.batch == row]
        outputs.append(_with_gaps(found, spans, problem.q, v.shape[-1]))
    return torch.cat(outputs).transpose(1, 2)


def matrices(
    problem: Problem, v: Tensor, pieces: tuple[Piece, ...]
) -> Iterator[list[tuple[Problem, Tensor]]]:
    """For each sequence its pieces, as problems of their own with their values."""
    rows = zip(problem.q.split(1), problem.k.split(1), v.split(1), strict=True)
    for index, (q, k, values) in enumerate(rows):
        own = [piece for piece in pieces if piece.batch == index]
        cut_q = cut(q, [piece.queries for piece in own], dim=2)
        cut_k, cut_v = (cut(t, [piece.keys for piece in own], dim=2) for t in (k, values))
        yield [
            (_problem_of(problem, piece, *parts), part_v)
            for piece, *parts, part_v in zip(own, cut_q, cut_k, cut_v, strict=True)
        ]


def _problem_of(problem: Problem, piece: Piece, q: Tensor, k: Tensor) -> Problem:
    sequence = slice(piece.batch, piece.batch + 1)
    rectangle = (sequence, slice(*piece.queries), slice(*piece.keys))
    return replace(
        problem, q=q, k=k, mask=problem.mask.piece(*rectangle), bias=problem.bias.piece(*rectangle)
    )


def cut(tensor: Tensor, spans: list[Span], *, dim: int) -> list[Tensor]:
    """These spans of an axis, in the order given; they do not overlap.

    Split, never sliced: the gradient of a slice is as large as the tensor it was cut from.
    """
    order = sorted(range(len(spans)), key=spans.__getitem__)
    sizes, at = [], 0
    for first, stop in (spans[i] for i in order):
        sizes += [first - at, stop - first]
        at = stop
    parts = tensor.split([*sizes, tensor.shape[dim] - at], dim=dim)
    return [part for _, part in sorted(zip(order, parts[1::2], strict=True), key=lambda x: x[0])]


def _with_gaps(found: list[Tensor], spans: list[Span], q: Tensor, value_dim: int) -> Tensor:
    """(1, queries, heads, value_dim): the outputs at their queries, zeros between them."""
    heads, queries = q.shape[1:3]
    parts, at = [], 0
    for out, (first, stop) in zip(found, spans, strict=True):
        parts += [q.new_zeros(1, first - at, heads, value_dim), out.transpose(1, 2)]
        at = stop
    parts.append(q.new_zeros(1, queries - at, heads, value_dim))
    return torch.cat([part for part in parts if part.shape[1]] or parts, dim=1)
