"""What was seen of each layer, and every statistic of every head, to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.captured_call import CapturedCall
from headwise.scanning.statistics.catalogue import KNOWN_FOR, PICTURED, unknown_statistic
from headwise.scanning.statistics.statistic import Definition, Statistic, Summary
from headwise.support.axes import describe_value
from headwise.support.integers import as_count
from headwise.support.optional_imports import require

OTHER_HEAD = "other_head"  # the axis of a statistic that sets the heads of a layer side by side
Row = dict[str, str | int | float]


class HeadValue(NamedTuple):
    """One head's number."""

    layer: str
    layer_index: int
    head: int
    value: float


@dataclass(eq=False, kw_only=True)
class LayerScan:
    """What was seen of one layer. A scan fills it, call by call, and a `HeadScan` keeps it.

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
    calls: int = 0
    summaries: dict[str, Summary] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, call: CapturedCall, heads: tuple[int, ...] | None) -> LayerScan:
        """Return the scan of a call's layer, before any call, of these heads or all.

        Raises:
            OptionError: the layer does not have these heads.
        """
        count = call.matrix.shape[1]
        if heads is not None and any(not 0 <= head < count for head in heads):
            raise OptionError(
                saw=f"heads {describe_value(list(heads))} of {call.layer}",
                needed=f"heads from 0 to {count - 1}: the layer has {count}",
                do="name heads that every layer has, or layers that have these heads",
            )
        return cls(
            name=call.layer,
            num_heads=count,
            heads=tuple(range(count)) if heads is None else heads,
            kind="cross" if call.is_cross else "self",
        )

    def add(self, statistic: Statistic, summary: Summary) -> None:
        """Merge a summary of what was read next into that of what was read before."""
        name, before = statistic.definition.name, self.summaries
        both = [before[name], summary] if name in before else [summary]
        self.summaries[name] = statistic.merge(both)

    @classmethod
    def merged(cls, layers: Sequence[LayerScan], statistics: Iterable[Statistic]) -> LayerScan:
        """Return the scan of one layer from several scans of it, between which nothing differs."""
        first = layers[0]
        names = [s.definition.name for s in statistics]
        return replace(
            first,
            calls=sum(layer.calls for layer in layers),
            summaries={
                name: statistic.merge([layer.summaries[name] for layer in layers])
                for name, statistic in zip(names, statistics, strict=True)
                if name in first.summaries
            },
            missing={
                name: "; ".join(dict.fromkeys(layer.missing[name] for layer in layers))
                for name in names
                if name not in first.summaries
            },
        )

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
class ScanReadings:
    """The statistics of the heads of a model, as tensors and tables; `HeadScan` is one."""

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
    def known_for(self) -> tuple[str, ...]:
        """Scalars that a head is known for, in the order in which they are said.

        They are those of the catalogue, and others that have words for it (`Definition.most`).
        """
        others = (n for n in self.scalars if n not in PICTURED and self.definition(n).most)
        return (*(name for name in KNOWN_FOR if name in self.scalars), *others)

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


def _by_number(statistic: Statistic, layer: LayerScan, heads: int) -> Tensor:
    """(looked at, *axes) with an axis of other heads as long as all heads, each at its number."""
    rows = statistic.result(layer.summaries[statistic.definition.name])
    for axis, name in enumerate(statistic.definition.axes, start=1):
        if name == OTHER_HEAD:
            shape = [*rows.shape[:axis], heads, *rows.shape[axis + 1 :]]
            wide = rows.new_full(shape, torch.nan)
            rows = wide.index_copy_(axis, torch.tensor(layer.heads), rows)
    return rows


def _listed(heads: tuple[int, ...]) -> str:
    return ", ".join(map(str, heads))


def top_of(layers: tuple[str, ...], values: Tensor, n: int, *, lowest: bool) -> list[HeadValue]:
    """The ``n`` largest of (layers, heads), or the smallest; NaN is left out."""
    count = as_count(n)
    if count is None or count < 0:
        raise OptionError(
            saw=f"top(n={describe_value(n)})",
            needed="how many heads, from 0",
            do="e.g. n=5",
        )
    flat = values.flatten()
    order = flat.argsort(descending=not lowest, stable=True).tolist()
    real = [place for place in order if not flat[place].isnan()][:count]
    found = []
    for place in real:
        index, head = divmod(place, values.shape[1])
        found.append(HeadValue(layers[index], index, head, float(flat[place])))
    return found


def table_of(heads: Iterable[tuple[str, int, int]], columns: Mapping[str, Tensor]) -> list[Row]:
    """A row for each head (layer, its index, head), with its entry of each (layers, heads)."""
    lists = {name: column.tolist() for name, column in columns.items()}
    return [
        {
            "layer": layer,
            "layer_index": index,
            "head": head,
            **{name: rows[index][head] for name, rows in lists.items()},
        }
        for layer, index, head in heads
    ]
