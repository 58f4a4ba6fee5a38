"""Result of a check against an error budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BudgetVerdict:
    """Result of a check; true if every element is within its allowance.

    Attributes:
        name: the checked quantity.
        dtype: the dtype of the inputs.
        outside: the number of elements beyond their allowance.
        elements: the number of all elements.
        place: the index of the worst element, the one with the largest ``ratio``.
        actual: the value of the worst element.
        exact: its float64 reference.
        error: its absolute error.
        allowed: its allowance.
    """

    name: str
    dtype: torch.dtype
    outside: int
    elements: int
    place: str
    actual: float
    exact: float
    error: float
    allowed: float

    @property
    def within(self) -> bool:
        """True if every element is within its allowance."""
        return self.outside == 0

    @property
    def ratio(self) -> float:
        """Error over allowance at the worst element; at most 1 within the budget."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowed if self.allowed else math.inf

    def __bool__(self) -> bool:
        return self.within

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        head = f"{self.name} ({dtype}): {self.elements - self.outside} of {self.elements} elements"
        return (
            f"{head} are within the error budget\n"
            f"  largest share of the allowance: {self.ratio:.3g} at {self.place}\n"
            f"  error {self.error:.3g}, allowed {self.allowed:.3g}: "
            f"got {self.actual:.9g}, the float64 reference is {self.exact:.9g}"
        )

    __repr__ = __str__
