"""Least squares whose solution says how well it is known."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.function.weights import State

SMALLEST = 1e-9  # singular value, relative to the largest one, of unknowns that are determined


@dataclass(frozen=True)
class Read:
    """Weights of one role that make the outputs, where all other weights are the model's."""

    role: str
    weights: State  # canonical tensors, such as wq and bq
    noise: float  # of an entry, relative to the root mean square of the matrix


@dataclass(frozen=True)
class Solution:
    """The solution of equations."""

    x: Tensor  # (unknowns, columns)
    residual: float  # norm of what is left, relative to that of the right side
    noise: Tensor  # standard deviation of each unknown, by what is left, (unknowns,)


def solve(a: Tensor, b: Tensor) -> Solution | None:
    """Return the solution of a @ x = b for more equations than unknowns; None if it is open."""
    equations, unknowns = a.shape
    if equations <= unknowns:
        return None
    u, sizes, v = torch.linalg.svd(a, full_matrices=False)
    if float(sizes[-1]) <= SMALLEST * float(sizes[0]):
        return None
    x = v.T @ ((u.T @ b) / sizes[:, None])
    left = a @ x - b
    spread = left.square().sum(0).max() / (equations - unknowns)
    noise = (spread * (v.T / sizes).square().sum(1)).sqrt()
    return Solution(x, float(left.norm() / b.norm().clamp_min(1e-300)), noise)


def with_constant(x: Tensor) -> Tensor:
    """Return a matrix with a column of ones behind it."""
    return torch.cat([x, torch.ones_like(x[:, :1])], 1)
