"""Where a head looks, counted from the query's own place."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.scanning.statistics.parts import mean_over
from headwise.scanning.statistics.spread import EXCLUDED
from headwise.scanning.statistics.statistic import Definition, RowMean, Summary, TileStatistic
from headwise.scanning.statistics.tile import WeightTile


class PreviousToken(RowMean):
    """The weight on the token before."""

    definition = Definition(
        name="previous_token",
        formula="mean over queries i ≥ 1 of A[i, i − 1]",
        unit="share of the weight, 0 to 1",
        excluded="padded queries, and the first of each sequence, which has no key before it",
        source="Clark et al. 2019, arXiv:1906.04341, section 3.1; Olsson et al. 2022, "
        "arXiv:2209.11895",
        title="Weight on the token before",
        most="puts {} of its weight on the token before",
    )
    needs = ("own_key",)
    reach = 1

    def of_rows(self, tile: WeightTile) -> Tensor:
        return tile.diagonal(-1)

    def counts(self, tile: WeightTile) -> Tensor:
        first = tile.call.first_key[tile.batches, None]
        return tile.counted & (tile.own > first)[:, None]


class OffsetProfile(TileStatistic):
    """The weight on each of the places around the query's own."""

    OFFSETS = 16
    definition = Definition(
        name="offset_profile",
        formula="for each offset o from −16 to +16: mean over queries i of A[i, i + o]",
        unit="share of the weight, 0 to 1",
        excluded="padded queries, and those for which no key stands at the offset",
        source="diagonals: Kovaleva et al. 2019, arXiv:1908.08593; positional heads: Voita et al. "
        "2019, arXiv:1905.09418",
        axes=("offset",),
    )
    needs = ("own_key",)
    reach = OFFSETS
    parts = mean_over(2 * OFFSETS + 1)

    def update(self, gathered: Summary, tile: WeightTile) -> None:
        offsets = torch.arange(-self.OFFSETS, self.OFFSETS + 1, device=tile.weights.device)
        place = tile.own[:, None] + offsets
        real = tile.call.real_keys[tile.batches]
        exists = (place >= 0) & (place < real.shape[1])
        stands = real[:, place.clamp(0, real.shape[1] - 1)] & exists
        counted = tile.counted[..., None] & stands[:, None]
        found = tile.band(self.OFFSETS).double().masked_fill(~counted, 0.0)
        gathered["sum"][tile.heads] += found.sum((0, 2))
        gathered["count"][tile.heads] += counted.sum((0, 2))


class Distance(RowMean):
    """How far away a head looks."""

    definition = Definition(
        name="distance",
        formula="mean over queries i of Σⱼ A[i, j] · |i − j|; a sink is nowhere and adds nothing",
        unit="tokens, from 0",
        excluded=EXCLUDED,
        source="Vig and Belinkov 2019, arXiv:1906.04284, section 4.2",
        title="How far away it looks",
        most="looks furthest: {} away on average",
    )
    needs = ("own_key",)

    def of_rows(self, tile: WeightTile) -> Tensor:
        # Sums of terms that are never negative: nothing cancels at any length.
        first, last = int(tile.own[0]), int(tile.own[-1])
        keys = torch.arange(tile.columns.start, tile.columns.stop, device=tile.weights.device)
        before, after = (keys < first).sum().item(), (keys <= last).sum().item()
        near = (tile.own[:, None] - keys[before:after]).abs().to(tile.weights.dtype)
        total: Tensor = torch.linalg.vecdot(tile.weights[..., before:after], near)
        for part, edge in ((slice(None, before), first), (slice(after, None), last)):
            if keys[part].numel():
                total += _beyond(tile.weights[..., part], keys[part], tile.own, edge=edge)
        return total


def _beyond(weights: Tensor, keys: Tensor, own: Tensor, *, edge: int) -> Tensor:
    """Weight times distance for keys that all stand on one side: to the edge, and on from there."""
    # One vector at a time: a product with two columns takes ten times as long on CPU.
    to_edge = torch.matmul(weights, (keys - edge).abs().to(weights.dtype))
    return to_edge + weights.sum(-1) * (own - edge).abs()


class _Within(RowMean):
    """The weight on keys that are not far away."""

    needs = ("own_key",)

    def of_rows(self, tile: WeightTile) -> Tensor:
        return tile.within(self.reach)


def _within(reach: int) -> Definition:
    return Definition(
        name=f"within_{reach}",
        formula=f"mean over queries i of Σⱼ A[i, j] over the keys with |i − j| ≤ {reach}",
        unit="share of the weight, 0 to 1",
        excluded=EXCLUDED,
        source="local heads; the windows are those of sliding attention, Beltagy et al. 2020, "
        "arXiv:2004.05150",
        title=f"Weight at most {reach} tokens away",
        most=f"keeps {{}} of its weight within {reach} tokens",
    )


class Within16(_Within):
    """The weight at most 16 tokens away."""

    reach = 16
    definition = _within(reach)


class Within64(_Within):
    """The weight at most 64 tokens away."""

    reach = 64
    definition = _within(reach)


class Within256(_Within):
    """The weight at most 256 tokens away."""

    reach = 256
    definition = _within(reach)
