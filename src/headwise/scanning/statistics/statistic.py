"""Base classes of head statistics, whose summaries can be merged and saved.

    start           allocate accumulators for one call
    key_entries     return numbers of a tile's keys; one product sums them for all statistics
    update          add one tile of the weights
    make_summary    return the summary of the call: named tensors
    merge           combine several summaries
    result          return the number or numbers of each head

A statistic is stateless. To write one, derive from `RowMean` and return a value for each row:

    class SelfWeight(RowMean):
        definition = Definition(
            name="self",
            formula="mean over queries i of A[i, i]",
            unit="share of the weight, 0 to 1",
            excluded="padded queries",
            source="mine",
        )
        needs = ("own_key",)

        def of_rows(self, tile):
            return tile.diagonal(0)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.matrix.kernels import tiles
from headwise.matrix.kernels.readings import ObservedTile
from headwise.scanning.call import CapturedCall, require_not_none
from headwise.support.tracing import without_autocast


class WeightTile(ObservedTile):
    """Whole rows of the weights of some heads, as a statistic receives them.

    A tile extends the record of the kernel by ``call``, to which it belongs. The slices
    ``batches``, ``heads``, ``rows`` (queries) and ``columns`` (keys) locate the tile in the matrix.
    Keys outside of the columns are hidden from all of its queries. ``scores`` are there if the
    statistic has ``reads_scores``, ``lowest`` with ``reads_lowest``. The next tile reuses the
    memory: keep results, not views.
    """

    def __init__(
        self,
        observed: ObservedTile,
        call: CapturedCall,
        *,
        reach: int,
        summing: Sequence[TileStatistic] = (),
    ) -> None:
        vars(self).update(vars(observed))
        self.call = call
        self.batches, self.heads = self.place.batches, self.place.heads
        self.rows, self.columns = self.place.rows, self.place.columns
        # One band serves all statistics; its width is that of the largest reach.
        self.reach = self._widest = reach
        self._summing = summing  # statistics whose entries of keys are summed by one product
        self._samples_copied = False

    @cached_property
    def is_counted_query(self) -> Tensor:
        """(batches, heads, rows): True for real queries that may attend to a key."""
        real = self.call.real_queries[self.batches, self.rows]
        return real[:, None] & (self.allowed > 0)

    @cached_property
    def keys(self) -> Tensor:
        """(columns,): the number of each key of the tile."""
        return torch.arange(self.columns.start, self.columns.stop, device=self.weights.device)

    @cached_property
    def key_positions_of_queries(self) -> Tensor:
        """(rows,): the key at the position of each query."""
        return torch.arange(*self.key_range_of_queries, device=self.weights.device)

    @property
    def key_range_of_queries(self) -> tuple[int, int]:
        """The first of `key_positions_of_queries`, and the one behind the last."""
        first = require_not_none(self.call.own_key)
        return first + self.rows.start, first + self.rows.stop

    def cut_to_tile(self, chosen: Tensor) -> Tensor:
        """Cut (batch, keys) or (batch, heads, keys) to the tile: (batches, 1 or heads, columns)."""
        if chosen.dim() == 2:
            return chosen[self.batches, None, self.columns]
        return chosen[self.batches, self.heads, self.columns]

    def sums_of_key_entries(self, statistic: TileStatistic) -> Tensor:
        """Return (entries, batches, heads, rows): the weight on keys times each of its entries."""
        return self._sums_of_statistics[id(statistic)]

    @cached_property
    def _sums_of_statistics(self) -> dict[int, Tensor]:
        """The sums of the entries of all statistics, by the id of the statistic."""
        entries = {id(each): each.key_entries(self) for each in self._summing}
        batches, heads, _, columns = self.weights.shape
        every = [entry for those in entries.values() for entry in those]
        together = self.weights.new_empty(batches, heads, len(every), columns)
        for nth, entry in enumerate(every):
            together[:, :, nth] = entry
        sums = tiles.sum_entries(together.flatten(0, 1), self.weights.flatten(0, 1))
        sums = sums.view(batches, heads, *sums.shape[1:]).permute(2, 0, 1, 3)
        parts = sums.split([len(those) for those in entries.values()])
        return dict(zip(entries, parts, strict=True))

    def diagonal(self, offset: int) -> Tensor:
        """Return (batches, heads, rows): the weight on the key ``offset`` after the query's."""
        self._require_distance_within_reach(abs(offset), call_text=f"diagonal({offset})")
        return self._widest_band[..., self._widest + offset]

    def weight_within(self, reach: int) -> Tensor:
        """Return (batches, heads, rows): the weight on keys at most ``reach`` positions away."""
        return self.band(reach).sum(-1)

    def band(self, reach: int) -> Tensor:
        """Return (batches, heads, rows, 2 * reach + 1): the weight on keys around the query's."""
        self._require_distance_within_reach(reach, call_text=f"band({reach})")
        return self._widest_band[..., self._widest - reach : self._widest + reach + 1]

    def _require_distance_within_reach(self, distance: int, *, call_text: str) -> None:
        # The reach of this statistic counts: it must not depend on the others in the same pass.
        if not 0 <= distance <= self.reach:
            saw = f"{call_text} by a statistic with reach {self.reach}"
            do = f"set reach = {abs(distance)} in the statistic"
            raise OptionError(saw=saw, needed=f"a distance from 0 to {self.reach}", do=do)

    @cached_property
    def _widest_band(self) -> Tensor:
        """The band of the largest reach; 0 where there is no key."""
        batches, heads, rows, columns = self.weights.shape
        wide = rows + 2 * self._widest
        block = self.weights.new_zeros(batches, heads, rows, wide)
        # column 0 of the block
        first = self.key_range_of_queries[0] - self._widest - self.columns.start
        start, stop = max(0, first), min(columns, first + wide)
        if start < stop:
            block[..., start - first : stop - first] = self.weights[..., start:stop]
        # Row r of the band begins r columns later than row r - 1.
        size = (batches, heads, rows, 2 * self._widest + 1)
        stride = (heads * rows * wide, rows * wide, wide + 1, 1)
        return block.as_strided(size, stride)

    @cached_property
    def received(self) -> Tensor:
        """(batches, heads, columns) in float64: the weight of all rows that are no padding."""
        real = self.call.real_queries[self.batches, None, None, self.rows].to(self.weights.dtype)
        return torch.matmul(real, self.weights).squeeze(2).double()

    @cached_property
    def indices_of_earlier_repeats(self) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, row, key) of the earlier keys with the token of the row's query in the tile."""
        keys = slice(*self.key_range_of_queries)
        return self.call.repeated_tokens.earlier_repeat_pairs(self.batches, keys)

    def copy_sampled_rows_to_call(self) -> None:
        """Copy the tile's sampled rows to the samples of the call, once."""
        if self._samples_copied:
            return
        self._samples_copied = True
        samples = self.call.sampled_rows
        queries = samples.queries[self.batches]
        inside = (queries >= self.rows.start) & (queries < self.rows.stop)
        batch, sample = (inside & samples.real[self.batches]).nonzero(as_tuple=True)
        row, sequence = queries[batch, sample] - self.rows.start, batch + self.batches.start
        samples.weights[sequence, self.heads, sample, self.columns] = self.weights[batch, :, row]
        samples.counted[sequence, self.heads, sample] = self.is_counted_query[batch, :, row]
        if self.sink is not None:
            samples.sink[sequence, self.heads, sample] = self.sink[batch, :, row]


