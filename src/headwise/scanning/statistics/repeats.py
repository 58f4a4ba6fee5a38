"""Which tokens stand more than once in a sequence, and where."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from headwise.support.integers import as_int64


class Repeats:
    """For each key, the earlier keys that hold the same token.

    Keys are sorted by token once, so the work grows with the number of repeats: no tile of
    queries x keys is compared.
    """

    def __init__(
        self, tokens: Integer[Tensor, "batch keys"], real: Bool[Tensor, "batch keys"]
    ) -> None:
        tokens = as_int64(tokens, "tokens")
        # Padding, and what is not known, is a token of its own that nothing asks about.
        known = real & (tokens >= 0)
        name = torch.unique(tokens, return_inverse=True)[1] + 1
        name = name.masked_fill(~known, 0)
        self._order = name.argsort(dim=-1, stable=True)
        in_order = name.gather(1, self._order)
        self._first = torch.searchsorted(in_order, name)  # where the token's keys begin
        nth = torch.arange(name.shape[1], device=name.device).expand_as(name)
        place = torch.empty_like(name).scatter_(1, self._order, nth)
        self.earlier = (place - self._first).masked_fill(~known, 0)
        """(batch, keys): how many earlier keys hold the token of this one."""

    def pairs(self, batches: slice, own: Int[Tensor, " rows"]) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, row, key) of every earlier key with the token of one of the rows' own keys."""
        earlier = self.earlier[batches][:, own].flatten()
        row = torch.repeat_interleave(torch.arange(len(earlier), device=own.device), earlier)
        nth = torch.arange(len(row), device=own.device) - (earlier.cumsum(0) - earlier)[row]
        place = self._first[batches][:, own].flatten()[row] + nth
        batch = row // max(1, len(own))
        return batch, row - batch * len(own), self._order[batches][batch, place]
