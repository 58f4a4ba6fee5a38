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

from headwise.kernels.bound_scores import BoundScores
from headwise.kernels.kernel import Cost, Kernel, Task, outputs_alone
from headwise.kernels.tiled import KernelResult
from headwise.masks.bound_mask import BlockDiagonal
from headwise.masks.clause import Rectangle, Span

# What one more call of a kernel is worth, in multiply-adds: measured on two CPU cores
# (docs/log.md). For an accelerator it is an estimate, a thousand times as many.
CALL, CALL_OF_ACCELERATOR = 2**21, 2**31


def find(problem: BoundScores) -> BlockDiagonal | None:
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


class VarlenKernel(Kernel):
    """Each rectangle by the kernel that is chosen for it, zeros elsewhere."""

    name = "pieces"

    def __init__(self, choose: Callable[[Task], tuple[Kernel, str]]) -> None:
        self._choose = choose

    def refuses(self, task: Task) -> str | None:
        """See `Kernel.refuses`."""
        return None if _division(task) else "the matrix is not divided into pieces"

    def reason(self, task: Task) -> str:
        """How many pieces there are."""
        return f"{len(_divided(task).rectangles)} sequences, each a matrix of its own"

    def run(self, task: Task) -> KernelResult:
        """See `Kernel.run`."""
        problem, division, outputs = task.problem, _divided(task), []
        for row, tasks in enumerate(matrices(task)):
            found = [self._choose(piece)[0].run(piece).out for piece in tasks]
            spans = [piece.queries for piece in division.rectangles if piece.batch == row]
            outputs.append(_with_gaps(found, spans, problem.q, _values(task).shape[-1]))
        return outputs_alone(torch.cat(outputs).transpose(1, 2))

    def cost(self, task: Task) -> Cost:
        """All operations, and the memory of the largest piece: they come one after the other."""
        costs = [self._choose(piece)[0].cost(piece) for row in matrices(task) for piece in row]
        return Cost(sum(c.operations for c in costs), max((c.memory for c in costs), default=0))


def _division(task: Task) -> BlockDiagonal | None:
    """Found once for each task, as it reads the lengths."""
    if "division" not in task.notes:
        task.notes["division"] = None if task.values is None else find(task.problem)
    division: BlockDiagonal | None = task.notes["division"]
    return division


def _divided(task: Task) -> BlockDiagonal:
    division = _division(task)
    assert division is not None
    return division


def _values(task: Task) -> Tensor:
    assert task.values is not None
    return task.values


def matrices(task: Task) -> Iterator[list[Task]]:
    """For each sequence its pieces, as tasks of their own."""
    division = _divided(task)
    problem = replace(task.problem, mask=division.rest)
    rows = zip(problem.q.split(1), problem.k.split(1), _values(task).split(1), strict=True)
    for index, (q, k, values) in enumerate(rows):
        own = [piece for piece in division.rectangles if piece.batch == index]
        cut_q = cut(q, [piece.queries for piece in own], dim=2)
        cut_k, cut_v = (cut(t, [piece.keys for piece in own], dim=2) for t in (k, values))
        yield [
            replace(task, problem=_problem_of(problem, piece, *parts), v=part_v)
            for piece, *parts, part_v in zip(own, cut_q, cut_k, cut_v, strict=True)
        ]


def _problem_of(problem: BoundScores, piece: Rectangle, q: Tensor, k: Tensor) -> BoundScores:
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
