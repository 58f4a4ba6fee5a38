"""Statistics for the views of one head: weights by offset, a map, the largest weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise.errors import OptionError
from headwise.matrix.kernels.kernel import accumulation_dtype
from headwise.scanning.call import CapturedCall
from headwise.scanning.statistics import statistic
from headwise.scanning.statistics.rows import EXCLUDED, SHARE
from headwise.scanning.statistics.statistic import COUNT, Definition, Parts, Summary, WeightTile
from headwise.support.text import describe_value

RANKS = 8  # keys in a list of the largest weights
SINGLE_TOKENS = 512  # tokens of a text up to which a block of a map is one token
BLOCKS = 160  # most blocks of a longer text, on each side of a map
MOST_BLOCKS = 1024  # of a map on each side
MOST_CELLS = 38_000_000  # of the maps of all heads on a page: 144 heads with 512 tokens
NOTHING = -1  # the key, the token and the weight of a rank without a key
MOST_RANKS = 64
Layer = int | str


class OffsetProfile(statistic.TileStatistic):
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
    parts = statistic.parts_of_mean(2 * OFFSETS + 1)

    def start(self, call: CapturedCall) -> tuple[Summary, Tensor]:
        """Return the accumulators, and (batch, keys, offset) True where a key is at the offset."""
        around = pad(call.real_keys, (self.OFFSETS, self.OFFSETS))
        return super().start(call), around.unfold(1, 2 * self.OFFSETS + 1, 1)

    def update(self, gathered: tuple[Summary, Tensor], tile: WeightTile) -> None:
        sums, exists = gathered
        exists = exists[tile.batches, None, slice(*tile.key_range_of_queries)]
        counted = tile.is_counted_query[..., None] & exists
        weights = tile.band(self.OFFSETS).double().masked_fill(~counted, 0.0)
        sums["sum"][tile.heads] += weights.sum((0, 2))
        sums["count"][tile.heads] += counted.sum((0, 2))

    def make_summary(self, gathered: tuple[Summary, Tensor], call: CapturedCall) -> Summary:
        return super().make_summary(gathered[0], call)


def most_blocks(length: int) -> int:
    """Return the most blocks of a text on each side of a map, if no other number was chosen."""
    return SINGLE_TOKENS if length <= SINGLE_TOKENS else BLOCKS


def block_size(length: int, cells: int = 0) -> int:
    """Return the tokens of a block, if a text of this length is to have at most ``cells`` blocks.

    It is a power of two, so that maps of texts of several lengths merge exactly. With ``cells`` 0
    the text has at most `most_blocks`.
    """
    most = cells or most_blocks(length)
    return 1 << (max(1, -(-length // most)) - 1).bit_length()


class _TokenBlocks:
    """The queries or the keys of a call, in blocks of equal numbers of tokens.

    Attributes:
        position: (batch, tokens), the number of each token in its sequence, −1 for padding.
        length: the tokens of the longest sequence, up to the last that is here.
        size: the tokens of a block.
        blocks: the number of blocks from the first token to the last.
    """

    def __init__(self, position: Tensor, *, cells: int) -> None:
        self.position = position
        self.length = int(position.max()) + 1 if position.numel() else 0
        self.size = block_size(self.length, cells)
        self.blocks = -(-self.length // self.size)
        self._has_padding = (position < 0).any(-1).tolist()

    def sum_blocks(self, x: Tensor, sequence: int, piece: slice) -> tuple[slice, Tensor]:
        """Return the blocks of a piece of the tokens, and the sums of ``x`` over each.

        ``x`` is (heads, piece, others), and the result (heads, blocks, others).
        """
        position = self.position[sequence, piece]
        if self._has_padding[sequence]:
            real = (position >= 0).nonzero().squeeze(1)
            x, position = x.index_select(1, real), position[real]
        if not len(position):
            return slice(0, 0), x
        first = int(position[0])  # the others follow one by one
        stop = first + len(position)
        blocks = slice(first // self.size, -(-stop // self.size))
        if self.size == 1:
            return blocks, x
        ragged = first - blocks.start * self.size, blocks.stop * self.size - stop
        x = pad(x, (0, 0, *ragged)) if any(ragged) else x
        return blocks, x.unflatten(1, (-1, self.size)).sum(2)


class _Cells(NamedTuple):
    total: Tensor  # (heads, blocks of queries, blocks of keys)
    counted: Tensor  # (heads, blocks of queries)
    queries: _TokenBlocks
    keys: _TokenBlocks


class Map(statistic.TileStatistic):
    """The weight from each block of queries to each block of keys.

    A text of up to 512 tokens has a block for each token, a longer one at most 160 blocks: of 4, 8
    or more tokens, the least power of two that suffices. The last block may be shorter. Texts
    of several lengths are merged by position, in blocks of the longest.

    ``cells`` is another number of blocks that each side may have at most, up to 1,024.
    """

    definition = Definition(
        name="map",
        id="map-2",
        formula="cell (a, b): mean over the queries i of block a of Σⱼ A[i, j] over the keys j of "
        "block b; block ⌊i / s⌋ holds the i-th real token of its sequence, s = 2ᵏ tokens a block: "
        "the least with which the longest text has at most 512 blocks of one token, or 160 of "
        "several, if no other number was chosen",
        unit="share of the weight, 0 to 1; a row of cells sums to 1, less a sink's share",
        excluded=EXCLUDED + "; blocks that no query is in have no value",
        source="headwise.AttentionMatrix.pool",
        axes=("query_block", "key_block"),
    )
    parts: ClassVar[Parts] = {
        "sum": statistic.SummaryPart(axes=("query_blocks", "key_blocks"), values="share"),
        "count": statistic.SummaryPart(axes=("query_blocks",), values="count"),
        "length": statistic.SummaryPart(axes=(2,), values="integer", per_head=False),
        "cells": statistic.SummaryPart(values="integer", per_head=False),
    }

    def __init__(self, cells: int | None = None) -> None:
        if cells is not None and not (type(cells) is int and 0 < cells <= MOST_BLOCKS):
            saw = f"Map(cells={describe_value(cells)})"
            needed = f"the most blocks on each side, from 1 to {MOST_BLOCKS:,}"
            raise OptionError(saw=saw, needed=needed, do="Map(cells=128)")
        self.cells = cells or 0

    def start(self, call: CapturedCall) -> _Cells:
        """Return a sum for each cell, and a number of queries for each block of queries."""
        queries = _TokenBlocks(call.query_positions, cells=self.cells)
        keys = _TokenBlocks(call.key_positions, cells=self.cells)
        zeros, heads = call.matrix.q.new_zeros, call.matrix.shape[1]
        exact = accumulation_dtype(call.matrix.q.dtype)
        total = zeros(heads, queries.blocks, keys.blocks, dtype=exact)
        return _Cells(total, zeros(heads, queries.blocks, dtype=torch.float64), queries, keys)

    def update(self, gathered: _Cells, tile: WeightTile) -> None:
        """Add the weights of the tile to the cells."""
        total, counted, queries, keys = gathered
        is_counted = tile.is_counted_query[..., None].double()
        for nth, sequence in enumerate(range(tile.batches.start, tile.batches.stop)):
            rows, weights = queries.sum_blocks(tile.weights[nth], sequence, tile.rows)
            columns, weights = keys.sum_blocks(weights.mT, sequence, tile.columns)
            total[tile.heads, rows, columns] += weights.mT
            _, count = queries.sum_blocks(is_counted[nth], sequence, tile.rows)
            counted[tile.heads, rows] += count[..., 0]

    def make_summary(self, gathered: _Cells, call: CapturedCall) -> Summary:  # noqa: ARG002
        """Return the sums in float32, the queries, and the tokens of the longest sequence."""
        length = torch.tensor([gathered.queries.length, gathered.keys.length])
        numbers = {"length": length, "cells": torch.tensor(self.cells)}
        return {"sum": gathered.total.float().cpu(), "count": gathered.counted.cpu(), **numbers}

    def reason_not_mergeable(self, summary: Summary, other: Summary) -> str | None:
        """Return a difference in the chosen number of cells."""
        here, there = (int(each["cells"]) or "the text's" for each in (summary, other))
        return None if here == there else f"a map of {here} cells, and one of {there}"

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        """Return the sums over all calls, in blocks of the longest text."""
        if len(summaries) == 1:
            return dict(summaries[0])
        length = torch.stack([each["length"] for each in summaries]).amax(0)
        sizes = [max(pair) for pair in zip(*map(block_sizes, summaries), strict=True)]
        pooled = [coarsen_map(each, sizes) for each in summaries]
        rows, columns = (max(x["sum"].shape[axis] for x in pooled) for axis in (1, 2))
        heads = len(summaries[0]["count"])
        total = {
            "sum": torch.zeros(heads, rows, columns),
            "count": torch.zeros(heads, rows, dtype=torch.float64),
        }
        for each in pooled:
            total["sum"][:, : each["sum"].shape[1], : each["sum"].shape[2]] += each["sum"]
            total["count"][:, : each["count"].shape[1]] += each["count"]
        return {**total, "length": length, "cells": summaries[0]["cells"].clone()}

    def result(self, summary: Summary) -> Tensor:
        """(heads, query_block, key_block)."""
        return summary["sum"].double() / summary["count"][..., None]


def block_sizes(summary: Summary) -> tuple[int, int]:
    """Return the tokens of a block of queries of a map, and of one of keys."""
    lengths = map(int, summary["length"])
    pairs = zip(lengths, summary["sum"].shape[1:], strict=True)
    queries, keys = (block_size(length, max(1, blocks)) for length, blocks in pairs)
    return queries, keys


def coarsen_map(summary: Summary, sizes: Sequence[int]) -> Summary:
    """Return a map in larger blocks: ``sizes`` are multiples of the tokens of a block."""
    total, count = summary["sum"], summary["count"]
    down, across = (x // y for x, y in zip(sizes, block_sizes(summary), strict=True))
    total = pad(total, (0, -total.shape[2] % across, 0, -total.shape[1] % down))
    total = total.unflatten(2, (-1, across)).sum(3).unflatten(1, (-1, down)).sum(2)
    count = pad(count, (0, -count.shape[1] % down)).unflatten(1, (-1, down)).sum(2)
    return {**summary, "sum": total, "count": count}


class MapOfShares(statistic.Statistic):
    """The map of earlier versions, by shares of a text: scans that have it are read."""

    definition = Definition(
        name="map",
        id="map-1",
        formula="cell (a, b): mean over the queries of block a of Σⱼ A[i, j] over the keys of "
        "block b; the i-th of n real tokens is in block ⌊c i / n⌋ of c: 64 blocks if no other "
        "number was chosen",
        unit=Map.definition.unit,
        excluded=EXCLUDED + "; blocks that no query is in have no value. A sequence shorter than "
        "the map leaves gaps: a coarser one (pyramid) has none",
        source=Map.definition.source,
        axes=Map.definition.axes,
    )
    parts: ClassVar[Parts] = {
        "sum": statistic.SummaryPart(axes=("cells", "cells")),
        "count": statistic.SummaryPart(axes=("cells",), values="count"),
    }

    def reason_not_mergeable(self, summary: Summary, other: Summary) -> str | None:
        """Return a difference in the number of cells."""
        here, there = summary["count"].shape[-1], other["count"].shape[-1]
        return None if here == there else f"a map of {here} cells, and one of {there}"

    def result(self, summary: Summary) -> Tensor:
        """(heads, query_block, key_block)."""
        return summary["sum"] / summary["count"][..., None]


# ---- the keys with the largest weights ----------------------------------------------------------


def _parts_of_largest(weight: str, *axes: int | str) -> Parts:
    numbers = dict.fromkeys(("key", "token"), statistic.SummaryPart(axes=axes, values="integer"))
    return {weight: statistic.SummaryPart(axes=axes, values="weight"), **numbers}


class _Received(statistic.TileStatistic):
    """A statistic of the weight that each key receives, and of the number of queries."""

    def start(self, call: CapturedCall) -> Summary:
        batch, heads, _, keys = call.matrix.shape
        received = call.matrix.q.new_zeros(batch, heads, keys, dtype=torch.float64)
        return {"received": received, "count": received.new_zeros(heads)}

    def update(self, gathered: Summary, tile: WeightTile) -> None:
        gathered["received"][tile.batches, tile.heads, tile.columns] += tile.received
        gathered["count"][tile.heads] += tile.is_counted_query.sum((0, 2))


class MostReceived(_Received):
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
    parts: ClassVar[Parts] = _parts_of_largest("received", RANKS)

    def make_summary(self, gathered: Summary, call: CapturedCall) -> Summary:
        received = gathered["received"].masked_fill(call.seen_by == 0, NOTHING)
        received = received.masked_fill(~call.real_keys[:, None], NOTHING)
        batch, heads, keys = received.shape
        first = call.first_real_key[:, None] - call.dropped
        index = torch.arange(keys, device=received.device) - first
        token = torch.full_like(index, -1) if call.tokens is None else call.tokens
        return _keep_largest_keys(
            received.transpose(0, 1).reshape(heads, batch * keys).cpu(),
            index.reshape(1, -1).expand(heads, -1).cpu(),
            token.long().reshape(1, -1).expand(heads, -1).cpu(),
        )

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        together = [torch.cat([s[name] for s in summaries], 1) for name in summaries[0]]
        return _keep_largest_keys(*together)

    def result(self, summary: Summary) -> Tensor:
        """Return (heads, rank, field): key, token, received weight; NaN beyond the last key."""
        return stack_key_token_weight(summary["received"], summary["key"], summary["token"])


class OneKey(_Received):
    """The weight on the key that receives most of its sequence: the share of an attention sink."""

    definition = Definition(
        name="one_key",
        id="one_key-1",
        formula="mean over queries i of A[i, k], k being the key with the largest Σᵢ A[i, k] of "
        "the sequence; a query that cannot see k counts with 0",
        unit=SHARE,
        excluded=EXCLUDED + "; keys that are padding",
        source="attention sinks: Xiao et al. 2023, arXiv:2309.17453; Gu et al. 2024, "
        "arXiv:2410.10781, section 3, over the queries that see the key, where over 0.3 is a sink",
        title="Weight on one key, the one that receives most",
        most="gives {} of the weight of all queries to one key",
    )
    parts = statistic.MEAN

    def reason_not_computable(self, call: CapturedCall) -> str | None:
        """Return why a call has no such key: it continues a cache."""
        return call.reason_not_whole or super().reason_not_computable(call)

    def make_summary(self, gathered: Summary, call: CapturedCall) -> Summary:
        received = gathered["received"].masked_fill(~call.real_keys[:, None], 0.0)
        most = pad(received, (0, 1)).amax(-1)  # there may be no keys at all
        return {"sum": most.sum(0).cpu(), "count": gathered["count"].cpu()}


def _keep_largest_keys(received: Tensor, key: Tensor, token: Tensor) -> Summary:
    """Return the keys with the largest weights; ties by the earlier key, then the smaller token."""
    parts = {"received": received, "key": key, "token": token}
    for name, descending in (("token", False), ("key", False), ("received", True)):
        order = parts[name].argsort(dim=1, stable=True, descending=descending)
        parts = {name: part.gather(1, order) for name, part in parts.items()}
    short = max(0, RANKS - received.shape[1])
    return {name: pad(part[:, :RANKS], (0, short), value=NOTHING) for name, part in parts.items()}


def stack_key_token_weight(weight: Tensor, key: Tensor, token: Tensor) -> Tensor:
    """Return (..., rank, field) with key, token and weight; NaN where there is no key."""
    stacked = torch.stack([key.double(), token.double(), weight], -1)
    return stacked.masked_fill((weight < 0)[..., None], torch.nan)


class _ChosenQueries(NamedTuple):
    sequence: int
    rows: list[int | None]
    largest: Summary


class TopKeysOfChosenQueries(statistic.TileStatistic):
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
    parts: ClassVar[Parts] = {**_parts_of_largest("share", "queries", RANKS), "seen": COUNT}

    def __init__(self, queries: int | tuple[int, ...] = (-1,)) -> None:
        self.queries = (queries,) if isinstance(queries, int) else tuple(queries)

    def start(self, call: CapturedCall) -> _ChosenQueries:
        real = call.real_queries
        some = bool(real.any())
        sequence = int(real.any(-1).int().argmax()) if some else 0
        places = real[sequence].nonzero().squeeze(1).tolist() if some else []
        count, size = len(places), (call.matrix.shape[1], len(self.queries), RANKS)
        largest = {name: torch.full(size, NOTHING) for name in ("share", "key", "token")}
        largest["share"] = largest["share"].double()
        largest["seen"] = torch.full(size[:1], float(some), dtype=torch.float64)
        rows = [places[query] if -count <= query < count else None for query in self.queries]
        return _ChosenQueries(sequence, rows, largest)

    def update(self, gathered: _ChosenQueries, tile: WeightTile) -> None:
        sequence, rows, largest = gathered
        if not tile.batches.start <= sequence < tile.batches.stop:
            return
        first, tokens = int(tile.call.first_real_key[sequence]), tile.call.tokens
        for nth, row in enumerate(rows):
            if row is None or not tile.rows.start <= row < tile.rows.stop:
                continue
            weights = tile.weights[sequence - tile.batches.start, :, row - tile.rows.start]
            # Of equal weights the earlier key comes first.
            share, key = weights.sort(dim=-1, descending=True, stable=True)
            share, key = share[:, :RANKS].cpu(), key[:, :RANKS].cpu() + tile.columns.start
            none, at = share <= 0, (tile.heads, nth, slice(0, share.shape[1]))
            largest["share"][at] = share.double().masked_fill(none, NOTHING)
            largest["key"][at] = (key + tile.call.dropped - first).masked_fill(none, NOTHING)
            if tokens is not None:
                token = tokens[sequence].long().cpu()[key]
                largest["token"][at] = token.masked_fill(none, NOTHING)

    def make_summary(self, gathered: _ChosenQueries, call: CapturedCall) -> Summary:  # noqa: ARG002
        return gathered.largest

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        """Return the summary of the first call with a sequence."""
        return dict(next((s for s in summaries if s["seen"].any()), summaries[0]))

    def result(self, summary: Summary) -> Tensor:
        """Return (heads, query, rank, field): key, token, weight; NaN beyond the last key."""
        return stack_key_token_weight(summary["share"], summary["key"], summary["token"])


BLOCK = 64  # columns whose largest weight is found first
LEAST_BLOCKS = 32  # fewer are searched as a whole


def find_largest(weights: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the largest weights (..., ranks) of each row (..., columns), and their columns.

    The largest weights of a row stand in the blocks with the largest maxima, or behind the last
    whole block. In long rows this is faster than `torch.topk`.
    """
    blocks = weights.shape[-1] // BLOCK
    if blocks < max(LEAST_BLOCKS, ranks):
        return weights.topk(ranks, dim=-1)
    whole = blocks * BLOCK
    peaks = weights[..., :whole].unflatten(-1, (blocks, BLOCK)).amax(-1)
    inside = torch.arange(BLOCK, device=weights.device)
    columns = (peaks.topk(ranks, dim=-1).indices[..., None] * BLOCK + inside).flatten(-2)
    rest = torch.arange(whole, weights.shape[-1], device=weights.device)
    columns = torch.cat([columns, rest.expand(*columns.shape[:-1], -1)], -1)
    share, place = weights.gather(-1, columns).topk(ranks, dim=-1)
    return share, columns.gather(-1, place)


