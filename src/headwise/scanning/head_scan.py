"""What a scan found: every statistic of every head, to read, to merge and to keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.extras import require
from headwise.heads.statistics.catalogue import unknown_statistic
from headwise.heads.statistics.statistic import Definition, Statistic, Summary
from headwise.scanning.tables import HeadValue as HeadValue
from headwise.scanning.tables import Row, table_of, top_of

if TYPE_CHECKING:
    from headwise.scanning.difference import ScanDiff

OTHER_HEAD = "other_head"  # the axis of a statistic that sets the heads of a layer side by side


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerScan:
    """What was seen of one layer.

    Attributes:
        name: of the layer in the model, such as "encoder.layer.3.attention.self".
        num_heads: of the layer.
        heads: those that were looked at; summaries have a row for each, in this order.
        kind: whether queries and keys are the same tokens.
        calls: how many attention calls were seen.
        summaries: of each statistic, by its name.
        missing: statistic -> why this layer does not have it.
    """

    name: str
    num_heads: int
    heads: tuple[int, ...]
    kind: Literal["self", "cross"]
    calls: int
    summaries: Mapping[str, Summary]
    missing: Mapping[str, str]

    def difference(self, other: LayerScan) -> str | None:
        """The first thing that keeps two from being scans of one layer; None where nothing does."""
        if self.name != other.name:
            return f"layer {self.name}, and {other.name} in its place"
        for own, others in (
            (f"{self.kind} attention", f"{other.kind} attention"),
            (f"{self.num_heads} heads", f"{other.num_heads} heads"),
            (f"heads {_listed(self.heads)}", f"heads {_listed(other.heads)}"),
        ):
            if own != others:
                return f"layer {self.name} with {own}, and with {others}"
        for name in [*self.summaries, *other.summaries]:
            for has, lacks in ((self, other), (other, self)):
                if name in has.summaries and name not in lacks.summaries:
                    why = lacks.missing.get(name, "it was not asked for")
                    return f"layer {self.name} with {name}, and without: {why}"
        return None


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class HeadScan:
    """What every head of a model did while it read; ``headwise.scan`` makes one.

    ``scan["entropy"]`` is a tensor (layers, heads), ``scan.top("induction")`` names heads, and
    ``print(scan)`` draws a picture. It is never changed: `merge` gives a new one.

    Attributes:
        model: what was scanned, such as "BertModel".
        sequences: how many were read.
        tokens: how many were read, without padding.
        notes: what could not be reached.
        statistics: what was asked of each layer.
        layer_scans: what was seen, a layer each, in call order.

    Raises:
        OptionError: two statistics of one name, or a layer that neither has a statistic nor says
            why it is missing.
    """

    model: str
    sequences: int
    tokens: int
    notes: tuple[str, ...]
    statistics: tuple[Statistic, ...]
    layer_scans: tuple[LayerScan, ...]

    def __post_init__(self) -> None:
        names = self.names
        if twice := [name for index, name in enumerate(names) if name in names[:index]]:
            raise OptionError(
                saw=f"two statistics with the name {twice[0]}",
                needed="a name for each statistic",
                do="leave one out, or name it otherwise in its Definition",
            )
        for layer in self.layer_scans:
            said = {*layer.summaries, *layer.missing}
            if unsaid := [name for name in names if name not in said]:
                raise OptionError(
                    saw=f"layer {layer.name} without {unsaid[0]}, and without a reason",
                    needed="a summary of each statistic, or why it is missing",
                    do=f"put {unsaid[0]} into LayerScan.missing",
                )

    # ---- to read ----------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in call order."""
        return tuple(layer.name for layer in self.layer_scans)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the statistics."""
        return tuple(statistic.definition.name for statistic in self.statistics)

    @property
    def measured(self) -> tuple[str, ...]:
        """Those that at least one layer has."""
        seen = {name for layer in self.layer_scans for name in layer.summaries}
        return tuple(name for name in self.names if name in seen)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Those that at least one layer has, and that are one number a head."""
        return tuple(name for name in self.measured if not self.definition(name).axes)

    @property
    def heads(self) -> list[tuple[str, int, int]]:
        """Each head that was looked at: its layer's name, its layer's index, its number."""
        return [
            (layer.name, index, head)
            for index, layer in enumerate(self.layer_scans)
            for head in layer.heads
        ]

    def definition(self, name: str) -> Definition:
        """What a statistic means.

        Raises:
            OptionError: the scan has no such statistic.
        """
        return self._statistic(name).definition

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> Tensor:
        """A statistic of all heads.

        Returns:
            (layers, heads, *axes) in float64. The heads are as many as the largest layer has, and
            entry [l, h] is head h of layer l; so is an axis "other_head". It is NaN where there is
            no such head, where the head was not looked at, where the layer lacks the statistic,
            and where nothing counted.

        Raises:
            OptionError: the scan has no such statistic, or no layer could have it.
        """
        statistic = self._statistic(name)
        heads = max((layer.num_heads for layer in self.layer_scans), default=0)
        found = {
            index: _by_number(statistic, layer, heads)
            for index, layer in enumerate(self.layer_scans)
            if name in layer.summaries
        }
        if not found:
            raise self._missing_everywhere(name)
        # Layers may differ along any axis, as they do in their heads.
        sizes = [
            max(axis) for axis in zip(*(rows.shape[1:] for rows in found.values()), strict=True)
        ]
        whole = torch.full((len(self.layers), heads, *sizes), torch.nan, dtype=torch.float64)
        for index, rows in found.items():
            heads_of = list(self.layer_scans[index].heads)
            place: tuple[Any, ...] = (index, heads_of, *map(slice, rows.shape[1:]))
            whole[place] = rows
        return whole

    def top(self, name: str, n: int = 5, *, lowest: bool = False) -> list[HeadValue]:
        """Return the ``n`` heads with the most of a statistic, the first of equals first.

        `ScanDiff.top` has the same signature. Heads without a value are left out.

        Args:
            name: a statistic with one number a head.
            n: how many heads.
            lowest: True for the heads with the least.

        Raises:
            OptionError: the scan has no such statistic, no layer could have it, or it is not one
                number a head.
        """
        return top_of(self.layers, self._scalar(name), n, lowest=lowest)

    def table(self) -> list[Row]:
        """A row for each head that was looked at.

        It holds layer (its name), layer_index and head, and the statistics of `scalars`; NaN where
        a layer lacks one.
        """
        return table_of(self.heads, {name: self[name] for name in self.scalars})

    def to_pandas(self) -> Any:
        """The `table` as a pandas.DataFrame.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        pandas = require("pandas", purpose="which holds the table", pip="pandas")
        columns = ["layer", "layer_index", "head", *self.scalars]
        return pandas.DataFrame(self.table(), columns=columns)

    def __repr__(self) -> str:
        from headwise.scanning.terminal import picture

        return picture(self)

    # ---- to put together --------------------------------------------------------------------

    def merge(self, *others: HeadScan) -> HeadScan:
        """One scan of all that was read, as if in one go.

        What a summary counts is exact. What it sums is summed in float64 in the given order, so
        the same scans in the same order give the same bits.

        Raises:
            OptionError: scans of other models, layers, heads or statistics; the first difference
                is named.
        """
        everyone = (self, *others)
        for place, other in enumerate(others, start=2):
            if (difference := self.difference(other)) is not None:
                raise OptionError(
                    saw=f"scans 1 and {place} of {len(everyone)}: {difference}",
                    needed="scans of the same layers, heads and statistics",
                    do="merge scans of one model that were made with the same options; "
                    "HeadScan.diff compares two models",
                )
        return HeadScan(
            model=self.model,
            sequences=sum(scan.sequences for scan in everyone),
            tokens=sum(scan.tokens for scan in everyone),
            notes=tuple(dict.fromkeys(note for scan in everyone for note in scan.notes)),
            statistics=self.statistics,
            layer_scans=tuple(
                self._merged(layers)
                for layers in zip(*(scan.layer_scans for scan in everyone), strict=True)
            ),
        )

    def difference(self, other: HeadScan) -> str | None:
        """The first thing that keeps two from being merged; None where nothing does."""
        if self.model != other.model:
            return f"a {self.model}, and a {other.model}"
        if (first := _difference_of_statistics(self, other)) is not None:
            return first
        for has, lacks in ((self, other), (other, self)):
            if alone := [name for name in has.layers if name not in lacks.layers]:
                return f"layer {alone[0]}, which only one of them saw"
        if len(self.layers) != len(other.layers):
            return f"{len(self.layers)} layers, and {len(other.layers)}"
        pairs = zip(self.layer_scans, other.layer_scans, strict=True)
        return next((found for one, two in pairs if (found := one.difference(two))), None)

    def diff(self, other: HeadScan, *, match: bool = False) -> ScanDiff:
        """What changed from this scan to another, head by head: ``other - self``.

        Layers are paired in their order, whatever they are called.

        Args:
            other: a scan with as many layers, of the same heads.
            match: first assign the heads of each layer to each other, by the least total distance;
                `headwise.scanning.difference` says what the distance is.

        Raises:
            OptionError: other layers or heads, or no statistic that both have.
            MissingExtraError: matching without scipy.
        """
        from headwise.scanning.difference import ScanDiff

        return ScanDiff.between(self, other, match=match)

    # ---- to keep ----------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> Path:
        """Write one .safetensors file and return its absolute path; folders on the way are made.

        The same scan gives the same bytes. A reader never meets half a file. The file has a digest
        of all that it holds, so `load` refuses a file that was damaged.

        Raises:
            OptionError: nothing can be written there, or the scan could not be loaded again.
        """
        from headwise.scanning.files import write

        return write(self, Path(path))

    @classmethod
    def load(cls, path: str | PathLike[str], statistics: Iterable[Statistic] = ()) -> HeadScan:
        """Read what `save` wrote.

        A file that headwise 0.1.0 wrote has no digest (format 1). It loads, and `notes` says so.

        Args:
            path: the file.
            statistics: those of the file that are not in headwise's catalogue.

        Raises:
            FileNotFoundError: there is no such file.
            OptionError: a file that is damaged or was edited, of another program or of a later
                headwise, or with a statistic that is not known or has another `Definition.id`.
        """
        from headwise.scanning.files import read

        fields, _ = read(Path(path), statistics)
        return cls(**fields)

    # ---- within -----------------------------------------------------------------------------

    def _statistic(self, name: str) -> Statistic:
        for statistic in self.statistics:
            if statistic.definition.name == name:
                return statistic
        raise unknown_statistic(
            name, self.names, do="take one of these, or name it in statistics= when you scan"
        )

    def _missing_everywhere(self, name: str) -> OptionError:
        reasons = dict.fromkeys(layer.missing[name] for layer in self.layer_scans)
        return OptionError(
            saw=f"{name}, which no layer has: {'; '.join(reasons) or 'no layer was seen'}",
            needed=f"a statistic that was measured: {', '.join(self.measured) or 'none was'}",
            do="give the scan what the statistic needs: "
            + (", ".join(self._statistic(name).needs) or "a layer to look at"),
        )

    def _scalar(self, name: str) -> Tensor:
        if axes := self.definition(name).axes:
            raise OptionError(
                saw=f"{name}, which has {' x '.join(axes)} numbers for each head",
                needed=f"one number for each head: {', '.join(self.scalars)}",
                do=f"reduce scan[{name!r}] yourself",
            )
        return self[name]

    def _merged(self, layers: tuple[LayerScan, ...]) -> LayerScan:
        first = layers[0]
        summaries = {
            name: statistic.merge([layer.summaries[name] for layer in layers])
            for statistic in self.statistics
            if (name := statistic.definition.name) in first.summaries
        }
        missing = {
            name: "; ".join(dict.fromkeys(layer.missing[name] for layer in layers))
            for name in self.names
            if name not in summaries
        }
        return LayerScan(
            name=first.name,
            num_heads=first.num_heads,
            heads=first.heads,
            kind=first.kind,
            calls=sum(layer.calls for layer in layers),
            summaries=summaries,
            missing=missing,
        )


def _by_number(statistic: Statistic, layer: LayerScan, heads: int) -> Tensor:
    """(looked at, *axes) with an axis of other heads as long as all heads, each at its number."""
    rows = statistic.result(layer.summaries[statistic.definition.name])
    for axis, name in enumerate(statistic.definition.axes, start=1):
        if name == OTHER_HEAD:
            shape = [*rows.shape[:axis], heads, *rows.shape[axis + 1 :]]
            wide = rows.new_full(shape, torch.nan)
            rows = wide.index_copy_(axis, torch.tensor(layer.heads), rows)
    return rows


def _difference_of_statistics(one: HeadScan, two: HeadScan) -> str | None:
    for has, lacks in ((one, two), (two, one)):
        if alone := [name for name in has.names if name not in lacks.names]:
            return f"statistic {alone[0]}, which only one of them has"
    for name in one.names:
        own, other = one.definition(name), two.definition(name)
        if own.id != other.id:
            return f"{name} as {own.formula} ({own.id}), and as {other.formula} ({other.id})"
    return None


def _listed(heads: tuple[int, ...]) -> str:
    return ", ".join(map(str, heads))
