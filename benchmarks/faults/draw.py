"""Random choices of the fault bench, replayable from words."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Draw:
    """Source of random numbers in float64 whose seed is a hash of words and numbers."""

    def __init__(self, *words: str | int) -> None:
        digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
        self.generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

    def integer(self, low: int, high: int) -> int:
        """Return an integer from ``low`` to ``high - 1``."""
        return int(torch.randint(low, high, (), generator=self.generator))

    def choice(self, options: Sequence[T]) -> T:
        """Return an element of ``options``."""
        return options[self.integer(0, len(options))]

    def uniform(self, low: float, high: float) -> float:
        """Return a number from ``low`` to ``high``."""
        share = float(torch.rand((), generator=self.generator, dtype=torch.float64))
        return low + (high - low) * share

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        """Return normal numbers of the given shape."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64) * std

    def spread(self, *shape: int, low: float, high: float) -> Tensor:
        """Return numbers from ``low`` to ``high`` of the given shape."""
        share = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return low + (high - low) * share

    def moved(self, n: int) -> Tensor:
        """Return a permutation of ``n >= 2`` places that is not the identity."""
        while True:
            order = torch.randperm(n, generator=self.generator)
            if bool((order != torch.arange(n)).any()):
                return order
