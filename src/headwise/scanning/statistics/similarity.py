"""Distance of the weights of every pair of heads, within a layer and across layers.

Rows of sampled queries are kept while the layers of a pass of the model come by, and compared when
the pass has ended: so all pairs read the same queries. No tensor is queries x keys.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from headwise.matrix.kernels.kernel import accumulation_dtype
from headwise.scanning.call import CapturedCall
from headwise.scanning.statistics import statistic

WHOLE = 512  # tokens of a sequence up to which every query is read
SAMPLES = 256  # queries of a longer sequence
MEMORY = 500_000_000  # bytes of the kept rows
SHARE = 0.1  # of the work of a scan
# A weight costs a scan as much as so many differences of two weights. Measured on one core at
# 16,384 tokens, with heads of width 64: 4.8 ns with the standard set, and 0.25 ns. The products of
# the model come on top, and are not counted.
DIFFERENCES = 18
AT_ONCE = 2**20  # differences, weights or distances in memory
Reads = Hashable  # layers that read the same are compared
Part = tuple[slice, slice, Tensor]  # heads, columns, and the weights (heads, columns)


# ---- rows that are kept --------------------------------------------------------------------------


@dataclass(eq=False)
class KeptRows:
    """Rows of the weights of one call at sampled queries, sorted by sequence and query."""

    places: list[tuple[int, int]]  # the sequence in the batch, and the query, of each row
    parts: list[list[Part]]  # of each row
    keys: int
    lengths: list[int]  # number of real queries of each sequence
    counted: Tensor  # (rows, heads): the query may attend to a key
    sink: Tensor  # (rows, heads): the weight of the learned sink; 0 without one
    queries: Tensor  # (heads,): number of all queries that may attend to a key
    halvings: int = 0
    weights_read: int = 0  # number of the weights that the scan has computed

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.counted.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(weights.nbytes for row in self.parts for _, _, weights in row)

    def add_tile(self, tile: statistic.WeightTile) -> None:
        """Keep the sampled rows of a tile."""
        self.weights_read += tile.weights.numel()
        self.queries[tile.heads] += tile.is_counted_query.sum((0, 2))
        for sequence in range(tile.batches.start, tile.batches.stop):
            first = bisect_left(self.places, (sequence, tile.rows.start))
            stop = bisect_left(self.places, (sequence, tile.rows.stop))
            rows = [query - tile.rows.start for _, query in self.places[first:stop]]
            if not rows:
                continue
            here, place = slice(first, stop), sequence - tile.batches.start
            self.counted[here, tile.heads] = tile.is_counted_query[place][:, rows].T
            if tile.sink is not None:
                self.sink[here, tile.heads] = tile.sink[place][:, rows].T
            for parts, row in zip(self.parts[here], rows, strict=True):
                parts.append((tile.heads, tile.columns, tile.weights[place, :, row].clone()))

    def halve(self, halvings: int) -> None:
        """Drop every second row until the rows were halved so many times."""
        while self.halvings < halvings:
            self.places, self.parts = self.places[::2], self.parts[::2]
            self.counted, self.sink = self.counted[::2].clone(), self.sink[::2].clone()
            self.halvings += 1

    def fill(self, block: Tensor, rows: range) -> None:
        """Write rows into zeros (rows, heads, 1 + keys): the sink, and the keys."""
        block[..., 0] = self.sink[rows.start : rows.stop]
        for each, nth in zip(block[..., 1:], rows, strict=True):
            for heads, columns, weights in self.parts[nth]:
                each[heads, columns] = weights


# ---- the statistic -------------------------------------------------------------------------------


class HeadDistance(statistic.TileStatistic):
    """The share of the weight that lies elsewhere, for every pair of heads of a scan."""

    definition = statistic.Definition(
        name="head_distance",
        id="head_distance-1",
        formula="½ · mean over queries i of Σⱼ |A[i, j] − B[i, j]| for two heads A and B of any "
        "layers; a sink counts as one more key. Every query of a sequence of up to 512 tokens, of "
        "a longer one 256, evenly spaced. Every second of these is left out while their rows take "
        "over 0.5 GB, and while the comparison takes over a tenth of the work of the scan and more "
        "than that of a text of 512 tokens",
        unit="share of the weight, 0 (the same weights) to 1 (no key in common)",
        excluded="padded queries, and those for which either head may attend to nothing; cross "
        "attention, and pairs of heads that read different texts",
        source="total variation; within a layer: Bhojanapalli et al. 2021, arXiv:2110.06821",
        axes=("scanned_head",),
    )
    needs = ("own_key",)
    parts: ClassVar[statistic.Parts] = {
        **statistic.parts_of_mean(statistic.HEADS_SO_FAR),
        "queries": statistic.COUNT,
    }

    def reason_not_computable(self, call: CapturedCall) -> str | None:
        """Return why a call has no rows to compare: cross attention, or a cache."""
        return call.reason_not_whole or super().reason_not_computable(call)

    def start(self, call: CapturedCall) -> KeptRows:
        """Choose the queries; fewer where the rows of this call alone need too much memory."""
        q, places, halvings = call.matrix.q, list[tuple[int, int]](), 0
        for sequence, row in enumerate(call.real_queries):
            queries = row.nonzero().squeeze(1).tolist()
            count = len(queries)
            if count > WHOLE:  # evenly spaced ones
                queries = [queries[(2 * n + 1) * count // (2 * SAMPLES)] for n in range(SAMPLES)]
            places += [(sequence, query) for query in queries]
        heads, dtype = q.shape[1], accumulation_dtype(q.dtype)
        row_bytes = heads * call.matrix.shape[3] * dtype.itemsize
        while len(places) > 1 and len(places) * row_bytes > MEMORY:
            places, halvings = places[::2], halvings + 1
        return KeptRows(
            places=places,
            parts=[[] for _ in places],
            keys=call.matrix.shape[3],
            lengths=call.real_queries.sum(-1).tolist(),
            counted=q.new_zeros(len(places), heads, dtype=torch.bool),
            sink=q.new_zeros(len(places), heads, dtype=dtype),
            queries=q.new_zeros(heads, dtype=torch.float64),
            halvings=halvings,
        )

    def update(self, gathered: KeptRows, tile: statistic.WeightTile) -> None:
        """Keep the sampled rows of the tile."""
        gathered.add_tile(tile)

    def make_summary(self, gathered: KeptRows, call: CapturedCall) -> statistic.Summary:  # noqa: ARG002
        """Return the summary of a layer that is alone in its pass."""
        ((_, summary),) = compare_layers({0: gathered}, [gathered.heads])
        return summary


class PassOfModel:
    """The kept rows of the layers in one pass of a model, compared when it has ended."""

    def __init__(self) -> None:
        self._by_text: dict[Reads, dict[int, KeptRows]] = {}
        self.layers: list[int] = []  # in the order in which they came

    def has_ended_before(self, layer: int, reads: Reads) -> bool:
        """True if a call of this layer, which reads this, belongs to another pass."""
        begins_again = bool(self.layers) and layer == self.layers[0] != self.layers[-1]
        return begins_again or layer in self._by_text.get(reads, {})

    def add(self, layer: int, reads: Reads, rows: KeptRows) -> None:
        """Keep rows of a layer, fewer of all layers where they take too much memory."""
        self.layers.append(layer)
        self._by_text.setdefault(reads, {})[layer] = rows
        kept = [rows for layers in self._by_text.values() for rows in layers.values()]
        halvings = max(rows.halvings for rows in kept)
        for each in kept:
            each.halve(halvings)
        while sum(each.num_bytes for each in kept) > MEMORY and len(rows.places) > 1:
            halvings += 1
            for each in kept:
                each.halve(halvings)

    def compare(self, heads: Sequence[int]) -> Iterator[tuple[int, statistic.Summary]]:
        """Yield the number and the summary of each layer, given the heads of the scan's layers."""
        for kept in self._by_text.values():
            yield from compare_layers(kept, heads)


