"""Rows of a call that several statistics share: those of sampled queries, and repeated tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

from headwise.kernels.problem import accumulation_dtype
from headwise.matrix import AttentionMatrix
from headwise.support.integers import as_int64

SAMPLES = 64  # rows that are kept of each sequence, at most


class Samples:
    """The rows of some queries of each sequence, out of all tiles.

    Which ones depends on the sequence alone, never on what else is in its batch or on padding.

    Attributes:
        places: (batch, samples), the queries; any number where there is no such sample.
        real: (batch, samples), whether there is one.
        weights: (batch, heads, samples, keys).
        sink: (batch, heads, samples), the sink's share; 0 without a sink.
        counted: (batch, heads, samples), whether the query may attend to something.
    """

    def __init__(
        self, matrix: AttentionMatrix, real_queries: Bool[Tensor, "batch queries"]
    ) -> None:
        batch, heads, _, keys = matrix.shape
        self.places, self.real = evenly_spaced(real_queries, at_most=SAMPLES)
        samples, device = self.places.shape[1], matrix.q.device
        exact = accumulation_dtype(matrix.q.dtype)
        self.weights = torch.zeros(batch, heads, samples, keys, dtype=exact, device=device)
        self.sink = torch.zeros(batch, heads, samples, dtype=exact, device=device)
        self.counted = torch.zeros(batch, heads, samples, dtype=torch.bool, device=device)


def evenly_spaced(
    real: Bool[Tensor, "batch length"], *, at_most: int
) -> tuple[Int[Tensor, "batch samples"], Bool[Tensor, "batch samples"]]:
    """The middles of as many equal stretches of each sequence; all of a sequence that is shorter.

    Returns:
        Places, and whether there is one: sequences differ in length.
    """
    samples = min(at_most, real.shape[1])
    count = real.sum(-1, keepdim=True)
    nth = torch.arange(samples, device=real.device)
    spread = (2 * nth + 1) * count // (2 * max(1, samples))
    nth = torch.where(count > samples, spread, nth)
    in_order = (~real).int().argsort(dim=-1, stable=True)  # the real ones first
    return in_order.gather(1, nth.clamp(max=max(0, real.shape[1] - 1))), nth < count


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
