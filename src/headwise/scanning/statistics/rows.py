"""Statistics that are means over queries of a value of each row of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.scanning.call import require_not_none
from headwise.scanning.statistics.statistic import Definition, RowMean, WeightTile

EXCLUDED = "padded queries, and those that may attend to nothing"
SHARE = "share of the weight, 0 to 1"
WITHOUT_A_REPEAT = (
    "padded queries, those that may attend to nothing, special tokens where they are known, and "
    "queries whose token is not known or did not come before; an earlier one that the mask hides "
    "counts as 0"
)

OfRows = Callable[[WeightTile], Tensor]  # (batches, heads, rows) of a tile
KeyEntries = Callable[[WeightTile], Sequence[Tensor]]


class RowStatistic(RowMean):
    """The mean of ``of_rows`` over the queries of ``counts``, with the words of a `Definition`."""

    def __init__(
        self,
        of_rows: Callable[..., Tensor],
        *,
        counts: OfRows | None = None,
        needs: tuple[str, ...] = (),
        reach: int = 0,
        reads_lowest: bool = False,
        **words: Any,
    ) -> None:
        self._of_rows, self._counts = of_rows, counts
        name = words["id"].rpartition("-")[0]
        words = {"name": name, "unit": SHARE, "excluded": EXCLUDED} | words
        self.definition, self.needs = Definition(**words), needs
        self.reach, self.reads_lowest = reach, reads_lowest

    def of_rows(self, tile: WeightTile) -> Tensor:
        return self._of_rows(tile)

    def counted_rows(self, tile: WeightTile) -> Tensor:
        return tile.is_counted_query if self._counts is None else self._counts(tile)


def _only_sum(_: WeightTile, total: Tensor) -> Tensor:
    return total


class EntrySum(RowStatistic):
    """The mean over queries of the weight on keys, each times its entry.

    With several entries for each key, ``of_rows`` takes the tile and the sum with each.
    """

    def __init__(
        self, entries: KeyEntries, *, of_rows: Callable[..., Tensor] = _only_sum, **words: Any
    ) -> None:
        super().__init__(of_rows, **words)
        self._entries = entries

    def key_entries(self, tile: WeightTile) -> Sequence[Tensor]:
        return self._entries(tile)

    def of_rows(self, tile: WeightTile) -> Tensor:
        return self._of_rows(tile, *tile.sums_of_key_entries(self))


# ---- how widely a head attends ------------------------------------------------------------------


def _count_allowed_keys_and_sink(tile: WeightTile) -> Tensor:
    return tile.allowed if tile.sink is None else tile.allowed + 1


def _participation_ratio(tile: WeightTile) -> Tensor:
    if tile.sink is None:
        squares = torch.linalg.vector_norm(tile.weights, dim=-1).square()  # faster than a product
        return torch.where(squares > 0, 1 / squares, 0.0)
    # With a large sink the weights are tiny and their squares vanish, so they are rescaled first.
    largest = tile.maximum.where(tile.maximum > 0, 1.0)
    weights = tile.weights / largest[..., None]
    squares = torch.linalg.vecdot(weights, weights)
    return torch.where(squares > 0, weights.sum(-1) ** 2 / squares, 0.0)


SPREAD = (
    RowStatistic(
        lambda tile: tile.entropy,
        id="entropy-1",
        formula="mean over queries i of −Σⱼ A[i, j] · ln A[i, j]; a sink counts as one more key",
        unit="nats, from 0 (all weight on one key) to ln of the number of keys (even weight)",
        source="Clark et al. 2019, arXiv:1906.04341, section 3.3",
        title="Entropy",
        most="has the highest entropy: {}",
    ),
    RowStatistic(
        lambda tile: (
            tile.entropy
            / _count_allowed_keys_and_sink(tile).clamp(min=2).to(tile.entropy.dtype).log()
        ),
        id="relative_entropy-1",
        formula="mean over queries i of H[i] / ln n[i], for the n[i] keys that i may attend "
        "to; a sink counts as one of them",
        unit="share of the entropy of even weights, 0 to 1",
        excluded="padded queries, and those with one key or none, which have no choice",
        source="Zhai et al. 2023, arXiv:2303.06296, whose entropy is divided by its largest value",
        title="Relative entropy of the weights",
        most="has the most even weights: {} of the largest possible entropy",
        counts=lambda tile: tile.is_counted_query & (_count_allowed_keys_and_sink(tile) > 1),
    ),
    RowStatistic(
        lambda tile: tile.maximum,
        id="maximum-1",
        formula="mean over queries i of maxⱼ A[i, j]",
        source="confidence: Voita et al. 2019, arXiv:1905.09418, section 4 (which leaves out "
        "the end of sentence; here it counts)",
        title="Maximum weight",
        most="has the largest maximum weight: {} on average",
    ),
    RowStatistic(
        lambda tile: tile.entropy.exp(),
        id="effective_keys-1",
        formula="mean over queries i of exp(H[i])",
        unit="keys, from 1",
        source="the perplexity of the row: exp of the entropy, Clark et al. 2019, arXiv:1906.04341",
        title="Effective keys: tokens it attends to",
        most="attends most widely: to {}",
        least="attends most narrowly: to {}",
    ),
    RowStatistic(
        _participation_ratio,
        id="participation-1",
        formula="mean over queries i of (Σⱼ A[i, j])² / Σⱼ A[i, j]²",
        unit="keys, from 1",
        excluded=EXCLUDED + "; where a sink takes all of the weight, the row counts as 0",
        source="the inverse participation ratio: Bell and Dean 1970, doi:10.1039/DF9705000055",
        title="Participation: tokens it attends to, by squares",
        most="attends to most tokens, by squares: {}",
    ),
    RowStatistic(
        lambda tile: tile.logsumexp,
        id="logsumexp-1",
        formula="mean over queries i of ln Σⱼ exp s[i, j], the sink included",
        unit="nats",
        source="the normaliser of the softmax; kept by FlashAttention, arXiv:2205.14135",
        title="Logsumexp of the scores",
        most="has the largest logsumexp of scores: {}",
    ),
    # From a range of about 17 on, float32 rounds the smallest weights to 0.
    RowStatistic(
        lambda tile: tile.highest - require_not_none(tile.lowest),
        id="score_range-1",
        formula="mean over queries i of maxⱼ s[i, j] − minⱼ s[i, j], over the keys i may attend to",
        unit="nats",
        excluded="padded queries, and those with one key or none",
        source="saturation of the softmax: Zhai et al. 2023, arXiv:2303.06296 (bounds by the "
        "spectral norm of the scores)",
        title="Range of the scores",
        most="has the widest range of scores: {}",
        counts=lambda tile: tile.is_counted_query & (tile.allowed > 1),
        reads_lowest=True,
    ),
)


# ---- where it attends: the first key, a sink, near keys ------------------------------------------


def _entry_of_first_token(tile: WeightTile) -> tuple[Tensor]:
    first = tile.call.first_real_key[tile.batches, None]
    return (((tile.keys == first) & (tile.call.dropped == 0))[:, None],)


def _entries_of_distance(tile: WeightTile) -> list[Tensor]:
    """Return the distance to the first query and True before it; the same behind the last one."""
    first, stop = tile.key_range_of_queries
    entries = [(first - tile.keys).clamp(min=0), tile.keys < first]
    if tile.columns.stop > stop:
        entries += [(tile.keys - (stop - 1)).clamp(min=0), tile.keys >= stop]
    return entries


def _mean_key_distance(tile: WeightTile, *sums: Tensor) -> Tensor:
    # All terms of the sums are at least 0, so nothing cancels at any length.
    first, stop = tile.key_range_of_queries
    queries, columns = tile.key_positions_of_queries, tile.columns.stop - tile.columns.start
    near = slice(*(min(max(x - tile.columns.start, 0), columns) for x in (first, stop)))
    apart = (queries[:, None] - tile.keys[near]).abs_().to(tile.weights.dtype)
    total = (tile.weights[..., near] * apart).sum(-1)
    # Keys on one side of all queries: the distance to the edge, plus the distance from there.
    for to_edge, beyond, edge in zip(sums[::2], sums[1::2], (first, stop - 1), strict=False):
        total += to_edge + beyond * (queries - edge).abs_()
    return total


def _share_within_reach_statistic(reach: int) -> RowStatistic:
    return RowStatistic(
        lambda tile: tile.weight_within(reach),
        id=f"within_{reach}-1",
        formula=f"mean over queries i of Σⱼ A[i, j] over the keys with |i − j| ≤ {reach}",
        source="local heads; the windows are those of sliding attention, Beltagy et al. 2020, "
        "arXiv:2004.05150",
        title=f"Weight at most {reach} tokens away",
        most=f"keeps {{}} of its weight within {reach} tokens",
        needs=("own_key",),
        reach=reach,
    )


ONE_KEY = (
    EntrySum(
        _entry_of_first_token,
        id="first_token-1",
        formula="mean over queries i of A[i, 0], key 0 being the first that is no padding",
        excluded=EXCLUDED + "; the first query counts, though a causal mask leaves it no choice",
        source="the sink mass of key 0: Gu et al. 2024, arXiv:2410.10781; Xiao et al. 2023, "
        "arXiv:2309.17453",
        title="Weight on the first token",
        most="puts {} of its weight on the first token",
    ),
    RowStatistic(
        lambda tile: require_not_none(tile.sink),
        id="sink-1",
        formula="mean over queries i of 1 − Σⱼ A[i, j], what the learned sink takes",
        source="the learned sink token of Xiao et al. 2023, arXiv:2309.17453, without a value",
        title="Weight on the learned sink",
        most="leaves {} of its weight to the learned sink",
        short_title="learned sink",
        needs=("sink",),
    ),
)
PREVIOUS_TOKEN = RowStatistic(
    lambda tile: tile.diagonal(-1),
    id="previous_token-1",
    formula="mean over queries i ≥ 1 of A[i, i − 1]",
    excluded="padded queries, and the first of each sequence, which has no key before it",
    source="Clark et al. 2019, arXiv:1906.04341, section 3.1; Olsson et al. 2022, arXiv:2209.11895",
    title="Weight on the token before",
    most="puts {} of its weight on the token before",
    counts=lambda tile: (
        tile.is_counted_query
        & (tile.key_positions_of_queries > tile.call.first_real_key[tile.batches, None])[:, None]
    ),
    needs=("own_key",),
    reach=1,
)
NEAR = (
    EntrySum(
        _entries_of_distance,
        of_rows=_mean_key_distance,
        id="distance-1",
        formula="mean over queries i of Σⱼ A[i, j] · |i − j|; a sink is nowhere and adds nothing",
        unit="tokens, from 0",
        source="Vig and Belinkov 2019, arXiv:1906.04284, section 4.2",
        title="Mean distance of the weight",
        most="attends furthest: {} away on average",
        needs=("own_key",),
    ),
    _share_within_reach_statistic(16),
    _share_within_reach_statistic(64),
    _share_within_reach_statistic(256),
)


# ---- which tokens it attends to -----------------------------------------------------------------


def _weight_after_repeats(tile: WeightTile, after: int) -> Tensor:
    """Return the weight on keys ``after`` positions behind an earlier key with the token."""
    batch, row, key = tile.indices_of_earlier_repeats
    batches, heads, rows, columns = tile.weights.shape
    column = key + after - tile.columns.start
    # None is behind its query, so most tiles hold them all.
    if tile.columns.start or tile.columns.stop < tile.key_range_of_queries[1]:
        inside = (column >= 0) & (column < columns)
        batch, row, column = batch[inside], row[inside], column[inside]
    total = torch.zeros(batches * rows, heads, dtype=torch.float64, device=row.device)
    total.index_add_(0, batch * rows + row, tile.weights[batch, :, row, column].double())
    return total.view(batches, rows, heads).transpose(1, 2)


def _queries_with_repeated_token(tile: WeightTile) -> Tensor:
    repeated = tile.call.repeated_tokens.earlier[tile.batches][:, tile.key_positions_of_queries] > 0
    if tile.call.specials is not None:
        repeated = repeated & ~tile.call.specials[tile.batches][:, tile.key_positions_of_queries]
    return tile.is_counted_query & repeated[:, None]


REPEATED = (
    RowStatistic(
        lambda tile: _weight_after_repeats(tile, 0),
        id="duplicate_token-1",
        formula="mean over queries i of Σⱼ A[i, j] over the keys j < i with token[j] = token[i]",
        excluded=WITHOUT_A_REPEAT,
        source="duplicate token heads: Wang et al. 2022, arXiv:2211.00593, section 3",
        title="Weight on earlier copies of the token",
        most="puts {} of its weight on earlier copies of the token",
        counts=_queries_with_repeated_token,
        needs=("own_key", "tokens"),
    ),
    RowStatistic(
        lambda tile: _weight_after_repeats(tile, 1),
        id="induction-1",
        formula="mean over queries i of Σⱼ A[i, j] over the keys j ≤ i with token[j − 1] = "
        "token[i] and j − 1 < i",
        excluded=WITHOUT_A_REPEAT,
        source="prefix matching: Olsson et al. 2022, arXiv:2209.11895, on any text in place of "
        "random tokens that are repeated",
        title="Induction: weight on what followed earlier copies",
        most="puts {} of its weight on what followed earlier copies of the token (induction)",
        counts=_queries_with_repeated_token,
        needs=("own_key", "tokens"),
    ),
)
MARKED = (
    EntrySum(
        lambda tile: (tile.cut_to_tile(require_not_none(tile.call.separators)),),
        id="separator-1",
        formula="mean over queries i of Σⱼ A[i, j] over the keys j that hold a separator",
        excluded=EXCLUDED + "; separators count as queries too",
        source="Clark et al. 2019, arXiv:1906.04341, section 3.2",
        title="Weight on separators",
        most="puts {} of its weight on separators",
        needs=("separators",),
    ),
    EntrySum(
        lambda tile: (tile.cut_to_tile(require_not_none(tile.call.specials)),),
        id="special-1",
        formula="mean over queries i of Σⱼ A[i, j] over the keys j that hold a special token",
        excluded=EXCLUDED + "; special tokens count as queries too",
        source="Kovaleva et al. 2019, arXiv:1908.08593; Clark et al. 2019, arXiv:1906.04341, "
        "section 3.2",
        title="Weight on special tokens",
        most="puts {} of its weight on special tokens",
        needs=("specials",),
    ),
)
