"""Which kernel computes the head outputs, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from headwise.kernels import pieces, sdpa, tiles
from headwise.kernels.problem import Problem
from headwise.masks.bound_mask import Division
from headwise.support.eager import may_check_values

Kernel = Literal["sdpa", "tiled", "pieces"]


@dataclass(frozen=True)
class Choice:
    """A kernel, and the reason in one line."""

    kernel: Kernel
    why: str
    division: Division | None = None


def choose(problem: Problem, v: Tensor) -> Choice:
    """The kernel for ``A @ v``: the fused one unless it would write queries x keys or cannot.

    A matrix that is mostly hidden by lengths or segments is left to one kernel for each piece.
    """
    if division := pieces.find(problem):
        count = len(division.rectangles)
        return Choice("pieces", f"{count} sequences, each a matrix of its own", division)
    for tiled, why in _reasons_for_tiles(problem, v):
        if tiled:
            return Choice("tiled", why)
    strided = [name for name, t in sdpa.operands(problem, v).items() if sdpa.is_strided(t)]
    copies = f", after a copy of {', '.join(strided)}: the last stride is not 1" if strided else ""
    return Choice("sdpa", f"the fused kernel takes this mask{copies}")


def _reasons_for_tiles(problem: Problem, v: Tensor) -> Iterator[tuple[bool, str]]:
    # One after the other: what a compiled graph compares of its sizes, it holds for only.
    bias, dtype = problem.bias, problem.q.dtype
    yield problem.softcap is not None, "softcap: the fused kernel has none"
    yield problem.sink is not None, "sink: the fused kernel has none"
    yield (
        not problem.has_positive_scale,
        "the scale is not above 0: the fused kernel would multiply its causal -inf by it",
    )
    yield bias.requires_grad, "the gradient of a score bias leaves the fused path"
    yield (
        any(t.dtype != dtype for t in bias.all()),
        "the fused kernel would round the score bias to the dtype of the queries",
    )
    yield sum_overflows(problem), "float16 cannot hold the sum of these score biases"
    yield (
        _is_large_when_written(problem),
        "the fused kernel would need this mask written down as queries x keys",
    )
    empty = 0 in (problem.q.numel(), problem.k.numel(), v.numel())
    yield empty, "nothing to fuse: an axis is empty"
    yield (
        _costs_more_to_copy(problem, v),
        "few queries: copying strided keys or values for the fused kernel costs more",
    )
    double = dtype == torch.float64 and problem.q.device.type != "cpu"
    yield double, "the fused kernel takes no float64 on this device"


def sum_overflows(problem: Problem) -> bool:
    """Whether the fused kernel, which takes one bias, would lose a number that the tiles hold.

    Values are read on the CPU alone; elsewhere such a sum becomes the largest or lowest number.
    """
    parts = problem.bias.all()
    if problem.q.dtype != torch.float16 or len(parts) < 2 or not all(map(may_check_values, parts)):
        return False
    finite = [part.detach().masked_fill(part.isinf(), 0) for part in parts if part.numel()]
    return sum(float(part.abs().amax()) for part in finite) > torch.finfo(torch.float16).max


def _is_large_when_written(problem: Problem) -> bool:
    """Whether the fused kernel needs a mask that must be written, and is larger than a tile.

    None must be for a causal mask alone, one dense tensor alone, and clauses over keys alone.
    """
    hiding, tensors = problem.mask.hiding, problem.bias.tensors
    if problem.mask.is_causal and problem.bias.is_zero:
        return False
    shapes = list(_shapes_written(problem))
    alone = len(shapes) == 1 and len(tensors) + sum(c.is_written for c in hiding) == 1
    spans_keys_alone = all(shape[2] == 1 for shape in shapes)
    if alone or spans_keys_alone:
        return False
    if torch.compiler.is_compiling():
        return True  # a choice by size would hold for this size only
    return prod(max(shape[axis] for shape in shapes) for axis in range(4)) > tiles.TILE_ELEMENTS


def _costs_more_to_copy(problem: Problem, v: Tensor) -> bool:
    """Whether k or v must be copied for the fused kernel, and is larger than the weights."""
    if not (sdpa.is_strided(problem.k) or sdpa.is_strided(v)):
        return False
    queries = problem.q.shape[2]
    if torch.compiler.is_compiling():
        return bool(queries == 1)  # a choice by size would hold for this size only
    return queries * problem.group <= problem.q.shape[3]


def _shapes_written(problem: Problem) -> Iterator[tuple[int, ...]]:
    """How far each clause that hides something, and each part of the bias, spans the four axes."""
    mask, bias = problem.mask, problem.bias
    for clause in mask.hiding:
        yield clause.extent(mask.sizes)
    for tensor in bias.tensors:
        yield tuple(tensor.shape)
    if bias.table is not None:
        yield 1, bias.table.shape[0], mask.sizes.queries, mask.sizes.keys