Summary = dict[str, Tensor]
Need = str  # a key of `MISSING`

# What a statistic may need of a call, and the reason why it is left out where that is not known.
MISSING = {
    "own_key": "cross attention: no key has the position of a query",
    "tokens": "the tokens are unknown",
    "separators": "no token was named as a separator",
    "specials": "the special tokens are unknown",
    "sink": "the layer has no learned sink",
    "values": "the values are unknown",
    "outputs": "the head outputs are unknown",
    "out_proj": "no output projection was observed that is a product with its weight alone",
    "residual": "the residual was not observed",
    "unembedding": "no unembedding is known that is a product with its weight alone",
}


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Definition of a statistic, in words for tables, pages and files.

    Attributes:
        name: the name in tables and files.
        formula: the formula; A[i, j] is the weight that query i gives to key j.
        unit: the unit of the number, and its range.
        excluded: queries, keys or effects that do not count.
        source: the paper or file that defines the statistic.
        id: the name of the meaning, such as ``entropy-1``: two definitions with one id describe
            the same numbers, whatever their words. Raise its number when the numbers change. Your
            own statistic may leave it out; then the same formula and axes are the same meaning.
        axes: the axes of the result after heads; none for one number a head.
        title: the heading of the picture; the name if empty.
        most: a phrase on the head with the highest value, with {} for the value.
        least: a phrase on the head with the lowest value, if that is worth a report.
        short_title: the name in sentences; the name with spaces if empty.

    The last four appear on pages and in terminals. Files do not save them.
    """

    name: str
    formula: str
    unit: str
    excluded: str
    source: str
    id: str = ""
    axes: tuple[str, ...] = ()
    title: str = ""
    most: str = ""
    least: str = ""
    short_title: str = ""

    def has_meaning_of(self, other: Definition) -> bool:
        """True if both describe the same numbers: by their ids, or else by formula and axes."""
        if self.id and other.id:
            return self.id == other.id
        return all(getattr(self, x) == getattr(other, x) for x in ("name", "formula", "axes"))

    def difference_of_meaning(self, other: Definition) -> str | None:
        """Return both formulas if they describe other numbers, or None."""
        if self.has_meaning_of(other):
            return None
        return f"{self.name} as {self.formula_and_id}, and as {other.formula_and_id}"

    @property
    def formula_and_id(self) -> str:
        """The formula, with the id if there is one."""
        return f"{self.formula} ({self.id})" if self.id else self.formula

    @property
    def label(self) -> str:
        """The name for sentences."""
        return self.short_title or self.name.replace("_", " ")

    @property
    def heading(self) -> str:
        """The title, or the name with a capital."""
        return self.title or self.label[:1].upper() + self.label[1:]

    @property
    def highest_value_phrase(self) -> str:
        """A phrase on the head with the highest value, with {} for the value."""
        return self.most or f"has the most {self.label}: {{}}"

    @property
    def colour_scale(self) -> Literal["weight", "share", "range"]:
        """The colour scale: "share" runs from 0 to 1, "range" from the lowest to the highest value.

        "weight" is a share of the weight on a scale that spreads small values.
        """
        if self.unit.startswith("share of the weight"):
            return "weight"
        return "share" if self.unit.startswith("share") else "range"


# ---- the tensors of a summary --------------------------------------------------------------------

HEADS = "heads"  # an axis with one entry for each scanned head
HEADS_SO_FAR = "heads so far"  # for each scanned head of this layer and of the layers before it
DTYPES = {"integer": torch.int64, "index": torch.int32, "share": torch.float32}


@dataclass(frozen=True, kw_only=True)
class SummaryPart:
    """One tensor of a summary.

    Axes with the same name have the same length within a summary. ``values`` are "number" for any
    float64; "count" for a float64 that is a whole number from 0; "weight" for a float64 from 0, or
    −1 for none; "integer" for any int64. "index" is an int32 and "share" a float32, each from 0 or
    −1 for none: for large tensors.
    """

    axes: tuple[int | str, ...] = ()  # after heads: a length, `HEADS`, or a name
    values: Literal["number", "count", "weight", "integer", "index", "share"] = "number"
    per_head: bool = True  # False if the tensor has no axis of heads

    def fault(self, tensor: Tensor, *, lengths: dict[str, int]) -> str | None:
        """Return the first fault of a tensor, or None; add lengths of named axes to ``lengths``."""
        dtype = DTYPES.get(self.values, torch.float64)
        if tensor.dtype != dtype:
            return f"has the dtype {tensor.dtype}, where {dtype} is needed"
        axes = (HEADS, *self.axes) if self.per_head else self.axes
        if tensor.dim() == len(axes):
            for axis, length in zip(axes, tensor.shape, strict=True):
                if isinstance(axis, str):
                    lengths.setdefault(axis, length)
        needed = tuple(lengths.get(axis, -1) if isinstance(axis, str) else axis for axis in axes)
        if tensor.shape != needed:
            names = ", ".join(f"{x} {lengths[x]}" if x in lengths else str(x) for x in axes)
            return f"has the shape {tuple(tensor.shape)}, where ({names}) is needed"
        if self.values == "count" and not bool(
            (tensor.isfinite() & (tensor >= 0) & (tensor == tensor.floor())).all()
        ):
            return "holds a number that is no count: a count is a whole number from 0 on"
        # The weights of a model can be NaN, so NaN is not a fault.
        is_weight = self.values in ("weight", "share", "index")
        if is_weight and bool(((tensor < 0) & (tensor != -1)).any()):
            return "holds a negative weight"
        return None


Parts = Mapping[str, SummaryPart]
COUNT = SummaryPart(values="count")


def parts_of_mean(*axes: int | str) -> Parts:
    """Return the parts of a mean over queries, for each head and each entry of these axes."""
    return {"sum": SummaryPart(axes=axes), "count": SummaryPart(axes=axes, values="count")}


MEAN = parts_of_mean()  # one number for each head


def summary_fault(
    statistic: Statistic, summary: Summary, *, num_heads: int, heads_so_far: int
) -> str | None:
    """Return the first fault of a summary, as it follows the name of the summary, or None."""
    if (parts := statistic.parts) is None:  # only the shape of the result can be checked
        try:
            result = statistic.result(summary)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            return f" gives no result: {str(error)[:120]}"
        is_right = (result.dim(), len(result)) == (1 + len(statistic.definition.axes), num_heads)
        return None if is_right else f" gives a result {tuple(result.shape)} for {num_heads} heads"
    if odd := sorted({*parts} ^ {*summary}):
        fault = "is missing" if odd[0] in parts else "does not belong to the statistic"
        return f".{odd[0]} {fault}"
    lengths = {HEADS: num_heads, HEADS_SO_FAR: heads_so_far}
    faults = ((name, part.fault(summary[name], lengths=lengths)) for name, part in parts.items())
    return next((f".{name} {fault}" for name, fault in faults if fault is not None), None)


# ---- statistics ---------------------------------------------------------------------------------


class Statistic:
    """One or several numbers for each head, with summaries that can be merged and saved."""

    definition: Definition
    parts: ClassVar[Parts | None] = None  # tensors of a summary; None if files do not check them
    needs: tuple[Need, ...] = ()  # attributes of a call that must be known
    reach: int = 0  # largest distance from a query's key that `diagonal` and `band` may ask for

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        """Return the summary of all calls together: by default sums in float64."""
        first, *others = summaries
        total = {name: value.clone() for name, value in first.items()}
        for other in others:
            for name, value in other.items():
                total[name] += value
        return total

    def reason_not_mergeable(self, summary: Summary, other: Summary) -> str | None:  # noqa: ARG002
        """Return why two summaries of one layer cannot be merged, or None if they can."""
        return None

    def result(self, summary: Summary) -> Tensor:
        """Return (heads, *axes) in float64, NaN where nothing counted: by default a mean."""
        return summary["sum"] / summary["count"]


class TileStatistic(Statistic):
    """A statistic from one pass over the weights."""

    reads_scores: bool = False  # True if tiles need `scores`, a copy of the tile
    reads_lowest: bool = False  # True if tiles need `lowest`, the smallest score of each row

    def __init_subclass__(cls) -> None:
        """Drop the parts of a base class if ``make_summary`` is overridden and ``parts`` is not."""
        super().__init_subclass__()
        if "make_summary" in vars(cls) and "parts" not in vars(cls):
            cls.parts = None

    def reason_not_computable(self, call: CapturedCall) -> str | None:
        """Return why the statistic cannot be computed for a call, or None if it can."""
        for need in self.needs:
            if getattr(call.matrix if need == "sink" else call, need) is None:
                return MISSING[need]
        return None

    def start(self, call: CapturedCall) -> Any:
        """Return the accumulators of one call, before the first tile.

        By default a sum for each of ``parts``, whose axes must then be numbers or `HEADS`.
        """
        q, sums = call.matrix.q, dict[str, Tensor]()
        for name, part in (self.parts or {}).items():
            sizes = [q.shape[1] if axis == HEADS else int(axis) for axis in (HEADS, *part.axes)]
            sums[name] = q.new_zeros(sizes, dtype=torch.float64)
        return sums

    def update(self, gathered: Any, tile: WeightTile) -> None:
        """Add one tile to the accumulators; by default do nothing."""

    def key_entries(self, tile: WeightTile) -> Sequence[Tensor]:  # noqa: ARG002
        """Return numbers of the tile's keys, which ``tile.sums_of_key_entries(self)`` sums.

        Each is (columns,) or (batches, 1 or heads, columns); by default there are none. All
        statistics of a pass share one product with the weights.
        """
        return ()

    def make_summary(self, gathered: Any, call: CapturedCall) -> Summary:  # noqa: ARG002
        """Return the summary of the call, by default the accumulators.

        No tensor of a summary may grow with the number of tokens.
        """
        return {name: value.cpu() for name, value in gathered.items()}


class RowSums:
    """Sums and numbers of the rows of each head, (heads,) in float64."""

    def __init__(self, call: CapturedCall) -> None:
        zeros, heads = call.matrix.q.new_zeros, call.matrix.shape[1]
        self._sums = {name: zeros(heads, dtype=torch.float64) for name in MEAN}
        # Tiles of the same heads come together, and are added together.
        self._place = (slice(0, 0), slice(0, 0))
        self._values: list[Tensor] = []
        self._counted: list[Tensor] = []

    def add(self, tile: WeightTile, values: Tensor, counted: Tensor) -> None:
        """Add the rows of a tile, (batches, heads, rows), where ``counted`` is True."""
        if (tile.batches, tile.heads) != self._place:
            self._close()
            self._place = tile.batches, tile.heads
        # The values may be a view of the tile's memory.
        self._values.append(values.expand_as(tile.maximum).to(torch.float64, copy=True))
        self._counted.append(counted.expand_as(tile.maximum))

    def _close(self) -> None:
        if self._values:
            values, counted = torch.cat(self._values, -1), torch.cat(self._counted, -1)
            heads = self._place[1]
            self._sums["sum"][heads] += values.masked_fill_(~counted, 0.0).sum((0, 2))
            self._sums["count"][heads] += counted.sum((0, 2))
            self._values.clear()
            self._counted.clear()

    def total(self) -> Summary:
        """Return the sums of all tiles."""
        self._close()
        return self._sums


class RowMean(TileStatistic, ABC):
    """The mean over queries of a value of each row of the weights."""

    parts = MEAN

    @abstractmethod
    def of_rows(self, tile: WeightTile) -> Tensor:
        """Return (batches, heads, rows): the value of each row of the tile."""

    def counted_rows(self, tile: WeightTile) -> Tensor:
        """Return a bool tensor (batches, heads, rows): True for rows that count in the mean.

        By default all real queries count; padded ones never reach the mean.
        """
        return tile.is_counted_query

    def start(self, call: CapturedCall) -> RowSums:
        """Return the sums of the rows of each head, of no tile yet."""
        return RowSums(call)

    def update(self, gathered: RowSums, tile: WeightTile) -> None:
        """Add the values of the tile's rows."""
        gathered.add(tile, self.of_rows(tile), self.counted_rows(tile))

    def make_summary(self, gathered: RowSums, call: CapturedCall) -> Summary:
        """Return the sum and the number of rows of each head."""
        return super().make_summary(gathered.total(), call)


