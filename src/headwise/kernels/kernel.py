"""What a kernel is: it says which tasks it refuses, runs a task, and tells what the task costs.

A new kernel is one class in one file, and one place in the order of `dispatch.KERNELS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from headwise.kernels.bound_scores import BoundScores
from headwise.kernels.tiled import KernelResult, Requested
from headwise.kernels.tiles import plan


@dataclass(frozen=True, eq=False)
class Task:
    """What is asked of one attention matrix.

    Attributes:
        problem: the matrix.
        v: values to multiply it with, (batch, kv_heads, keys, value_dim).
        y: what its transpose is multiplied with, (batch, heads, queries, y_dim).
        wanted: readings beside these products; None where there is none.
        dropout_p: probability with which each weight is dropped before the product with ``v``.
        notes: what a kernel found out of this task, and would find once more.
    """

    problem: BoundScores
    v: Tensor | None = None
    y: Tensor | None = None
    wanted: Requested | None = None
    dropout_p: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def values(self) -> Tensor | None:
        """``v`` where its product is all that is asked; else None."""
        return self.v if self.y is None and self.wanted is None else None

    @property
    def readings(self) -> Requested:
        """``wanted``, or none."""
        return self.wanted or Requested()  # no default: a compiler cannot make one

    @cached_property
    def cells(self) -> int:
        """Entries of the matrix inside the tiles: what the bands leave, rounded up to tiles."""
        total = 0
        for tile in plan(self.problem):
            batches, kv_heads, group, rows, columns = tile.size(self.problem.group)
            total += batches * kv_heads * group * rows * columns
        return total

    @property
    def operations(self) -> int:
        """Multiply-adds of the scores and of every product, each counted as two operations."""
        widths = [self.problem.q.shape[3], *(t.shape[3] for t in (self.v, self.y) if t is not None)]
        return 2 * self.cells * sum(widths)


class Cost(NamedTuple):
    """Floating-point operations, and bytes beside the result."""

    operations: int
    memory: int


class Kernel(ABC):
    """One way to compute readings of an attention matrix."""

    name: ClassVar[str]

    @abstractmethod
    def refuses(self, task: Task) -> str | None:
        """Why it does not take this task, in one line; None where it takes it."""

    @abstractmethod
    def run(self, task: Task) -> KernelResult:
        """The readings that were asked for; others may be without elements."""

    @abstractmethod
    def cost(self, task: Task) -> Cost:
        """What running it costs."""

    def reason(self, task: Task) -> str | None:  # noqa: ARG002
        """Why it is the one, where more is to be said than why others refuse."""
        return None


def outputs_alone(out: Tensor) -> KernelResult:
    """Head outputs, and no other reading."""
    return KernelResult(out, *[out.new_empty(0)] * (len(KernelResult._fields) - 1))
