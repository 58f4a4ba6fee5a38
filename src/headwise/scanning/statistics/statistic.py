"""Statistics of heads: objects over tiles, whose summaries can be merged and kept.

    start     memory for one call
    update    look at one tile
    finish    the call's summary: named tensors that hold all that is ever needed of it
    merge     several summaries into one
    result    the number, or numbers, of each head

A statistic has no state of its own. To write one, take `RowMean` and say what a row is worth:

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

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.captured_call import CapturedCall
from headwise.scanning.statistics.statistic_ids import MEANINGS
from headwise.scanning.statistics.weight_tile import WeightTile
from headwise.support.tracing import without_autocast

Need = Literal[
    "own_key",
    "tokens",
    "separators",
    "specials",
    "sink",
    "values",
    "outputs",
    "out_proj",
    "residual",
    "unembedding",
]
Summary = dict[str, Tensor]

# need -> why a statistic is left out where it is not met
MISSING: dict[Need, str] = {
    "own_key": "cross attention: no key stands where a query stands",
    "tokens": "the tokens are not known",
    "separators": "no token was named a separator",
    "specials": "the special tokens are not known",
    "sink": "the layer has no learned sink",
    "values": "the values are not known",
    "outputs": "the head outputs are not known",
    "out_proj": "no output projection was found",
    "residual": "what the output is added to was not found",
    "unembedding": "the model has no unembedding that was found",
}


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What a statistic means, in words for a page or a report.

    Attributes:
        name: what it is called in tables and files.
        formula: what is computed; A[i, j] is the weight that query i gives to key j.
        unit: of the number, and its range.
        excluded: what does not count.
        source: the paper or file that defines it.
        axes: the axes of the result after heads; none for one number a head.
        version: of the meaning of a statistic of your own. Give one where the words may change
            later, and raise it where other numbers are computed. Without a version, other words
            are another meaning.
        title: the heading of its picture; the name if it is empty.
        most: what the head with the most of it does, with {} for the value.
        least: the same of the head with the least, where that is worth saying.

    The last three are words for pages and terminals. Files do not keep them, and `id` does not
    depend on them.
    """

    name: str
    formula: str
    unit: str
    excluded: str
    source: str
    axes: tuple[str, ...] = ()
    version: int | None = None
    title: str = ""
    most: str = ""
    least: str = ""

    @property
    def id(self) -> str:
        """The name of the meaning: definitions with one id describe the same numbers.

        It is ``entropy-1`` for a statistic of headwise, ``mine@1`` for one with a version of its
        own, and otherwise the name and a digest of formula and axes.
        """
        if self.version is not None:
            return f"{self.name}@{self.version}"
        return MEANINGS.get(self.id_of_words, self.id_of_words)

    @property
    def id_of_words(self) -> str:
        """The name, and a digest of formula and axes."""
        words = "\0".join((self.formula, *self.axes)).encode("utf-8", "surrogatepass")
        return f"{self.name}:{hashlib.sha256(words).hexdigest()[:16]}"

    @property
    def label(self) -> str:
        """The name in a sentence."""
        return self.name.replace("_", " ")

    @property
    def heading(self) -> str:
        """The title, or the name with a capital."""
        return self.title or self.label[:1].upper() + self.label[1:]

    @property
    def says(self) -> str:
        """What the head with the most of it does, with {} for the value."""
        return self.most or f"has the most {self.label}: {{}}"

    @property
    def drawn(self) -> Literal["weight", "share", "range"]:
        """The scale of its picture: a share is drawn from 0 to 1, all else from lowest to highest.

        A share of the weight has a scale of its own, on which small weights can be told apart.
        """
        if self.unit.startswith("share of the weight"):
            return "weight"
        return "share" if self.unit.startswith("share") else "range"


# ---- the tensors of a summary --------------------------------------------------------------------

HEADS = "heads"  # an axis with one entry for each head that was looked at


