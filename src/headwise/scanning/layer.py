"""Summaries of each scanned layer, and access to every statistic of every head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.call import CapturedCall
from headwise.scanning.statistics.catalogue import KNOWN_FOR, PICTURED, unknown_statistic_error
from headwise.scanning.statistics.statistic import Definition, Statistic, Summary
from headwise.scanning.text import ScannedText
from headwise.support.extras import require_package
from headwise.support.integers import convert_to_int_or_none
from headwise.support.text import describe_value

OTHER_HEAD = "other_head"  # the axis of a statistic that compares the heads of a layer
Row = dict[str, str | int | float]


class HeadValue(NamedTuple):
    """Named tuple: the value of a statistic for one head.

    Attributes:
        layer: name of the layer.
        layer_index: row of the layer in the scan, from 0.
        head: number of the head in its layer, from 0.
        value: in the unit of the statistic.
    """

    layer: str
    layer_index: int
    head: int
    value: float


@dataclass(frozen=True)
class StandoutHead:
    """A head that stands out by a statistic.

    Attributes:
        head: the head, with its value.
        sentence: what it does, such as "attends most widely: to about 24 of 37 tokens".
        middle: the value of the middle head, in words.
        statistic: name of the statistic.
    """

    head: HeadValue
    sentence: str
    middle: str
    statistic: str


@dataclass(eq=False, kw_only=True, repr=False)
class LayerScan:
    """Summaries of the statistics of one layer, updated with every attention call.

    Attributes:
        name: the layer's name in the model, such as "encoder.layer.3.attention.self".
        num_heads: number of heads of the layer.
        heads: the selected heads; summaries have a row for each, in this order.
        kind: "self" if queries and keys are the same tokens, else "cross".
        calls: number of attention calls.
        summaries: the summary of each statistic, by its name.
        missing: the reason why this layer lacks a statistic, by its name.
        query_text: number of the text in `HeadScan.texts` that the queries read; None if unknown.
        key_text: the same for the keys.
    """

    name: str
    num_heads: int
    heads: tuple[int, ...]
    kind: Literal["self", "cross"]
    calls: int = 0
    summaries: dict[str, Summary] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    query_text: int | None = None
    key_text: int | None = None

    def __repr__(self) -> str:
        heads = f"{len(self.heads)} of {self.num_heads}"
        count = str(self.num_heads) if len(self.heads) == self.num_heads else heads
        sizes = {"heads": count, "calls": self.calls, "statistics": len(self.summaries)}
        sizes |= {"missing": len(self.missing)} if self.missing else {}
        words = ", ".join(f"{name}={value}" for name, value in sizes.items())
        return f"LayerScan({self.name!r}, {self.kind} attention, {words})"

    @classmethod
    def empty_of_call(cls, call: CapturedCall, heads: tuple[int, ...] | None) -> LayerScan:
        """Return an empty scan of a call's layer, for these heads or all.

        Raises:
            OptionError: the layer does not have these heads.
        """
        count = call.matrix.shape[1]
        if heads is not None and any(not 0 <= head < count for head in heads):
            raise OptionError(
                saw=f"heads {describe_value(list(heads))} of {call.layer}",
                needed=f"heads from 0 to {count - 1}: the layer has {count}",
                do=f"heads=[{count - 1}], or layers= with layers that have these heads",
            )
        return cls(
            name=call.layer,
            num_heads=count,
            heads=tuple(range(count)) if heads is None else heads,
            kind="cross" if call.is_cross else "self",
        )

    def add_summary(self, statistic: Statistic, summary: Summary) -> None:
        """Merge the summary of a further call into the summary of this layer."""
        name, before = statistic.definition.name, self.summaries
        both = [before[name], summary] if name in before else [summary]
        self.summaries[name] = statistic.merge(both)

    @classmethod
    def merged(cls, layers: Sequence[LayerScan], statistics: Iterable[Statistic]) -> LayerScan:
        """Merge several scans of one layer, between which `reason_not_mergeable` is None."""
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

    def reason_not_mergeable(self, other: LayerScan, statistics: Iterable[Statistic]) -> str | None:
        """Return the first difference that prevents a merge with ``other``, or None."""
        if self.name != other.name:
            return f"layer {self.name}, and {other.name} in its place"
        for here, there in (
            (f"{self.kind} attention", f"{other.kind} attention"),
            (f"{self.num_heads} heads", f"{other.num_heads} heads"),
            (f"heads {_comma_list(self.heads)}", f"heads {_comma_list(other.heads)}"),
        ):
            if here != there:
                return f"layer {self.name} with {here}, and with {there}"
        for name in [*self.summaries, *other.summaries]:
            for has, lacks in ((self, other), (other, self)):
                if name in has.summaries and name not in lacks.summaries:
                    reason = lacks.missing.get(name, "it was not requested")
                    return f"layer {self.name} with {name}, and without: {reason}"
        for statistic in statistics:
            name = statistic.definition.name
            if name not in self.summaries:
                continue
            difference = statistic.reason_not_mergeable(self.summaries[name], other.summaries[name])
            if difference is not None:
                return f"layer {self.name} with {difference}"
        return None


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class ScanReadings:
    """Statistics of the heads of a model as tensors and tables; the base of `HeadScan`."""

    model: str
    sequences: int
    tokens: int
    notes: tuple[str, ...]
    statistics: tuple[Statistic, ...]
    layer_scans: tuple[LayerScan, ...]
    texts: tuple[ScannedText, ...] = ()

    def __post_init__(self) -> None:
        names = self.names
        if twice := [name for index, name in enumerate(names) if name in names[:index]]:
            raise OptionError(
                saw=f"two statistics with the name {twice[0]}",
                needed="a name for each statistic",
                do="leave one out, or change the name in its Definition",
            )
        for layer in self.layer_scans:
            accounted = {*layer.summaries, *layer.missing}
            if lacking := [name for name in names if name not in accounted]:
                raise OptionError(
                    saw=f"layer {layer.name} without {lacking[0]}, and without a reason",
                    needed="a summary of each statistic, or the reason why it is missing",
                    do=f"put {lacking[0]} into LayerScan.missing",
                )

    # ---- access -----------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in call order."""
        return tuple(layer.name for layer in self.layer_scans)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the requested statistics."""
        return tuple(statistic.definition.name for statistic in self.statistics)

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of the statistics that at least one layer has."""
        present = {name for layer in self.layer_scans for name in layer.summaries}
        return tuple(name for name in self.names if name in present)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the measured statistics with one number for each head."""
        return tuple(name for name in self.measured if not self.definition(name).axes)

    @property
    def characterising_scalars(self) -> tuple[str, ...]:
        """Names of the scalars that can characterise a head, in the order of the reports.

        The catalogue lists them; your own statistics are included if they have `Definition.most`.
        """
        others = (n for n in self.scalars if n not in PICTURED and self.definition(n).most)
        return (*(name for name in KNOWN_FOR if name in self.scalars), *others)

    @property
    def heads(self) -> list[tuple[str, int, int]]:
        """Each scanned head as (layer name, layer index, head)."""
        return [
            (layer.name, index, head)
            for index, layer in enumerate(self.layer_scans)
            for head in layer.heads
        ]

    def definition(self, name: str) -> Definition:
        """Return the definition of a statistic.

        Raises:
            OptionError: the scan has no such statistic.
        """
        return self._find_statistic(name).definition

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> Tensor:
        """Return a statistic of all heads.

        Returns:
            (layers, heads, *axes) in float64. The axis of heads, like an axis "other_head", is as
            long as the largest layer needs; entry [l, h] is head h of layer l. It is NaN for a
            head that does not exist or was not scanned, for a layer without the statistic, and
            where nothing counted.

        Raises:
            OptionError: the scan has no such statistic, or no layer has it.
        """
        statistic = self._find_statistic(name)
        heads = max((layer.num_heads for layer in self.layer_scans), default=0)
        results = {
            index: _expand_other_head_axis(statistic, layer, heads)
            for index, layer in enumerate(self.layer_scans)
            if name in layer.summaries
        }
        if not results:
            raise self._missing_everywhere_error(name)
        # The length of any axis may differ between layers, as the number of heads may.
        sizes = [
            max(axis) for axis in zip(*(rows.shape[1:] for rows in results.values()), strict=True)
        ]
        whole = torch.full((len(self.layers), heads, *sizes), torch.nan, dtype=torch.float64)
        for index, rows in results.items():
            scanned = list(self.layer_scans[index].heads)
            target: tuple[Any, ...] = (index, scanned, *map(slice, rows.shape[1:]))
            whole[target] = rows
        return whole

    def top(self, name: str, n: int = 5, *, lowest: bool = False) -> list[HeadValue]:
        """Return the ``n`` heads with the most of a statistic, the first of equals first.

        `ScanDiff.top` has the same signature. Heads without a value are left out.

        Args:
            name: a statistic with one number a head.
            n: how many heads.
            lowest: True for the heads with the least.

        Raises:
            OptionError: the scan has no such statistic, no layer has it, or it is not one number
                a head.
        """
        return top_heads(self.layers, self._require_scalar(name), n, lowest=lowest)

    def table(self) -> list[Row]:
        """Return a row for each scanned head.

        A row holds layer (the name), layer_index, head and the statistics of `scalars`; NaN where
        a layer lacks a statistic.
        """
        return make_table_rows_by_head(self.heads, {name: self[name] for name in self.scalars})

    def to_pandas(self) -> Any:
        """Return the `table` as a pandas.DataFrame.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        pandas = require_package("pandas", purpose="which holds the table", pip="pandas")
        columns = ["layer", "layer_index", "head", *self.scalars]
        return pandas.DataFrame(self.table(), columns=columns)

    # ---- checks -----------------------------------------------------------------------------

    def _find_statistic(self, name: str) -> Statistic:
        for statistic in self.statistics:
            if statistic.definition.name == name:
                return statistic
        raise unknown_statistic_error(
            name, self.names, do="take one of these, or name it in statistics= when you scan"
        )

    def _missing_everywhere_error(self, name: str) -> OptionError:
        reasons = dict.fromkeys(layer.missing[name] for layer in self.layer_scans)
        return OptionError(
            saw=f"statistic {name!r}, which no layer has: "
            f"{'; '.join(reasons) or 'the scan has no layers'}",
            needed=f"a statistic that was measured: {', '.join(self.measured) or 'none was'}",
            do="scan a model and inputs with what the statistic needs: "
            + (", ".join(self._find_statistic(name).needs) or "an attention layer"),
        )

    def _require_scalar(self, name: str) -> Tensor:
        if axes := self.definition(name).axes:
            raise OptionError(
                saw=f"{name}, which has {' x '.join(axes)} numbers for each head",
                needed=f"one number for each head: {', '.join(self.scalars)}",
                do=f"reduce scan[{name!r}] yourself",
            )
        return self[name]


