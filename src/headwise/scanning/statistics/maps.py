"""Statistics for the views of one head: weights by offset, a map, the largest weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.call import CELLS, CapturedCall
from headwise.scanning.statistics.rows import EXCLUDED, SHARE
from headwise.scanning.statistics.statistic import (
    COUNT,
    Definition,
    Parts,
    Summary,
    SummaryPart,
    TileStatistic,
    parts_of_mean,
)
from headwise.scanning.statistics.tile import WeightTile
from headwise.support.text import describe_value

RANKS = 8  # keys in a list of the largest weights
MAP_SIZES = tuple(2**power for power in range(11))  # numbers of cells that a map may have
NOTHING = -1.0  # the weight of a rank without a key


class OffsetProfile(TileStatistic):
    """The weight at each offset from the query's position."""

    OFFSETS = 16
    definition = Definition(
        name="offset_profile",
        id="offset_profile-1",
        formula="for each offset o from −16 to +16: mean over queries i of A[i, i + o]",
        unit=SHARE,
        excluded="padded queries, and those for which no key stands at the offset",
        source="diagonals: Kovaleva et al. 2019, arXiv:1908.08593; positional heads: Voita et al. "
        "2019, arXiv:1905.09418",
        axes=("offset",),
    )
    needs = ("own_key",)
    reach = OFFSETS
    parts = parts_of_mean(2 * OFFSETS + 1)

    def update(self, gathered: Summary, tile: WeightTile) -> None:
        offsets = torch.arange(-self.OFFSETS, self.OFFSETS + 1, device=tile.weights.device)
        key = tile.key_positions_of_queries[:, None] + offsets
        real = tile.call.real_keys[tile.batches]
        exists = (key >= 0) & (key < real.shape[1])
        exists = real[:, key.clamp(0, real.shape[1] - 1)] & exists
        counted = tile.is_counted_query[..., None] & exists[:, None]
        weights = tile.band(self.OFFSETS).double().masked_fill(~counted, 0.0)
        gathered["sum"][tile.heads] += weights.sum((0, 2))
        gathered["count"][tile.heads] += counted.sum((0, 2))


class Map(TileStatistic):
    """The weight from each block of queries to each block of keys.

    ``cells`` is the number of blocks on each side: a power of two up to 1,024.
    """

    definition = Definition(
        name="map",
        id="map-1",
        formula="cell (a, b): mean over the queries of block a of Σⱼ A[i, j] over the keys of "
        "block b; the i-th of n real tokens is in block ⌊c i / n⌋ of c: 64 blocks if no other "
        "number was chosen",
        unit="share of the weight, 0 to 1; a row of cells sums to 1, less a sink's share",
        excluded=EXCLUDED + "; blocks that no query is in have no value. A sequence shorter than "
        "the map leaves gaps: a coarser one (pyramid) has none",
        source="headwise.AttentionMatrix.pool",
        axes=("query_block", "key_block"),
    )
    parts: ClassVar[Parts] = {
        "sum": SummaryPart(axes=("cells", "cells")),
        "count": SummaryPart(axes=("cells",), values="count"),
    }

    def __init__(self, cells: int = CELLS) -> None:
        if not isinstance(cells, int) or cells not in MAP_SIZES:
            raise OptionError(
                saw=f"Map(cells={describe_value(cells)})",
                needed=f"a power of two from 1 to {MAP_SIZES[-1]:,}",
                do="Map(cells=128)",
            )
        self.cells = cells

    def start(self, call: CapturedCall) -> Summary:
        """Return a sum for each cell, and a number of queries for each block of queries."""
        heads, device = call.matrix.shape[1], call.matrix.q.device
        sizes = {"sum": (heads, self.cells, self.cells), "count": (heads, self.cells)}
        return {
            name: torch.zeros(size, dtype=torch.float64, device=device)
            for name, size in sizes.items()
        }

    def update(self, gathered: Summary, tile: WeightTile) -> None:
        """Add the weights of the tile to the cells."""
        blocks, weights = tile.weight_by_query_block
        key_cells = tile.call.key_map_block_one_hot[tile.batches, tile.columns].to(weights.dtype)
        weights = torch.matmul(weights, key_cells[:, None])
        gathered["sum"][tile.heads, blocks] += weights.double().sum(0)
        cells = tile.call.query_map_block[tile.batches, tile.rows]
        inside = torch.arange(blocks.start, blocks.stop, device=cells.device)
        member = (cells[..., None] == inside).to(weights.dtype)
        counted = torch.matmul(tile.is_counted_query.to(member.dtype), member)
        gathered["count"][tile.heads, blocks] += counted.double().sum(0)

    def reason_not_mergeable(self, summary: Summary, other: Summary) -> str | None:
        """Return a difference in the number of cells."""
        here, there = summary["count"].shape[-1], other["count"].shape[-1]
        return None if here == there else f"a map of {here} cells, and one of {there}"

    def result(self, summary: Summary) -> Tensor:
        """(heads, query_block, key_block)."""
        return summary["sum"] / summary["count"][..., None]


