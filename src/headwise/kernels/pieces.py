"""A padded or packed batch, one sequence at a time: only what is real is computed.

Lengths and segments leave a matrix of a few full rectangles among cells that are all hidden. Each
rectangle is a smaller matrix of its own, and any kernel takes it. Reading the lengths needs eager
mode; compiled, the same mask is evaluated cell by cell, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from headwise.kernels.problem import Problem
from headwise.masks.bound_mask import Division
from headwise.masks.clause import Rectangle, Span

# What one more call of a kernel is worth, in multiply-adds: measured on two CPU cores
# (docs/log.md). For an accelerator it is an estimate, a thousand times as many.
CALL, CALL_OF_ACCELERATOR = 2**21, 2**31

Product = Callable[[Problem, Tensor], Tensor]


def find(problem: Problem) -> Division | None:
    """The pieces of a matrix, where taking them one by one is less work; else None."""
    mask, (batch, heads, queries, head_dim) = problem.mask, problem.q.shape
    if not mask.clauses or torch.compiler.is_compiling():
        return None  # first: what a graph compares of its sizes, it holds for only
    cells, least = batch * queries * mask.sizes.keys, call_cost(problem.q.device)
    if cells * heads * head_dim <= least:
        return None  # whatever the lengths are: reading them would wait for an accelerator
    division = mask.divided()
    if division is None:
        return None
    hidden = cells - sum(piece.cells for piece in division.rectangles)
    enough = hidden * heads * head_dim > least * len(division.rectangles)
    return division if enough and division.rectangles else None


def call_cost(device: torch.device) -> int:
    """Multiply-adds that must be saved to be worth one more call."""
    return CALL if device.type == "cpu" else CALL_OF_ACCELERATOR


# ---- the product -----------------------------------------------------------------------------


def head_outputs(problem: Problem, v: Tensor, division: Division, product: Product) -> Tensor:
    """(batch, heads, queries, value_dim): each piece by ``product``, zeros elsewhere."""
    outputs = []
    for row, own in enumerate(matrices(problem, v, division)):
        found = [product(*matrix) for matrix in own]
        spans = [piece.queries for piece in division.rectangles if piece.batch == row]
        outputs.append(_with_gaps(found, spans, problem.q, v.shape[-1]))
    return torch.cat(outputs).transpose(1, 2)


def matrices(
    problem: Problem, v: Tensor, division: Division
) -> Iterator[list[tuple[Problem, Tensor]]]:
    """For each sequence its pieces, as problems of their own with their values."""
    problem = replace(problem, mask=division.rest)
    rows = zip(problem.q.split(1), problem.k.split(1), v.split(1), strict=True)
    for index, (q, k, values) in enumerate(rows):
        own = [piece for piece in division.rectangles if piece.batch == index]
        cut_q = cut(q, [piece.queries for piece in own], dim=2)
        cut_k, cut_v = (cut(t, [piece.keys for piece in own], dim=2) for t in (k, values))
        yield [
            (_problem_of(problem, piece, *parts), part_v)
            for piece, *parts, part_v in zip(own, cut_q, cut_k, cut_v, strict=True)
        ]


def _problem_of(problem: Problem, piece: Rectangle, q: Tensor, k: Tensor) -> Problem:
    mask, bias = problem.mask.within(piece), problem.bias.within(piece)
    return replace(problem, q=q, k=k, mask=mask, bias=bias)


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