def _expand_other_head_axis(statistic: Statistic, layer: LayerScan, heads: int) -> Tensor:
    """Return (scanned heads, *axes), with an axis "other_head" indexed by head number."""
    rows = statistic.result(layer.summaries[statistic.definition.name])
    for axis, name in enumerate(statistic.definition.axes, start=1):
        if name == OTHER_HEAD:
            shape = [*rows.shape[:axis], heads, *rows.shape[axis + 1 :]]
            wide = rows.new_full(shape, torch.nan)
            rows = wide.index_copy_(axis, torch.tensor(layer.heads), rows)
    return rows


def _comma_list(heads: tuple[int, ...]) -> str:
    return ", ".join(map(str, heads))


def top_heads(layers: tuple[str, ...], values: Tensor, n: int, *, lowest: bool) -> list[HeadValue]:
    """Return the ``n`` largest of (layers, heads), or the smallest; NaN is left out."""
    count = convert_to_int_or_none(n)
    if count is None or count < 0:
        raise OptionError(
            saw=f"n={describe_value(n)}",
            needed="a number of heads, from 0",
            do="n=5",
        )
    flat = values.flatten()
    order = flat.argsort(descending=not lowest, stable=True).tolist()
    has_value = (~flat.isnan()).tolist()
    ranked = [position for position in order if has_value[position]][:count]
    heads = []
    for position in ranked:
        index, head = divmod(position, values.shape[1])
        heads.append(HeadValue(layers[index], index, head, float(flat[position])))
    return heads


def make_table_rows_by_head(
    heads: Iterable[tuple[str, int, int]], columns: Mapping[str, Tensor]
) -> list[Row]:
    """Return a row for each head, with its entry of each column (layers, heads)."""
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