def map_pyramid(summary: Summary) -> dict[int, Tensor]:
    """Return the map at every size: 64 x 64, 32 x 32, ..., 1 x 1, as (heads, size, size).

    Every size is exact, since a coarser block consists of two whole blocks.
    """
    total, count = summary["sum"], summary["count"]
    maps = {}
    while True:
        size = total.shape[-1]
        maps[size] = total / count[..., None]
        if size % 2:
            return maps
        total = total.unflatten(1, (size // 2, 2)).unflatten(3, (size // 2, 2)).sum((2, 4))
        count = count.unflatten(1, (size // 2, 2)).sum(2)


# ---- the keys with the largest weights ----------------------------------------------------------


class MostReceived(TileStatistic):
    """The keys that receive most weight from all queries together."""

    # A sum, since a mean over the queries that see a key favours the last keys: under a causal
    # mask, only one query sees the last key.
    definition = Definition(
        name="most_received",
        id="most_received-1",
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
        "received": SummaryPart(axes=(RANKS,), values="weight"),
        "key": SummaryPart(axes=(RANKS,), values="integer"),
        "token": SummaryPart(axes=(RANKS,), values="integer"),
    }

    def start(self, call: CapturedCall) -> Tensor:
        """Return a tensor for the weight that each key receives."""
        batch, heads, _, keys = call.matrix.shape
        device = call.matrix.q.device
        return torch.zeros(batch, heads, keys, dtype=torch.float64, device=device)

    def update(self, gathered: Tensor, tile: WeightTile) -> None:
        gathered[tile.batches, tile.heads, tile.columns] += (
            tile.weight_by_query_block[1].double().sum(2)
        )

    def make_summary(self, gathered: Tensor, call: CapturedCall) -> Summary:
        """Return the largest sums of this call."""
        received = gathered.masked_fill(call.seen_by == 0, NOTHING)
        received = received.masked_fill(~call.real_keys[:, None], NOTHING)
        batch, heads, keys = received.shape
        index = torch.arange(keys, device=received.device) - call.first_real_key[:, None]
        token = torch.full_like(index, -1) if call.tokens is None else call.tokens
        return _keep_largest_keys(
            received.transpose(0, 1).reshape(heads, batch * keys).cpu(),
            index.reshape(1, -1).expand(heads, -1).cpu(),
            token.long().reshape(1, -1).expand(heads, -1).cpu(),
        )

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        """Return the largest sums of all calls, in any order."""
        together = [torch.cat([s[name] for s in summaries], 1) for name in summaries[0]]
        return _keep_largest_keys(*together)

    def result(self, summary: Summary) -> Tensor:
        """Return (heads, rank, field): key, token, received weight; NaN beyond the last key."""
        return stack_key_token_weight(summary["received"], summary["key"], summary["token"])


def _keep_largest_keys(received: Tensor, key: Tensor, token: Tensor) -> Summary:
    """Return the keys with the largest weights; ties by the earlier key, then the smaller token."""
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


def stack_key_token_weight(weight: Tensor, key: Tensor, token: Tensor) -> Tensor:
    """Return (..., rank, field) with key, token and weight; NaN where there is no key."""
    stacked = torch.stack([key.double(), token.double(), weight], -1)
    return stacked.masked_fill((weight < 0)[..., None], torch.nan)


@dataclass(frozen=True, kw_only=True)
class _ChosenQueries:
    """The chosen queries of a sequence, and their largest weights so far."""

    sequence: int
    rows: list[int | None]
    largest: Summary


class TopKeysOfChosenQueries(TileStatistic):
    """The keys with the largest weight, of chosen queries of the first sequence.

    ``queries`` counts the queries that are no padding, from the end where it is negative.
    """

    definition = Definition(
        name="top_keys",
        id="top_keys-1",
        formula="the 8 keys j with the largest A[i, j], for the last query i (or those chosen) of "
        "the first sequence that was scanned. Fields: j, counted from the first key that is no "
        "padding; its token, −1 where it is not known; A[i, j]",
        unit="share of the weight, 0 to 1",
        excluded="keys without weight; all sequences but the first: an example, no mean",
        source="headwise.AttentionMatrix.topk",
        axes=("query", "rank", "field"),
    )
    parts: ClassVar[Parts] = {
        "share": SummaryPart(axes=("queries", RANKS), values="weight"),
        "key": SummaryPart(axes=("queries", RANKS), values="integer"),
        "token": SummaryPart(axes=("queries", RANKS), values="integer"),
        "seen": COUNT,
    }

    def __init__(self, queries: int | tuple[int, ...] = (-1,)) -> None:
        self.queries = (queries,) if isinstance(queries, int) else tuple(queries)

    def start(self, call: CapturedCall) -> _ChosenQueries:
        """Return the rows of the chosen queries, and tensors for their largest weights."""
        real = call.real_queries
        sequence = int(torch.nn.functional.pad(real.any(-1).int(), (0, 1)).argmax())
        some = bool(real.any())
        real_rows = real[sequence].nonzero().squeeze(1).tolist() if some else []
        size = call.matrix.shape[1], len(self.queries), RANKS
        return _ChosenQueries(
            sequence=sequence,
            rows=[
                real_rows[query] if -len(real_rows) <= query < len(real_rows) else None
                for query in self.queries
            ],
            largest={
                "share": torch.full(size, NOTHING, dtype=torch.float64),
                "key": torch.full(size, -1),
                "token": torch.full(size, -1),
                "seen": torch.full(size[:1], float(some), dtype=torch.float64),
            },
        )

    def update(self, gathered: _ChosenQueries, tile: WeightTile) -> None:
        if not tile.batches.start <= gathered.sequence < tile.batches.stop:
            return
        for nth, row in enumerate(gathered.rows):
            if row is not None and tile.rows.start <= row < tile.rows.stop:
                _store_top_keys_of_query(gathered, tile, nth=nth, row=row)

    def make_summary(self, gathered: _ChosenQueries, call: CapturedCall) -> Summary:  # noqa: ARG002
        """Return the largest weights, with ``seen`` 1 if there was a sequence."""
        return gathered.largest

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        """Return the summary of the first call with a sequence."""
        chosen = next((s for s in summaries if s["seen"].any()), summaries[0])
        return {name: value.clone() for name, value in chosen.items()}

    def result(self, summary: Summary) -> Tensor:
        """Return (heads, query, rank, field): key, token, weight; NaN beyond the last key."""
        return stack_key_token_weight(summary["share"], summary["key"], summary["token"])


def _store_top_keys_of_query(
    chosen: _ChosenQueries, tile: WeightTile, *, nth: int, row: int
) -> None:
    """Store the largest weights of one query; of equal weights the earlier key comes first."""
    tokens, largest = tile.call.tokens, chosen.largest
    weights = tile.weights[chosen.sequence - tile.batches.start, :, row - tile.rows.start]
    share, key = weights.sort(dim=-1, descending=True, stable=True)
    share, key = share[:, :RANKS].cpu(), key[:, :RANKS].cpu() + tile.columns.start
    some, at = share > 0, (tile.heads, nth, slice(0, share.shape[1]))
    first = int(tile.call.first_real_key[chosen.sequence])
    largest["share"][at] = share.double().masked_fill(~some, NOTHING)
    largest["key"][at] = (key - first).masked_fill(~some, -1)
    if tokens is not None:
        token = tokens[chosen.sequence].long().cpu()[key]
        largest["token"][at] = token.masked_fill(~some, -1)
