"""Report on the kernels of an attention matrix: reason, operations and memory of each result."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwise.kernels.dense import DenseKernel
from headwise.kernels.dispatch import choose_kernel
from headwise.kernels.kernel import Task
from headwise.kernels.kernel_input import KernelInput
from headwise.kernels.tiled import Requested
from headwise.support.message_text import human_bytes


@dataclass(frozen=True)
class ExplanationLine:
    """Kernel of one result, the reason, and the `Cost`."""

    reading: str
    kernel: str
    why: str
    operations: int
    memory: int

    def __str__(self) -> str:
        cost = f"{self.operations / 1e9:.2g} GFLOP, {human_bytes(self.memory)}"
        return f"{self.reading:<22} {self.kernel:<7} {cost:<22} {self.why}"


@dataclass(frozen=True)
class Explanation:
    """Printable report that ``A.explain()`` returns."""

    lines: tuple[ExplanationLine, ...]

    def __str__(self) -> str:
        head = f"{'reading':<22} {'kernel':<7} {'cost beside result':<22} why"
        return "\n".join([head, *map(str, self.lines)])

    __repr__ = __str__


def explain_kernels(problem: KernelInput, v: Tensor) -> Explanation:
    """Return the kernels of all results of this matrix, for values shaped like ``v``."""
    y = v.new_zeros(()).expand(*problem.q.shape[:3], v.shape[3])
    tasks = {
        "A @ v": Task(problem, v=v),
        "A.mT @ y": Task(problem, y=y),
        "statistics, diagonal": Task(problem, statistics=Requested(entropy=True, received=True)),
        "head_average": Task(problem, statistics=Requested(average=True)),
    }
    rows = ExplanationLine(
        "rows, dense",
        DenseKernel.name,
        "dense on request",
        *DenseKernel().cost(Task(problem)),
    )
    return Explanation(
        (*(_make_explanation_line(reading, task) for reading, task in tasks.items()), rows)
    )


def _make_explanation_line(reading: str, task: Task) -> ExplanationLine:
    kernel, why = choose_kernel(task)
    return ExplanationLine(reading, kernel.name, why, *kernel.cost(task))
