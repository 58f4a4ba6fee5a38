"""The keys that receive most: from all queries together, and from one query, to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headwise.scanning.captured_call import CapturedCall
from headwise.scanning.statistics.statistic import (
    COUNT,
    Definition,
    Part,
    Parts,
    Summary,
    TileStatistic,
)
from headwise.scanning.statistics.tile import WeightTile

RANKS = 8  # how many keys are kept
NOTHING = -1.0  # the weight of a rank that no key has


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


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """Which rows of which sequence, and what was found of them."""

    sequence: int
    rows: list[int | None]
    found: Summary


class TopKeys(TileStatistic):
    """The keys with the largest weight, of chosen queries of the first sequence.

    ``queries`` counts the queries that are no padding, from the end where it is negative.
    """

    definition = Definition(
        name="top_keys",
        formula="the 8 keys j with the largest A[i, j], for the last query i (or those chosen) of "
        "the first sequence that was scanned. Fields: j, counted from the first key that is no "
        "padding; its token, −1 where it is not known; A[i, j]",
        unit="share of the weight, 0 to 1",
        excluded="keys without weight; all sequences but the first: an example, no mean",
        source="headwise.AttentionMatrix.topk",
        axes=("query", "rank", "field"),
    )
    parts: ClassVar[Parts] = {
        "share": Part(axes=("queries", RANKS), values="weight"),
        "key": Part(axes=("queries", RANKS), values="integer"),
        "token": Part(axes=("queries", RANKS), values="integer"),
        "seen": COUNT,
    }

    def __init__(self, queries: int | tuple[int, ...] = (-1,)) -> None:
        self.queries = (queries,) if isinstance(queries, int) else tuple(queries)

    def start(self, call: CapturedCall) -> _Chosen:
        """Where the queries are; nothing found yet."""
        real = call.real_queries
        sequence = int(torch.nn.functional.pad(real.any(-1).int(), (0, 1)).argmax())
        some = bool(real.any())
        places = real[sequence].nonzero().squeeze(1).tolist() if some else []
        size = call.matrix.shape[1], len(self.queries), RANKS
        return _Chosen(
            sequence=sequence,
            rows=[
                places[query] if -len(places) <= query < len(places) else None
                for query in self.queries
            ],
            found={
                "share": torch.full(size, NOTHING, dtype=torch.float64),
                "key": torch.full(size, -1),
                "token": torch.full(size, -1),
                "seen": torch.full(size[:1], float(some), dtype=torch.float64),
            },
        )

    def update(self, gathered: _Chosen, tile: WeightTile) -> None:
        if not tile.batches.start <= gathered.sequence < tile.batches.stop:
            return
        for nth, row in enumerate(gathered.rows):
            if row is not None and tile.rows.start <= row < tile.rows.stop:
                _keep(gathered, tile, nth=nth, row=row)

    def finish(self, gathered: _Chosen, call: CapturedCall) -> Summary:  # noqa: ARG002
        """What was found, and whether there was a sequence."""
        return gathered.found

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        """Those of the first call that had a sequence."""
        chosen = next((s for s in summaries if s["seen"].any()), summaries[0])
        return {name: value.clone() for name, value in chosen.items()}

    def result(self, summary: Summary) -> Tensor:
        """(heads, query, rank, field): key, token, weight; NaN where there are fewer."""
        return fields(summary["share"], summary["key"], summary["token"])


def _keep(chosen: _Chosen, tile: WeightTile, *, nth: int, row: int) -> None:
    """Write the largest weights of one query; of equal ones the earlier key is first."""
    tokens, found = tile.call.tokens, chosen.found
    weights = tile.weights[chosen.sequence - tile.batches.start, :, row - tile.rows.start]
    share, place = weights.sort(dim=-1, descending=True, stable=True)
    share, place = share[:, :RANKS].cpu(), place[:, :RANKS].cpu() + tile.columns.start
    some, at = share > 0, (tile.heads, nth, slice(0, share.shape[1]))
    first = int(tile.call.first_key[chosen.sequence])
    found["share"][at] = share.double().masked_fill(~some, NOTHING)
    found["key"][at] = (place - first).masked_fill(~some, -1)
    if tokens is not None:
        token = tokens[chosen.sequence].long().cpu()[place]
        found["token"][at] = token.masked_fill(~some, -1)
