"""Choice of the kernel for every task; the explanation of a matrix uses the same choice."""

from __future__ import annotations

from typing import NamedTuple

from headwise.kernels.dense import DenseKernel
from headwise.kernels.kernel import Kernel, Task
from headwise.kernels.sdpa import FusedKernel
from headwise.kernels.tiled import KernelResult
from headwise.kernels.tiled_op import TiledKernel
from headwise.kernels.varlen import VarlenKernel


class KernelChoice(NamedTuple):
    """Kernel for a task, with the reason in one line."""

    kernel: Kernel
    why: str


def choose_kernel(task: Task) -> KernelChoice:
    """Return the first kernel that accepts the task; the reason is its own or the last refusal."""
    refused = ""
    for kernel in KERNELS:
        refusal = kernel.refusal_reason(task)
        if refusal is None:
            return KernelChoice(kernel, kernel.choice_reason(task) or refused)
        refused = refusal
    raise AssertionError(f"no kernel takes {task}")  # the last one takes every task


def run_kernel(task: Task) -> KernelResult:
    """Return the requested results, from the kernel that `choose_kernel` returns."""
    return choose_kernel(task).kernel.run(task)


# In order of preference. Add a new kernel here. If a kernel refuses a task, its refusal is the
# reported reason for the next one.
KERNELS: tuple[Kernel, ...] = (
    VarlenKernel(choose_kernel),
    FusedKernel(),
    TiledKernel(),
    DenseKernel(),
)
