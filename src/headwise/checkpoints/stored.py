"""A tensor that is not read yet."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch


@dataclass(frozen=True)
class Stored:
    """What a file says of a tensor.

    Attributes:
        shape: how long its axes are.
        dtype: of its numbers.
        file: where it is.
        offset: of its first byte in the file; None where only the file's reader knows.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes it has, without gaps."""
        return prod(self.shape) * self.dtype.itemsize