class _Rows(NamedTuple):
    heads: list[int]  # positions of the chosen heads
    place: Tensor  # (batch, queries): where a query is stored, −1 for padding
    key: Tensor
    share: Tensor


class TopKeysOfEveryQuery(statistic.TileStatistic):
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
        "row": statistic.SummaryPart(values="integer"),
        "lengths": statistic.SummaryPart(axes=("sequences",), values="integer", per_head=False),
        "key": statistic.SummaryPart(
            axes=("chosen", "queries", "ranks"), values="index", per_head=False
        ),
        "share": statistic.SummaryPart(
            axes=("chosen", "queries", "ranks"), values="share", per_head=False
        ),
    }

    def __init__(
        self, heads: Literal["all"] | Iterable[tuple[Layer, int]] = "all", *, ranks: int = 4
    ) -> None:
        if not isinstance(ranks, int) or not 0 < ranks <= MOST_RANKS:
            needed = f"a number of keys for each query, from 1 to {MOST_RANKS}"
            raise OptionError(saw=f"ranks={describe_value(ranks)}", needed=needed, do="ranks=4")
        self.heads = heads if isinstance(heads, str) else tuple(heads)
        self.ranks = ranks
        kinds = {tuple(map(type, pair)) if isinstance(pair, tuple) else None for pair in self.heads}
        if self.heads != "all" and not (kinds and kinds <= {(int, int), (str, int)}):
            saw = f"heads={describe_value(heads)}"
            needed = '"all", or pairs of a layer and a head'
            raise OptionError(saw=saw, needed=needed, do='heads=[(1, 0), ("*.3.*", 7)]')

    def reason_not_computable(self, call: CapturedCall) -> str | None:
        """Return why a call has no such rows: no chosen head, or a cache of unknown tokens."""
        reason = None if call.continues_text else call.reason_not_whole
        if reason or self._chosen_head_positions(call):
            return reason
        return "none of the chosen heads is in this layer"

    def _chosen_head_positions(self, call: CapturedCall) -> list[int]:
        numbers = call.heads or tuple(range(call.matrix.shape[1]))
        if isinstance(self.heads, str):
            return list(range(len(numbers)))
        here = (call.layer_index, call.layer)
        chosen = {
            head
            for layer, head in self.heads
            if layer in here or (isinstance(layer, str) and fnmatchcase(call.layer, layer))
        }
        return [position for position, number in enumerate(numbers) if number in chosen]

    def start(self, call: CapturedCall) -> _Rows:
        """Return room for every real query of the chosen heads."""
        real, heads = call.real_queries, self._chosen_head_positions(call)
        row = (real.flatten().cumsum(0) - 1).masked_fill(~real.flatten(), -1)
        size = len(heads), int(real.sum()), self.ranks
        key, share = (real.new_full(size, NOTHING, dtype=x) for x in (torch.int32, torch.float32))
        return _Rows(heads, row.unflatten(0, real.shape), key, share)

    def update(self, gathered: _Rows, tile: WeightTile) -> None:
        """Store the largest weights of the tile's rows; a tile holds whole rows."""
        here = range(tile.heads.start, tile.heads.stop)
        stored = [n for n, head in enumerate(gathered.heads) if head in here]
        if not stored:
            return
        heads = [gathered.heads[nth] - tile.heads.start for nth in stored]
        is_whole = len(heads) == tile.weights.shape[1]
        weights = tile.weights if is_whole else tile.weights[:, heads]
        counted = tile.is_counted_query if is_whole else tile.is_counted_query[:, heads]
        share, key = find_largest(weights, min(self.ranks, weights.shape[-1]))
        first = tile.call.first_real_key[tile.batches]
        key = key + (tile.columns.start + tile.call.dropped - first)[:, None, None, None]
        none = (share <= 0) | ~counted[..., None]
        row = gathered.place[tile.batches, tile.rows]
        at = slice(stored[0], stored[-1] + 1), row[row >= 0], slice(0, share.shape[-1])
        for kept, values in ((gathered.share, share.float()), (gathered.key, key.int())):
            kept[at] = values.masked_fill(none, NOTHING).transpose(0, 1)[:, row >= 0]

    def make_summary(self, gathered: _Rows, call: CapturedCall) -> Summary:
        """Return each head's row of keys and shares (−1 if it was not chosen), and the lengths."""
        row = torch.full((call.matrix.shape[1],), NOTHING)  # of keys and shares, for each head
        row[gathered.heads] = torch.arange(len(gathered.heads))
        lengths = call.real_queries.sum(-1).cpu()
        stored = {"key": gathered.key.cpu(), "share": gathered.share.cpu()}
        if call.continues_text:
            stored["continues"] = torch.tensor(True)  # for `merge`, which leaves it out
        return {"row": row, "lengths": lengths, **stored}

    def reason_not_mergeable(self, summary: Summary, other: Summary) -> str | None:
        """Return a difference in the chosen heads, or in the number of ranks."""
        if not torch.equal(summary["row"], other["row"]):
            return "the top keys of some heads, and of others"
        ranks, other_ranks = (each["key"].shape[-1] for each in (summary, other))
        return None if ranks == other_ranks else f"{ranks} top keys a query, and {other_ranks}"

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        """Return all queries by sequence; the last call may continue the last sequences."""
        axes = {"lengths": 0, "key": 1, "share": 1}  # along which sequences stand
        joined = {name: torch.cat([x[name] for x in summaries], n) for name, n in axes.items()}
        if "continues" in summaries[-1]:
            before, added = (each["lengths"] for each in summaries)
            numbers = torch.arange(len(before))
            ends = numbers[-len(added) :]
            owners = numbers.repeat_interleave(before), ends.repeat_interleave(added)
            order = torch.cat(owners).argsort(stable=True)
            joined = {name: joined[name][:, order] for name in ("key", "share")}
            joined["lengths"] = before.index_add(0, ends, added)
        return {"row": summaries[0]["row"].clone(), **joined}

    def result(self, summary: Summary) -> Tensor:
        """Return (heads, query, rank, field): key, weight; NaN for other heads and beyond keys."""
        stacked = torch.stack([summary["key"].double(), summary["share"].double()], -1)
        stacked = stacked.masked_fill((summary["share"] < 0)[..., None], torch.nan)
        row = summary["row"]
        whole = stacked.new_full((len(row), *stacked.shape[1:]), torch.nan)
        whole[row >= 0] = stacked[row[row >= 0]]
        return whole