# ---- the comparison ------------------------------------------------------------------------------


@torch.no_grad()
def compare_layers(
    kept: Mapping[int, KeptRows], heads: Sequence[int]
) -> Iterator[tuple[int, statistic.Summary]]:
    """Yield the number and the summary of each layer that read one text, in the order of layers.

    ``heads`` are the numbers of heads of all layers of the scan, of which ``kept`` has some.
    """
    numbers = sorted(kept)
    layers = [kept[number] for number in numbers]
    _limit_work(layers)
    sums, counts = _compare_heads(layers)
    ends = list(accumulate(heads))
    columns = torch.cat([torch.arange(ends[n] - heads[n], ends[n]) for n in numbers])
    first = 0
    for number, layer in zip(numbers, layers, strict=True):
        stop = first + layer.heads
        summary = {"queries": layer.queries.cpu()}
        for name, whole in (("sum", sums), ("count", counts)):
            summary[name] = torch.zeros(layer.heads, ends[number], dtype=torch.float64)
            summary[name][:, columns[:stop]] = whole[first:stop, :stop].cpu()
        yield number, summary
        first = stop


def _limit_work(layers: Sequence[KeptRows]) -> None:
    """Halve the rows while the comparison would take too much of the work of the scan."""
    first = layers[0]
    of_short_texts = sum(min(length, WHOLE) ** 2 for length in first.lengths)
    allowed = SHARE * DIFFERENCES * sum(layer.weights_read for layer in layers)
    while len(first.places) > 1:
        is_short = sum(first.lengths[sequence] for sequence, _ in first.places) <= of_short_texts
        if is_short or count_differences(layers) <= allowed:
            return
        for layer in layers:
            layer.halve(layer.halvings + 1)


