"""One pass over a matrix: by the tiled kernel, or dense where only torch's own is understood."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.kernels import dense, sweep
from headwise.kernels.problem import Problem
from headwise.kernels.tiled import Readings, Wanted
from headwise.support import private_torch


def read(
    problem: Problem,
    *,
    v: Tensor | None = None,
    y: Tensor | None = None,
    wanted: Wanted | None = None,
) -> Readings:
    """Every asked reading of a matrix; those not asked for are without elements."""
    wanted = wanted or Wanted()
    if needs_plain_torch():
        return dense.read(problem, v, y, wanted)
    return sweep.read(problem, v, y, wanted)


def needs_plain_torch() -> bool:
    """ONNX knows no operator of ours; forward-mode AD and torch.func see through torch's own."""
    if torch.onnx.is_in_onnx_export():
        return True
    if torch.compiler.is_compiling():
        return False
    # Where torch does not say, its own error under torch.func is better than hidden memory.
    return private_torch.in_forward_mode() or private_torch.in_functorch(unknown=False)
