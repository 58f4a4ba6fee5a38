"""The keys with the largest weights, for every query of chosen heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.call import CapturedCall
from headwise.scanning.statistics.rows import EXCLUDED
from headwise.scanning.statistics.statistic import (
    Definition,
    Parts,
    Summary,
    SummaryPart,
    TileStatistic,
)
from headwise.scanning.statistics.tile import WeightTile
from headwise.support.text import describe_value

Layer = int | str
MOST_RANKS = 64
NOTHING = -1  # the key and the share of a rank without a key


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The largest weights of every query of the chosen heads, so far."""

    heads: list[int]  # positions of the chosen heads
    place: Tensor  # (batch, queries): where a query is stored, −1 for padding
    key: Tensor
    share: Tensor


class TopKeysOfEveryQuery(TileStatistic):
    """The keys with the largest weights, for every query of chosen heads, over all sequences.

    Only the chosen heads take memory: 8 bytes for each query and rank.

    Args:
        heads: "all", or pairs of a layer and a head, such as ``[(1, 0), ("*.3.*", 7)]``. A layer
            is its number in call order, or a pattern of its name.
        ranks: number of keys for each query.
    """

    definition = Definition(
        name="top_keys_of_every_query",
        id="top_keys_of_every_query-1",
        formula="for every query i of a chosen head: the keys j with the largest A[i, j], 4 if no "
        "other number was chosen. Fields: j, counted from the first key that is no padding of "
        "its sequence; A[i, j]",
        unit="share of the weight, 0 to 1",
        excluded=EXCLUDED + "; keys without weight; heads that were not chosen",
        source="headwise.AttentionMatrix.topk",
        axes=("query", "rank", "field"),
    )
    parts: ClassVar[Parts] = {
        "row": SummaryPart(values="integer"),
        "lengths": SummaryPart(axes=("sequences",), values="integer", per_head=False),
        "key": SummaryPart(axes=("chosen", "queries", "ranks"), values="index", per_head=False),
        "share": SummaryPart(axes=("chosen", "queries", "ranks"), values="share", per_head=False),
    }

    def __init__(
        self, heads: Literal["all"] | Iterable[tuple[Layer, int]] = "all", *, ranks: int = 4
    ) -> None:
        if not isinstance(ranks, int) or not 0 < ranks <= MOST_RANKS:
            raise OptionError(
                saw=f"ranks={describe_value(ranks)}",
                needed=f"a number of keys for each query, from 1 to {MOST_RANKS}",
                do="ranks=4",
            )
        self.heads = heads if isinstance(heads, str) else tuple(heads)
        self.ranks = ranks
        if isinstance(self.heads, str):
            _require_head_choice(self.heads == "all", heads)
        else:
            _require_head_choice(
                all(_is_layer_head_pair(pair) for pair in self.heads) and bool(self.heads), heads
            )

    def reason_not_computable(self, call: CapturedCall) -> str | None:
        """Return why a call has no such rows: no head was chosen, or it continues a cache."""
        if call.own_key not in (0, None):
            return "the call continues a cache, so its queries are no whole sequences"
        return (
            None
            if self._chosen_head_positions(call)
            else "none of the chosen heads is in this layer"
        )

    def _chosen_head_positions(self, call: CapturedCall) -> list[int]:
        numbers = call.heads or tuple(range(call.matrix.shape[1]))
        if isinstance(self.heads, str):
            return list(range(len(numbers)))
        chosen = {
            head
            for layer, head in self.heads
            if (
                layer == call.layer_index
                if isinstance(layer, int)
                else fnmatchcase(call.layer, layer)
            )
        }
        return [position for position, number in enumerate(numbers) if number in chosen]

    def start(self, call: CapturedCall) -> _Rows:
        """Return room for every real query of the chosen heads."""
        real = call.real_queries
        heads, device = self._chosen_head_positions(call), real.device
        row = (real.flatten().cumsum(0) - 1).masked_fill(~real.flatten(), -1)
        size = len(heads), int(real.sum()), self.ranks
        return _Rows(
            heads=heads,
            place=row.unflatten(0, real.shape),
            key=torch.full(size, NOTHING, dtype=torch.int32, device=device),
            share=torch.full(size, float(NOTHING), dtype=torch.float32, device=device),
        )

    def update(self, gathered: _Rows, tile: WeightTile) -> None:
        """Store the largest weights of the tile's rows; a tile holds whole rows."""
        inside = range(tile.heads.start, tile.heads.stop)
        first = tile.call.first_real_key[tile.batches]
        for nth, head in enumerate(gathered.heads):
            if head not in inside:
                continue
            weights = tile.weights[:, head - tile.heads.start]
            share, key = weights.topk(min(self.ranks, weights.shape[-1]), dim=-1)
            key = key + (tile.columns.start - first)[:, None, None]
            row = gathered.place[tile.batches, tile.rows]
            counted = tile.is_counted_query[:, head - tile.heads.start] & (row >= 0)
            none = (share <= 0)[counted]
            at = nth, row[counted], slice(0, share.shape[-1])
            gathered.share[at] = share[counted].float().masked_fill(none, NOTHING)
            gathered.key[at] = key[counted].int().masked_fill(none, NOTHING)

    def make_summary(self, gathered: _Rows, call: CapturedCall) -> Summary:
        """Return each head's row of keys and shares (−1 if it was not chosen), and the lengths."""
        row = torch.full((call.matrix.shape[1],), NOTHING)
        row[gathered.heads] = torch.arange(len(gathered.heads))
        return {
            "row": row,
            "lengths": call.real_queries.sum(-1).cpu(),
            "key": gathered.key.cpu(),
            "share": gathered.share.cpu(),
        }

    def reason_not_mergeable(self, summary: Summary, other: Summary) -> str | None:
        """Return a difference in the chosen heads, or in the number of ranks."""
        if not torch.equal(summary["row"], other["row"]):
            return "the top keys of some heads, and of others"
        ranks, other_ranks = (each["key"].shape[-1] for each in (summary, other))
        return None if ranks == other_ranks else f"{ranks} top keys a query, and {other_ranks}"

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        """Return the queries of all calls, one sequence after another."""
        return {
            "row": summaries[0]["row"].clone(),
            "lengths": torch.cat([summary["lengths"] for summary in summaries]),
            "key": torch.cat([summary["key"] for summary in summaries], 1),
            "share": torch.cat([summary["share"] for summary in summaries], 1),
        }

    def result(self, summary: Summary) -> Tensor:
        """Return (heads, query, rank, field): key, weight; NaN for other heads and beyond keys.

        This takes 16 bytes for each head, query and rank, of the heads that were not chosen too.
        """
        stacked = torch.stack([summary["key"].double(), summary["share"].double()], -1)
        stacked = stacked.masked_fill((summary["share"] < 0)[..., None], torch.nan)
        row = summary["row"]
        whole = stacked.new_full((len(row), *stacked.shape[1:]), torch.nan)
        whole[row >= 0] = stacked[row[row >= 0]]
        return whole


def _is_layer_head_pair(pair: object) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and isinstance(pair[0], int | str)
        and isinstance(pair[1], int)
    )


def _require_head_choice(is_right: bool, heads: object) -> None:
    if not is_right:
        raise OptionError(
            saw=f"heads={describe_value(heads)}",
            needed='"all", or pairs of a layer and a head',
            do='heads=[(1, 0), ("*.3.*", 7)]',
        )