@dataclass(frozen=True, kw_only=True)
class SummaryPart:
    """One tensor of a summary.

    Attributes:
        axes: the axes after heads: a length, `HEADS`, or a name. Axes of one name have one length
            within a summary.
        values: "number" is any float64; "count" is a float64 that is a whole number from 0 on;
            "weight" is a float64 from 0 on, or −1 for none; "integer" is any int64.
    """

    axes: tuple[int | str, ...] = ()
    values: Literal["number", "count", "weight", "integer"] = "number"

    def fault(self, tensor: Tensor, *, lengths: dict[str, int]) -> str | None:
        """Return the first thing that no summary has; None where there is none.

        Args:
            tensor: the tensor that should be this part.
            lengths: the length of each named axis that is known; lengths that are new are added.
        """
        dtype = torch.int64 if self.values == "integer" else torch.float64
        if tensor.dtype != dtype:
            return f"has the dtype {tensor.dtype}, where {dtype} is needed"
        axes = (HEADS, *self.axes)
        if tensor.dim() == len(axes):
            for axis, length in zip(axes, tensor.shape, strict=True):
                if isinstance(axis, str):
                    lengths.setdefault(axis, length)
        needed = tuple(lengths.get(axis, -1) if isinstance(axis, str) else axis for axis in axes)
        if tensor.shape != needed:
            names = ", ".join(
                f"{axis} {length}" if isinstance(axis, str) and length >= 0 else str(axis)
                for axis, length in zip(axes, needed, strict=True)
            )
            return f"has the shape {tuple(tensor.shape)}, where ({names}) is needed"
        return self._fault_of_values(tensor)

    def _fault_of_values(self, tensor: Tensor) -> str | None:
        if self.values == "count" and not bool(
            (tensor.isfinite() & (tensor >= 0) & (tensor == tensor.floor())).all()
        ):
            return "holds a number that is no count: a count is a whole number from 0 on"
        # A model can give weights that are NaN, so NaN is no fault here.
        if self.values == "weight" and bool(((tensor < 0) & (tensor != -1)).any()):
            return "holds a negative weight"
        return None


Parts = Mapping[str, SummaryPart]
COUNT = SummaryPart(values="count")


def mean_over(*axes: int | str) -> Parts:
    """Return the parts of a mean for each head and each entry of these axes."""
    return {"sum": SummaryPart(axes=axes), "count": SummaryPart(axes=axes, values="count")}


MEAN = mean_over()  # one number for each head


def fault_of_summary(
    parts: Parts, summary: Mapping[str, Tensor], *, num_heads: int
) -> tuple[str, str] | None:
    """Return the name of the first wrong tensor and what is wrong with it; None where none is."""
    if odd := sorted({*parts} ^ {*summary}):
        return odd[0], "is not there" if odd[0] in parts else "belongs to no such statistic"
    lengths = {HEADS: num_heads}
    for name, part in parts.items():
        if (fault := part.fault(summary[name], lengths=lengths)) is not None:
            return name, fault
    return None


# ---- statistics ---------------------------------------------------------------------------------


class Statistic:
    """A number for each head, or several, whose summaries can be merged and kept.

    `TileStatistic` is the base of those that are read from the weights, and `Importance` of those
    that come from runs of the model.
    """

    definition: Definition
    parts: ClassVar[Parts | None] = None  # of a summary; None: they are not checked in files
    needs: tuple[Need, ...] = ()  # what must be known of a call
    reach: int = 0  # how far from a query's own key the tile is asked for

    def merge(self, summaries: Sequence[Summary]) -> Summary:
        """The summary of all calls together. By default each tensor is a sum, in float64."""
        first, *others = summaries
        total = {name: value.clone() for name, value in first.items()}
        for other in others:
            for name, value in other.items():
                total[name] += value
        return total

    def result(self, summary: Summary) -> Tensor:
        """(heads, *axes) in float64; NaN where nothing counted. By default a mean."""
        return summary["sum"] / summary["count"]


