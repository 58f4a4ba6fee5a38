"""Variable-length attention: a padded or packed batch, one sequence at a time.

Lengths and segments divide the matrix into a few rectangles; all other entries are hidden. Each
rectangle is a smaller attention matrix for any kernel. Reading the lengths needs eager mode; in
compiled graphs the mask hides the entries one by one, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from headwise.masks.bound import BlockDiagonal
from headwise.masks.clause import Span
from headwise.matrix.kernels import kernel
from headwise.matrix.kernels.kernel import Cost, Kernel, KernelInput, KernelResult, Task

# Cost of one more kernel call in multiply-adds: measured on two CPU cores (docs/log.md). The number
# for accelerators is an estimate, a thousand times as many.
CALL, CALL_OF_ACCELERATOR = 2**21, 2**31


def split_into_rectangles(problem: KernelInput) -> BlockDiagonal | None:
    """Return the rectangles of a matrix, if computing them one by one is less work; else None."""
    mask, (batch, heads, queries, head_dim) = problem.mask, problem.q.shape
    if not mask.clauses or torch.compiler.is_compiling():
        return None  # first, since a graph holds only for the sizes that it compares
    cells, least = batch * queries * mask.sizes.keys, call_overhead(problem.q.device)
    if cells * heads * head_dim <= least:
        return None  # before the lengths are read, since reading waits for an accelerator
    division = mask.rectangles_of_allowed_pairs()
    if division is None:
        return None
    hidden = cells - sum(piece.cell_count for piece in division.rectangles)
    enough = hidden * heads * head_dim > least * len(division.rectangles)
    return division if enough and division.rectangles else None


def call_overhead(device: torch.device) -> int:
    """Return the multiply-adds that cost as much as one more kernel call."""
    return CALL if device.type == "cpu" else CALL_OF_ACCELERATOR


# ---- the product -----------------------------------------------------------------------------


class VarlenKernel(Kernel):
    """Kernel that runs each rectangle by the kernel chosen for it, and fills in zeros."""

    name = "pieces"
    reads_padding = False

    def __init__(self, choose: Callable[[Task], tuple[Kernel, str]]) -> None:
        self._choose = choose

    def refusal_reason(self, task: Task) -> str | None:
        is_product = task.values_if_only_product is not None
        division = split_into_rectangles(task.problem) if is_product else None
        task.cache["division"] = division
        return None if division else "the mask does not divide the matrix into sequences"

    def choice_reason(self, task: Task) -> str:
        return f"{len(task.cache['division'].rectangles)} sequences, each a separate matrix"

    def run(self, task: Task) -> KernelResult:
        assert task.v is not None
        rows = []
        for row, tasks in enumerate(yield_task_lists_by_batch_row(task)):
            outputs = [self._run_piece(piece) for piece in tasks]
            pieces = task.cache["division"].rectangles
            spans = [piece.queries for piece in pieces if piece.batch == row]
            rows.append(_fill_gaps(outputs, spans, task.problem.q, task.v.shape[-1]))
        return kernel.result_of_outputs_only(torch.cat(rows).transpose(1, 2))

    def _run_piece(self, piece: Task) -> Tensor:
        chosen, _ = self._choose(piece)  # this kernel again, where other segments divide a piece
        return chosen.run(piece.zeroed() if chosen.reads_padding else piece).out

    def cost(self, task: Task) -> Cost:
        """Return all operations, and the memory of the largest rectangle, as they run in turn."""
        pieces = [piece for row in yield_task_lists_by_batch_row(task) for piece in row]
        costs = [self._choose(piece)[0].cost(piece) for piece in pieces]
        return Cost(sum(c.operations for c in costs), max((c.memory for c in costs), default=0))


def yield_task_lists_by_batch_row(task: Task) -> Iterator[list[Task]]:
    """Yield the rectangles of each sequence of the batch, as tasks."""
    division: BlockDiagonal = task.cache["division"]
    problem = replace(task.problem, mask=division.rest)
    assert task.v is not None
    rows = zip(problem.q.split(1), problem.k.split(1), task.v.split(1), strict=True)
    for index, (q, k, values) in enumerate(rows):
        pieces = [piece for piece in division.rectangles if piece.batch == index]
        parts_q = cut_tensor_into_spans(q, [piece.queries for piece in pieces], dim=2)
        keys = [piece.keys for piece in pieces]
        parts_k, parts_v = (cut_tensor_into_spans(t, keys, dim=2) for t in (k, values))
        tasks = []
        for piece, part_q, part_k, v in zip(pieces, parts_q, parts_k, parts_v, strict=True):
            place = piece.as_matrix_part
            mask, bias = problem.mask.cut_to_part(place), problem.bias.cut_to_part(place)
            part = replace(problem, q=part_q, k=part_k, mask=mask, bias=bias)
            tasks.append(replace(task, problem=part, v=v))
        yield tasks


def cut_tensor_into_spans(tensor: Tensor, spans: list[Span], *, dim: int) -> list[Tensor]:
    """Return spans of an axis, which do not overlap, in the order of ``spans``."""
    order = sorted(range(len(spans)), key=spans.__getitem__)
    sizes, at = [], 0  # to split at, since the gradient of a slice is as large as the tensor
    for first, stop in (spans[i] for i in order):
        sizes += [first - at, stop - first]
        at = stop
    parts = tensor.split([*sizes, tensor.shape[dim] - at], dim=dim)
    return [part for _, part in sorted(zip(order, parts[1::2], strict=True), key=lambda x: x[0])]


def _fill_gaps(outputs: list[Tensor], spans: list[Span], q: Tensor, value_dim: int) -> Tensor:
    """Return (1, queries, heads, value_dim): the outputs at their queries, zeros elsewhere."""
    heads, queries = q.shape[1:3]
    parts, at = [], 0
    for out, (first, stop) in zip(outputs, spans, strict=True):
        parts += [q.new_zeros(1, first - at, heads, value_dim), out.transpose(1, 2)]
        at = stop
    parts.append(q.new_zeros(1, queries - at, heads, value_dim))
    return torch.cat([part for part in parts if part.shape[1]] or parts, dim=1)
