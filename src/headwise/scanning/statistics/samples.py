"""Whole rows of a few queries, kept for statistics that compare heads or need exact tokens."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwise.kernels.problem import accumulation_dtype
from headwise.matrix import AttentionMatrix

SAMPLES = 64  # rows that are kept of each sequence, at most


@runtime_checkable
class Rows(Protocol):
    """Whole rows of the weights of some heads, as `tile.WeightTile` holds them."""

    batches: slice
    heads: slice
    rows: slice
    columns: slice
    weights: Tensor
    sink: Tensor | None

    @property
    def counted(self) -> Tensor:
        """(batches, heads, rows): the queries that count."""
        ...


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

    def take(self, tile: Rows) -> None:
        """Copy the rows that lie in a tile."""
        places = self.places[tile.batches]
        inside = (places >= tile.rows.start) & (places < tile.rows.stop)
        batch, sample = (inside & self.real[tile.batches]).nonzero(as_tuple=True)
        row, sequence = places[batch, sample] - tile.rows.start, batch + tile.batches.start
        self.weights[sequence, tile.heads, sample, tile.columns] = tile.weights[batch, :, row]
        self.counted[sequence, tile.heads, sample] = tile.counted[batch, :, row]
        if tile.sink is not None:
            self.sink[sequence, tile.heads, sample] = tile.sink[batch, :, row]


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
