"""What a bias by position is made of: a value that makes a module, which gives a `ScoreBias`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class PositionBias(Protocol):
    """A score bias by position; its module holds what it learns, if anything."""

    def module(
        self,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """A module whose ``forward(*, align)`` gives the `ScoreBias` for this many heads."""
        ...


class WithNumbers(nn.Module):
    """A module with one tensor of fixed numbers, ``numbers``, that is in no state_dict.

    It goes where the module goes, but is never narrower than ``least``: ``half()`` would round
    it for good. ``double()`` widens it, so that one function is computed in every dtype.
    """

    numbers: Tensor

    def __init__(
        self,
        numbers: tuple[float, ...] | tuple[int, ...],
        *,
        least: torch.dtype,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._exact, self._least = numbers, least
        written = self._written(device, least if dtype is None else dtype)
        self.register_buffer("numbers", written, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WithNumbers:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Written anew: what fn gave is rounded, or nothing at all after to_empty().
        self.numbers = self._written(self.numbers.device, self.numbers.dtype)
        return self

    def _written(self, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
        numbers = torch.tensor(self._exact, dtype=self._least, device=device)
        return numbers.to(torch.promote_types(dtype, self._least))
