"""The keys that one query looks at most, as an example to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headwise.scanning.captured_call import CapturedCall
from headwise.scanning.statistics.keys import NOTHING, RANKS, fields
from headwise.scanning.statistics.parts import COUNT, Part, Parts
from headwise.scanning.statistics.statistic import Definition, Summary, TileStatistic
from headwise.scanning.statistics.tile import WeightTile


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