# ---- all statistics in one pass -----------------------------------------------------------------


@torch.no_grad()
def compute_summaries(
    call: CapturedCall, statistics: Iterable[TileStatistic]
) -> dict[str, Summary]:
    """Return the summary of each statistic by its name, for ``statistic.result(summary)``.

    Memory grows with queries and with keys, never with queries x keys.
    """
    gathered = read_tiles(call, statistics)
    with without_autocast(call.matrix.q):
        return {each.definition.name: each.make_summary(sums, call) for each, sums in gathered}


@torch.no_grad()
def read_tiles(
    call: CapturedCall, statistics: Iterable[TileStatistic]
) -> list[tuple[TileStatistic, Any]]:
    """Return each statistic with its accumulators after all tiles."""
    statistics = tuple(statistics)
    for statistic in statistics:
        if (reason := statistic.reason_not_computable(call)) is not None:
            saw = f"{statistic.definition.name}: {reason}"
            do = "set these attributes of the CapturedCall, or leave the statistic out"
            raise OptionError(saw=saw, needed=", ".join(statistic.needs), do=do)
    with without_autocast(call.matrix.q):
        gathered = [(each, each.start(call)) for each in statistics]
        reading = [pair for pair in gathered if type(pair[0]).update is not TileStatistic.update]
        observed_tiles = call.matrix.tiles(
            with_scores=any(each.reads_scores for each, _ in reading),
            with_lowest=any(each.reads_lowest for each, _ in reading),
        )
        reach = max((each.reach for each, _ in reading), default=0)
        summing = [x for x, _ in reading if type(x).key_entries is not TileStatistic.key_entries]
        for observed in observed_tiles if reading else ():
            tile = WeightTile(observed, call, reach=reach, summing=summing)
            for each, sums in reading:
                tile.reach = each.reach
                each.update(sums, tile)
    return gathered
