"""Choice of the kernel for every task, and the report on the choices for a matrix."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwise.matrix.kernels import dense, sdpa, tiled_op, varlen
from headwise.matrix.kernels.kernel import Kernel, KernelInput, KernelResult, Requested, Task
from headwise.support.text import human_bytes


def choose_kernel(task: Task) -> tuple[Kernel, str]:
    """Return the first kernel that accepts the task; the reason is its own or the last refusal."""
    refused = ""
    for kernel in KERNELS:
        refusal = kernel.refusal_reason(task)
        if refusal is None:
            return kernel, kernel.choice_reason(task) or refused
        refused = refusal
    raise AssertionError(f"no kernel takes {task}")  # the last one takes every task


def run_kernel(task: Task) -> KernelResult:
    kernel, _ = choose_kernel(task)
    return kernel.run(task.zeroed() if kernel.reads_padding else task)


# In order of preference. Add a new kernel here. If a kernel refuses a task, its refusal is the
# reported reason for the next one.
KERNELS: tuple[Kernel, ...] = (
    varlen.VarlenKernel(choose_kernel),
    sdpa.FusedKernel(),
    tiled_op.TiledKernel(),
    dense.DenseKernel(),
)


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
    y = v.new_zeros(()).expand(*problem.q.shape[:3], v.shape[3])
    tasks = {
        "A @ v": Task(problem, v=v),
        "A.mT @ y": Task(problem, y=y),
        "statistics, diagonal": Task(problem, statistics=Requested(entropy=True, received=True)),
        "head_average": Task(problem, statistics=Requested(average=True)),
    }
    lines = []
    for reading, task in tasks.items():
        kernel, why = choose_kernel(task)
        lines.append(ExplanationLine(reading, kernel.name, why, *kernel.cost(task)))
    cost = dense.DenseKernel().cost(Task(problem))
    lines.append(ExplanationLine("rows, dense", dense.DenseKernel.name, "dense on request", *cost))
    return Explanation(tuple(lines))
