"""Comparison with the oracle: exactly, within a budget, or within a bound."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headwise.testing import Budget
from tests.fuzz.draw import plain
from tests.fuzz.oracle import Array


class DifferenceError(AssertionError):
    """A result that is not the oracle's."""


def same(name: str, found: Tensor, expected: Array) -> None:
    """Exactly equal, in shape and values."""
    if tuple(found.shape) != expected.shape:
        raise DifferenceError(f"{name}: shape {tuple(found.shape)}, expected {expected.shape}")
    if wrong := int((plain(found) != expected).sum()):
        raise DifferenceError(f"{name}: {wrong} of {expected.size} entries differ")


def within(name: str, budget: Budget, found: Tensor, expected: Array) -> None:
    """Within the budget's allowance, around the oracle's result instead of the library's own."""
    exact = torch.from_numpy(np.ascontiguousarray(expected))
    if budget.exact.shape != exact.shape:
        raise DifferenceError(f"{name}: the reference has shape {tuple(budget.exact.shape)}")
    if tuple(found.shape) != expected.shape:
        raise DifferenceError(f"{name}: shape {tuple(found.shape)}, expected {expected.shape}")
    axes = tuple(f"axis {n}" for n in range(exact.dim()))
    # The oracle's own rounding, in float64.
    largest = float(np.abs(expected[np.isfinite(expected)]).max(initial=0))
    own = 64 * np.finfo(float).eps * (1 + largest)
    allowed = budget.allowed + own
    verdict = replace(budget, name=name, exact=exact, allowed=allowed, axes=axes).check(found)
    if not verdict.within:
        raise DifferenceError(str(verdict).replace("\n", ";"))
    drifted = replace(budget, name=f"reference of {name}", dtype=torch.float64, axes=axes)
    reference = replace(drifted, exact=exact, allowed=allowed).check(budget.exact)
    if not reference.within:
        raise DifferenceError(str(reference).replace("\n", ";"))


def close(name: str, found: Tensor, expected: Array, allowed: float) -> None:
    """No element further away than ``allowed``."""
    if tuple(found.shape) != expected.shape:
        raise DifferenceError(f"{name}: shape {tuple(found.shape)}, expected {expected.shape}")
    error = np.abs(plain(found) - expected)
    if error.size and not error.max() <= allowed:
        raise DifferenceError(f"{name}: off by {error.max():.3g}, allowed {allowed:.3g}")