def count_differences(layers: Sequence[KeptRows]) -> int:
    """Return the number of differences of two weights that a comparison of layers takes."""
    heads = [layer.heads for layer in layers]
    pairs = sum(count * sum(heads[: n + 1]) for n, count in enumerate(heads))
    width = 0
    for row in zip(*(layer.parts for layer in layers), strict=True):
        columns = [columns for parts in row for _, columns, _ in parts]
        starts, stops = [part.start for part in columns], [part.stop for part in columns]
        width += max(stops, default=0) - min(starts, default=0)
    return pairs * width


def _compare_heads(layers: Sequence[KeptRows]) -> tuple[Tensor, Tensor]:
    """Return (heads, heads) of all layers: sums over rows, and numbers of rows; the lower half."""
    ends = torch.tensor([layer.heads for layer in layers]).cumsum(0).tolist()
    first = layers[0].sink  # layers of a model may be on several devices
    counted = torch.cat([layer.counted.to(first.device) for layer in layers], 1)
    counts = counted.double().T @ counted.double()
    sums, keys = torch.zeros_like(counts), max(layer.keys for layer in layers)
    # Neither the weights of some rows nor their distances are more.
    step = AT_ONCE // (ends[-1] * max(1 + keys, *(layer.heads for layer in layers)))
    start, places = 0, layers[0].places
    while start < len(places):  # some rows of one sequence
        stop = min(start + max(1, step), bisect_left(places, (places[start][0] + 1, 0)))
        rows, start = range(start, stop), stop
        weights = first.new_zeros(len(rows), ends[-1], 1 + keys)
        for end, layer in zip(ends, layers, strict=True):
            layer.fill(weights[:, end - layer.heads : end, : 1 + layer.keys], rows)
        used = (weights != 0).flatten(0, 1).any(0).nonzero().squeeze(1)
        weights = weights[..., int(used.min()) : int(used.max()) + 1] if len(used) else weights
        group = counted[rows.start : rows.stop]
        for end, layer in zip(ends, layers, strict=True):
            here = slice(end - layer.heads, end)
            apart = half_sums_of_differences(weights[:, here], weights[:, :end])
            both = group[:, here, None] & group[:, None, :end]
            sums[here, :end] += apart.masked_fill_(~both, 0.0).sum(0)
    return sums, counts


def estimate_comparison(
    heads: Sequence[int], length: int, *, weights_read: float
) -> tuple[float, int]:
    """Return the differences and the bytes, at most, that a text of so many tokens takes.

    ``heads`` are those of the layers, and ``weights_read`` the number of weights of the scan.
    """
    rows, short = length if length <= WHOLE else SAMPLES, min(length, WHOLE)
    pairs = sum(count * sum(heads[: n + 1]) for n, count in enumerate(heads))
    allowed = max(SHARE * DIFFERENCES * weights_read, pairs * short**2)
    row_bytes = length * torch.float32.itemsize
    kept = min(MEMORY, rows * row_bytes * sum(heads))
    of_one_layer = min(MEMORY, rows * row_bytes * max(heads, default=0))
    return min(pairs * rows * length, allowed), kept + of_one_layer


def half_sums_of_differences(first: Tensor, second: Tensor) -> Tensor:
    """Return (rows, heads, second) in float64: ½ Σ |a − b| over the last axis."""
    size = (*first.shape[:2], second.shape[1])
    step = max(1, AT_ONCE // math.prod(size))
    total = first.new_zeros(size, dtype=torch.float64)
    for a, b in zip(first.split(step, -1), second.split(step, -1), strict=True):
        total += (a[:, :, None] - b[:, None]).abs_().sum(-1)
    return total / 2