class TileStatistic(Statistic):
    """A statistic from one pass over the weights."""

    reads_scores: bool = False  # every score: a copy of the tile
    reads_lowest: bool = False  # the smallest of each row alone

    def __init_subclass__(cls) -> None:
        """Forget the parts of a base class where ``finish`` makes another summary."""
        super().__init_subclass__()
        if "finish" in vars(cls) and "parts" not in vars(cls):
            cls.parts = None

    def missing(self, call: CapturedCall) -> str | None:
        """Why this call cannot have the statistic; None where it can."""
        for need in self.needs:
            if getattr(call.matrix if need == "sink" else call, need) is None:
                return MISSING[need]
        return None

    def start(self, call: CapturedCall) -> Any:
        """What is gathered from the tiles of one call, before the first.

        By default a sum for each of ``parts``, whose axes are then numbers or `HEADS`.
        """
        heads, device = call.matrix.shape[1], call.matrix.q.device
        return {
            name: torch.zeros(
                heads,
                *(heads if axis == HEADS else int(axis) for axis in part.axes),
                dtype=torch.float64,
                device=device,
            )
            for name, part in (self.parts or {}).items()
        }

    def update(self, gathered: Any, tile: WeightTile) -> None:
        """Add one tile; by default none is looked at."""

    def finish(self, gathered: Any, call: CapturedCall) -> Summary:  # noqa: ARG002
        """What is kept of the call, by default what was gathered.

        No tensor of it grows with the number of tokens.
        """
        return {name: value.cpu() for name, value in gathered.items()}


class RowMean(TileStatistic, ABC):
    """The mean over queries of a number that each query's row has."""

    parts = MEAN

    @abstractmethod
    def of_rows(self, tile: WeightTile) -> Tensor:
        """(batches, heads, rows): the number of each row of the tile."""

    def counts(self, tile: WeightTile) -> Tensor:
        """(batches, heads, rows): which rows count; those with a key that are no padding."""
        return tile.counted

    def start(self, call: CapturedCall) -> tuple[Tensor, Tensor]:
        """Every row's number, and whether it counts."""
        shape, device = call.matrix.shape[:3], call.matrix.q.device
        values = torch.zeros(shape, dtype=torch.float64, device=device)
        return values, torch.zeros(shape, dtype=torch.bool, device=device)

    def update(self, gathered: tuple[Tensor, Tensor], tile: WeightTile) -> None:
        """Write the tile's rows."""
        values, counted = gathered
        at = tile.batches, tile.heads, tile.rows
        values[at] = self.of_rows(tile).to(values.dtype)
        counted[at] = self.counts(tile)

    def finish(
        self,
        gathered: tuple[Tensor, Tensor],
        call: CapturedCall,  # noqa: ARG002
    ) -> Summary:
        """The sum, and the number of rows, of each head."""
        values, counted = gathered
        values = values.masked_fill_(~counted, 0.0)
        return {"sum": values.sum((0, 2)).cpu(), "count": counted.sum((0, 2)).double().cpu()}


# ---- any number of them, in one pass ------------------------------------------------------------


@torch.no_grad()
def sweep(call: CapturedCall, statistics: Iterable[TileStatistic]) -> dict[str, Summary]:
    """The summary of each statistic by its name; ``statistic.result(summary)`` reads it.

    Memory grows with queries and with keys, never with queries x keys.

    Raises:
        OptionError: a statistic needs what the call does not have; `TileStatistic.missing` says
            so beforehand.
    """
    statistics = tuple(statistics)
    for statistic in statistics:
        if (reason := statistic.missing(call)) is not None:
            raise OptionError(
                saw=f"{statistic.definition.name}: {reason}",
                needed=", ".join(statistic.needs),
                do="say it in the CapturedCall, or leave the statistic out",
            )
    with without_autocast(call.matrix.q):
        gathered = [(statistic, statistic.start(call)) for statistic in statistics]
        looking = [
            (statistic, own)
            for statistic, own in gathered
            if type(statistic).update is not TileStatistic.update
        ]
        if looking:
            reach = max(statistic.reach for statistic, _ in looking)
            tiles = call.matrix.tiles(
                with_scores=any(statistic.reads_scores for statistic, _ in looking),
                with_lowest=any(statistic.reads_lowest for statistic, _ in looking),
            )
            for observed in tiles:
                tile = WeightTile(observed, call, reach=reach)
                for statistic, own in looking:
                    tile.reach = statistic.reach
                    statistic.update(own, tile)
        return {
            statistic.definition.name: statistic.finish(own, call) for statistic, own in gathered
        }
