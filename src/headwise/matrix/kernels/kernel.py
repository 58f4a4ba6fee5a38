"""Base class of kernels, their tasks and costs.

A new kernel is one class in one file, and one entry in `dispatch.KERNELS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from headwise.matrix.kernels.input import KernelInput
from headwise.matrix.kernels.tiled import KernelResult, Requested, softmax_shift
from headwise.matrix.kernels.tiles import plan_tiles


@dataclass(frozen=True, eq=False)
class Task:
    """Products and statistics to compute of one attention matrix.

    Attributes:
        problem: the matrix.
        v: right operand of ``A @ v``, (batch, kv_heads, keys, value_dim), or None.
        y: right operand of ``A.mT @ y``, (batch, heads, queries, y_dim), or None.
        statistics: the results besides these products, or None.
        dropout_p: probability of dropping each weight before the product with ``v``.
        cache: intermediate results of a kernel for this task.
    """

    problem: KernelInput
    v: Tensor | None = None
    y: Tensor | None = None
    statistics: Requested | None = None
    dropout_p: float = 0.0
    cache: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def values_if_only_product(self) -> Tensor | None:
        """``v`` if its product is the whole task, else None."""
        return self.v if self.y is None and self.statistics is None else None

    @property
    def requested_statistics(self) -> Requested:
        """``statistics``, or an empty `Requested`."""
        return self.statistics or Requested()  # no field default: a compiler cannot make one

    @cached_property
    def cell_count(self) -> int:
        """Number of matrix entries in all tiles: those inside the bands, rounded up to tiles."""
        total = 0
        for tile in plan_tiles(self.problem):
            batches, kv_heads, group, rows, columns = tile.axis_sizes(self.problem.group)
            total += batches * kv_heads * group * rows * columns
        return total

    @property
    def operation_count(self) -> int:
        """Floating-point operations of the scores and every product, two for a multiply-add."""
        widths = [self.problem.q.shape[3], *(t.shape[3] for t in (self.v, self.y) if t is not None)]
        return 2 * self.cell_count * sum(widths)


class Cost(NamedTuple):
    """Floating-point operations, and memory besides the result in bytes."""

    operations: int
    memory: int


class Kernel(ABC):
    """Implementation of tasks on an attention matrix."""

    name: ClassVar[str]

    @abstractmethod
    def refusal_reason(self, task: Task) -> str | None:
        """Return the reason for not taking this task in one line, or None to take it."""

    @abstractmethod
    def run(self, task: Task) -> KernelResult:
        """Return the requested results; others may have no elements."""

    @abstractmethod
    def cost(self, task: Task) -> Cost:
        """Return the operations and the memory of a run."""

    def choice_reason(self, task: Task) -> str | None:  # noqa: ARG002
        """Return the reason for choosing this kernel; None for the last kernel's refusal."""
        return None


def result_of_outputs_only(out: Tensor) -> KernelResult:
    """Return a result with head outputs alone."""
    return KernelResult(out, *[out.new_empty(0)] * (len(KernelResult._fields) - 1))


def row_logsumexp(sink: Tensor | None, result: KernelResult) -> Tensor:
    """Return log sum exp of each row's scores and sink, (batch, heads, queries)."""
    peak = result.peak.detach()
    if sink is not None:
        peak = torch.maximum(peak, sink.detach().to(peak.dtype)[:, None])
    return peak + result.log_sum


def row_largest_weight(sink: Tensor | None, result: KernelResult) -> Tensor:
    """Return the largest weight of each row, (batch, heads, queries)."""
    shift = softmax_shift(result.peak.detach(), None if sink is None else sink.detach())
    return torch.exp(result.peak - shift - result.log_sum)
