"""The one place that chooses: products, readings, dropout, and the report on them go through it."""

from __future__ import annotations

from typing import NamedTuple

from headwise.kernels.dense import DenseKernel
from headwise.kernels.kernel import Kernel, Task
from headwise.kernels.sdpa import FusedKernel
from headwise.kernels.tiled import KernelResult
from headwise.kernels.tiled_op import TiledKernel
from headwise.kernels.varlen import VarlenKernel


class KernelChoice(NamedTuple):
    """A kernel, and the reason in one line."""

    kernel: Kernel
    why: str


def choose(task: Task) -> KernelChoice:
    """The first kernel that takes the task, and why: its own reason, or the last refusal."""
    refused = ""
    for kernel in KERNELS:
        refusal = kernel.refuses(task)
        if refusal is None:
            return KernelChoice(kernel, kernel.reason(task) or refused)
        refused = refusal
    raise AssertionError(f"no kernel takes {task}")  # the last one takes every task


def run(task: Task) -> KernelResult:
    """The readings that were asked for, by the kernel that `choose` names."""
    return choose(task).kernel.run(task)


# In this order each is asked. A new kernel is added here; where the next one serves, the refusal of
# this one is the reason that is reported.
KERNELS: tuple[Kernel, ...] = (VarlenKernel(choose), FusedKernel(), TiledKernel(), DenseKernel())
