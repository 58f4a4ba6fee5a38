"""Which keys a head looks at: the first, the sink, those that receive most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from headwise.scanning.captured_call import CapturedCall
from headwise.scanning.statistics.parts import Part, Parts
from headwise.scanning.statistics.spread import EXCLUDED
from headwise.scanning.statistics.statistic import Definition, RowMean, Summary, TileStatistic
from headwise.scanning.statistics.tile import WeightTile

RANKS = 8  # how many keys are kept
NOTHING = -1.0  # the weight of a rank that no key has


class FirstToken(RowMean):
    """The weight on the first token."""

    definition = Definition(
        name="first_token",
        formula="mean over queries i of A[i, 0], key 0 being the first that is no padding",
        unit="share of the weight, 0 to 1",
        excluded=EXCLUDED + "; the first query counts, though a causal mask leaves it no choice",
        source="the sink mass of key 0: Gu et al. 2024, arXiv:2410.10781; Xiao et al. 2023, "
        "arXiv:2309.17453",
        title="Weight on the first token",
        most="puts {} of its weight on the first token",
    )

    def of_rows(self, tile: WeightTile) -> Tensor:
        if tile.call.dropped:
            return torch.zeros_like(tile.maximum)
        place = tile.call.first_key[tile.batches] - tile.columns.start
        inside = (place >= 0) & (place < tile.weights.shape[-1])
        place = place.clamp(0, tile.weights.shape[-1] - 1)
        batch = torch.arange(len(place), device=place.device)
        on_first: Tensor = tile.weights[batch, :, :, place] * inside[:, None, None]
        return on_first


class SinkShare(RowMean):
    """The weight on a learned sink."""

    definition = Definition(
        name="sink",
        formula="mean over queries i of 1 − Σⱼ A[i, j], what the learned sink takes",
        unit="share of the weight, 0 to 1",
        excluded=EXCLUDED,
        source="the learned sink token of Xiao et al. 2023, arXiv:2309.17453, without a value",
        title="Weight on the learned sink",
        most="leaves {} of its weight to the learned sink",
    )
    needs = ("sink",)

    def of_rows(self, tile: WeightTile) -> Tensor:
        assert tile.sink is not None
        return tile.sink


class MostReceived(TileStatistic):
    """The keys that receive most from all queries together."""

    # A sum, not a mean over the queries that see the key: under a causal mask the last key is seen
    # by one query alone, and any weight of that one would be the largest mean.
    definition = Definition(
        name="most_received",
        formula="α[k] = Σᵢ A[i, k] over all queries i of the sequence; the 8 largest of all keys "
        "of all sequences. Fields: k, counted from the first key that is no padding; its token, "
        "−1 where it is not known; α[k]",
        unit="queries that give all of their weight, from 0 to the number of queries",
        excluded="padded queries and keys, and keys that no query may attend to; a key that few "
        "queries see receives at most 1 from each of them",
        source="accumulated attention of a key: Zhang et al. 2023, arXiv:2306.14048; over the "
        "number of queries that see it: Gu et al. 2024, arXiv:2410.10781, section 3",
        axes=("rank", "field"),
    )
    parts: ClassVar[Parts] = {
        "received": Part(axes=(RANKS,), values="weight"),
        "key": Part(axes=(RANKS,), values="integer"),
        "token": Part(axes=(RANKS,), values="integer"),
    }

    def start(self, call: CapturedCall) -> Tensor:
        """What each key receives."""
        batch, heads, _, keys = call.matrix.shape
        device = call.matrix.q.device
        return torch.zeros(batch, heads, keys, dtype=torch.float64, device=device)

    def update(self, gathered: Tensor, tile: WeightTile) -> None:
        gathered[tile.batches, tile.heads, tile.columns] += tile.by_cell[1].double().sum(2)

    def finish(self, gathered: Tensor, call: CapturedCall) -> Summary:
        """The largest sums of this call."""
        received = gathered.masked_fill(call.seen_by == 0, NOTHING)
        received = received.masked_fill(~call.real_keys[:, None], NOTHING)
        batch, heads, keys = received.shape
        index = torch.arange(keys, device=received.device) - call.first_key[:, None]
        token = torch.full_like(index, -1) if call.tokens is None else call.tokens
        return _largest(
            received.transpose(0, 1).reshape(heads, batch * keys).cpu(),
            index.reshape(1, -1).expand(heads, -1).cpu(),
            token.long().reshape(1, -1).expand(heads, -1).cpu(),
        )

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        """The largest of all, whatever the order."""
        together = [torch.cat([s[name] for s in summaries], 1) for name in summaries[0]]
        return _largest(*together)

    def result(self, summary: Summary) -> Tensor:
        """(heads, rank, field): key, token, what it receives; NaN where there are fewer keys."""
        return fields(summary["received"], summary["key"], summary["token"])


def _largest(received: Tensor, key: Tensor, token: Tensor) -> Summary:
    """The first by weight; of equal ones the earlier key, then the smaller token."""
    parts = {"received": received, "key": key, "token": token}
    for name, descending in (("token", False), ("key", False), ("received", True)):
        order = parts[name].argsort(dim=1, stable=True, descending=descending)
        parts = {name: part.gather(1, order) for name, part in parts.items()}
    short = max(0, RANKS - received.shape[1])
    nothing = {"received": NOTHING, "key": -1, "token": -1}
    return {
        name: torch.nn.functional.pad(part[:, :RANKS], (0, short), value=nothing[name])
        for name, part in parts.items()
    }


def fields(weight: Tensor, key: Tensor, token: Tensor) -> Tensor:
    """(..., rank, field) of key, token and weight; NaN where there is no such key."""
    found = torch.stack([key.double(), token.double(), weight], -1)
    return found.masked_fill((weight < 0)[..., None], torch.nan)
