"""Difference of two scans, head by head, with an optional assignment of heads to heads.

The distance between two heads is the mean over statistics of

    sqrt(mean over the statistic's entries of (x - y)²) / mean of the same over all pairs,

where the pairs are those of a head of one scan with a head of the other in the same layer, taken
over all layers. So the unit and the number of entries of a statistic do not matter: a distance of 1
is the mean over the pairs of heads of a layer. An entry that neither head has does not count. An
entry that only one of them has counts as 1. A statistic that is the same for all pairs adds 0.
Statistics that compare heads are left out, since they change with the order of the heads.

Statistics that name keys and tokens, such as the keys that receive most, have no difference; nor
have maps of texts of other lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.layer import (
    OTHER_HEAD,
    SCANNED_HEAD,
    HeadValue,
    Row,
    ScanReadings,
    make_table_rows_by_head,
    top_heads,
)
from headwise.support.files import write_whole
from headwise.support.lazy import Displayed, render_form, require_package

MOST_CHANGES = 8  # that are listed
FIELD = "field"  # the axis of a statistic that names keys and tokens
APART = "apart"  # the distance of two heads, among the columns of a table


@dataclass(frozen=True)
class HeadChange:
    """The change of one statistic of one head, from `ScanDiff.changes`.

    Attributes:
        statistic: name of the statistic.
        before: the head in the first scan, with its value; NaN without one.
        after: its partner in the second scan, with its value.
        size: the absolute change as a part of the span of the statistic's scale, 0 to 1.
        sentence: such as "previous token of layer 1, head 3: 87 % before, 12 % after".
    """

    statistic: str
    before: HeadValue
    after: HeadValue
    size: float
    sentence: str


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class ScanDiff(Displayed):
    """The difference of two scans with equal numbers of layers and heads, from `HeadScan.diff`.

    Attributes:
        before: the first scan, which gives the names of the layers.
        after: the second scan.
        names: the statistics that both scans have and that can be subtracted. Maps of other blocks,
            as of texts of other lengths, cannot.
        assignment: the head of ``after`` that is compared with each scanned head of each layer.
    """

    before: ScanReadings
    after: ScanReadings
    names: tuple[str, ...]
    assignment: tuple[tuple[int, ...], ...]

    @classmethod
    def between(cls, before: ScanReadings, after: ScanReadings, *, match: bool) -> ScanDiff:
        """Return the difference of two scans, as `HeadScan.diff` does."""
        _require_same_heads(before, after)
        names = _shared_statistics(before, after)
        assignment = tuple(layer.heads for layer in before.layer_scans)
        if match:
            purpose = "which assigns heads to heads"
            scipy = require_package("scipy.optimize", purpose=purpose, pip="scipy")
            distances = _head_distances(before, after, names)  # of which the total is to be least
            columns = [scipy.linear_sum_assignment(each.numpy())[1].tolist() for each in distances]
            pairs = zip(assignment, columns, strict=True)
            assignment = tuple(tuple(heads[n] for n in chosen) for heads, chosen in pairs)
        return cls(before=before, after=after, names=names, assignment=assignment)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the statistics with one number for each head."""
        return tuple(name for name in self.names if not self.before.definition(name).axes)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, as in ``before``."""
        return self.before.layers

    def __repr__(self) -> str:
        partners = [head for layer in self.assignment for head in layer]
        pairs = zip(self.before.heads, partners, strict=True)
        moved = sum(head != partner for (_, _, head), partner in pairs)
        models = dict.fromkeys((self.before.model, self.after.model))
        matched = f", matched={moved} to another head" if moved else ""
        sizes = f"layers={len(self.layers)}, heads={len(partners)}, statistics={len(self.names)}"
        return f"ScanDiff({' to '.join(models)}, {sizes}{matched})"

    def save_page(
        self,
        path: str | PathLike[str],
        *,
        names: tuple[str, str] = ("before", "after"),
        title: str | None = None,
        name_of: Callable[[int], str] | None = None,
    ) -> Path:
        """Write the viewer's page of both scans, and return its path.

        A is ``before`` and B is ``after``: a change is B − A, as everywhere.

        Args:
            path: the HTML file; it is replaced as a whole.
            names: names of the two scans.
            title: the name of the model; its class if None.
            name_of: returns the text of a token id; without it, tokens are numbers.

        Raises:
            OptionError: nothing can be written there.
        """
        page = render_form(self, "page", names=names, title=title, name_of=name_of)
        return write_whole(Path(path), page)

    def plot(self, statistic: str | None = None, *, ax: Any = None, width: float = 3.35) -> Any:
        """Return a matplotlib Figure of the change of a statistic: layers x heads.

        The colours are centred on 0.

        Args:
            statistic: the statistic, or "apart" for the distance over all; the one with the largest
                change if None.
            ax: matplotlib axes to draw into, instead of a new figure.
            width: of a new figure, in inches.

        Raises:
            OptionError: a statistic that one of the scans lacks, or with several numbers a head.
            MissingExtraError: matplotlib is not installed.
        """
        return render_form(self, "figure", statistic=statistic, ax=ax, width=width)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> Tensor:
        """Return ``after - before``, (layers, heads, *axes) in float64; NaN where one has no value.

        Raises:
            OptionError: a statistic that one of the scans lacks.
        """
        if name not in self.names:
            both = f"a statistic that both scans have: {', '.join(self.names)}"
            raise OptionError(saw=f"statistic {name!r}", needed=both, do="choose from these")
        return self.partner_values(name) - self.before[name]

    def partner_values(self, name: str) -> Tensor:
        """Return a statistic of ``after``, each head in the place of its partner in ``before``."""
        before, after = self.before[name], self.after[name]
        partners = torch.full_like(before, torch.nan)
        places = {(layer, head): n for n, (_, layer, head) in enumerate(self.after.heads)}
        for index, layer in enumerate(self.before.layer_scans):
            values = after[index, list(self.assignment[index])]
            for axis, axis_name in enumerate(self.before.definition(name).axes, start=1):
                if axis_name == OTHER_HEAD:
                    order = torch.arange(values.shape[axis])
                    order[list(layer.heads)] = torch.tensor(self.assignment[index])
                    values = values.index_select(axis, order)
                if axis_name == SCANNED_HEAD:
                    pairs = ((n, head) for n, x in enumerate(self.assignment) for head in x)
                    order = torch.tensor([places[pair] for pair in pairs])
                    values = values.index_select(axis, order)
            partners[index, list(layer.heads)] = values
        return partners

    @cached_property
    def apart(self) -> Float[Tensor, "layers heads"]:
        """The distance of each head from its partner, as the docstring of the module defines it."""
        scans = self.before.layer_scans
        heads = max(layer.num_heads for layer in scans)
        whole = torch.full((len(self.layers), heads), torch.nan, dtype=torch.float64)
        distances = _head_distances(self.before, self.after, self.names)
        for index, (layer, distance) in enumerate(zip(scans, distances, strict=True)):
            column = [layer.heads.index(head) for head in self.assignment[index]]
            whole[index, list(layer.heads)] = distance[range(len(column)), column]
        return whole

    def top(self, name: str = APART, n: int = 5, *, lowest: bool = False) -> list[HeadValue]:
        """Return the ``n`` heads that changed most, the first of equals first.

        The signature is that of `HeadScan.top`. Heads without a value are left out.

        Args:
            name: "apart" for the distance over all statistics; or a statistic with one number a
                head, ranked by absolute change. The values are the changes with their signs.
            n: how many heads.
            lowest: True for the heads that changed least.

        Raises:
            OptionError: a name that is neither "apart" nor a statistic that both scans have with
                one number a head.
        """
        if name == APART:
            return top_heads(self.layers, self.apart, n, lowest=lowest)
        if name not in self.names:
            raise OptionError(
                saw=f"name={name!r}, which is no statistic of this comparison",
                needed=f"{APART!r}, or a statistic that both scans have: {', '.join(self.names)}",
                do=f"diff.top({APART!r}, 5) for the heads that changed most over all statistics",
            )
        change = self[name]
        if axes := self.before.definition(name).axes:
            saw = f"{name}, which has {' x '.join(axes)} numbers for each head"
            needed = "one number for each head"
            raise OptionError(saw=saw, needed=needed, do=f"reduce diff[{name!r}] yourself")
        chosen = top_heads(self.layers, change.abs(), n, lowest=lowest)
        return [head._replace(value=float(change[head.layer_index, head.head])) for head in chosen]

    def changes(
        self, n: int = MOST_CHANGES, *, names: tuple[str, str] = ("before", "after")
    ) -> list[HeadChange]:
        """Return the ``n`` largest changes of statistics with one number a head, in sentences.

        The size of a change is its part of the statistic's scale in the pictures: 1 for a share,
        else the range of both scans. A head whose value is in one scan alone has changed by the
        whole scale, and comes last; a layer without any value in one of them is left out. So is a
        change that is smaller than the digits of its sentence, and all but the first of statistics
        with the same numbers.

        Args:
            n: how many changes.
            names: names of the two scans in the sentences.
        """
        changes: list[HeadChange] = render_form(self, "changes", n=n, names=names)
        return changes

    def table(self) -> list[Row]:
        """Return a row for each head: layer, layer_index, head, and its partner as ``after``.

        Then come the distance ``apart`` and the change of each statistic with one number a head.
        """
        partners = torch.full(self.apart.shape, -1)
        for index, layer in enumerate(self.before.layer_scans):
            partners[index, list(layer.heads)] = torch.tensor(self.assignment[index])
        changes = {name: self[name] for name in self.scalars}
        columns = {"after": partners, APART: self.apart, **changes}
        return make_table_rows_by_head(self.before.heads, columns)


def _require_same_heads(before: ScanReadings, after: ScanReadings) -> None:
    first, second = before.layer_scans, after.layer_scans
    differences = [] if first and second else ["scans without layers"]
    if len(first) != len(second):
        differences = [f"{len(first)} layers, and {len(second)}"]
    for a, b in zip(first, second, strict=False):
        if (a.num_heads, a.heads) != (b.num_heads, b.heads):
            both = [f"{x.name} with {len(x.heads)} of {x.num_heads}" for x in (a, b)]
            lists = f": {list(a.heads)}, and {list(b.heads)}"
            lists = lists if len(a.heads) == len(b.heads) else ""
            differences.append(f"{both[0]} heads scanned, and {both[1]}{lists}")
    if differences:
        needed = "scans with the same number of layers and the same heads"
        do = "compare models of one shape, scanned with the same layers= and heads="
        raise OptionError(saw=differences[0], needed=needed, do=do)


def _shared_statistics(before: ScanReadings, after: ScanReadings) -> tuple[str, ...]:
    names = [name for name in before.measured if FIELD not in before.definition(name).axes]
    # Maps of texts of other lengths have other numbers of entries.
    names = [
        name
        for name in names
        if name in after.measured
        and all(
            a.summaries[name][part].shape == b.summaries[name][part].shape
            for a, b in zip(before.layer_scans, after.layer_scans, strict=True)
            if name in a.summaries and name in b.summaries
            for part in a.summaries[name].keys() & b.summaries[name].keys()
        )
    ]
    do = "scan both models with the same statistics"
    for name in names:
        if difference := before.definition(name).difference_of_meaning(after.definition(name)):
            needed = "the same definition of each statistic"
            raise OptionError(saw=difference, needed=needed, do=do)
    if not names:
        needed = f"one of {', '.join(before.measured) or 'none'} in the second scan"
        raise OptionError(saw="scans with no statistic in common", needed=needed, do=do)
    return tuple(names)


def _head_distances(
    before: ScanReadings, after: ScanReadings, names: tuple[str, ...]
) -> list[Tensor]:
    scanned = [list(layer.heads) for layer in before.layer_scans]
    totals = [torch.zeros(len(heads), len(heads), dtype=torch.float64) for heads in scanned]
    counts = [torch.zeros_like(total) for total in totals]
    for name in names:
        if {OTHER_HEAD, SCANNED_HEAD} & {*before.definition(name).axes}:
            continue
        first, second = (scan[name][..., None].flatten(2) for scan in (before, after))
        rows = [(first[n, heads], second[n, heads]) for n, heads in enumerate(scanned)]
        gaps = [_gaps_of_head_pairs(*pair) for pair in rows]
        # The mean over all pairs that have an entry in common; 1 where they are all the same.
        apart = torch.cat([(squares / both)[both > 0].sqrt() for squares, both, _ in gaps])
        scale = (float(apart.mean()) if apart.numel() else 0.0) or 1.0
        for (squares, both, alone), total, count in zip(gaps, totals, counts, strict=True):
            entries = both + alone
            total += ((squares / scale**2 + alone) / entries.clamp(min=1)).sqrt()
            count += entries > 0
    return [total / count.clamp(min=1) for total, count in zip(totals, counts, strict=True)]


def _gaps_of_head_pairs(
    first: Float[Tensor, "heads entries"], second: Float[Tensor, "others entries"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (heads, others): summed squared differences, and the entries of both or of one."""
    squares, both, alone = [], [], []
    for head in first:  # all pairs at once would be heads times as large as the statistic
        gap = head - second
        is_real = gap.isfinite()
        squares.append(gap.masked_fill(~is_real, 0.0).square().sum(-1))
        both.append(is_real.sum(-1))
        alone.append((head.isfinite() ^ second.isfinite()).sum(-1))
    return torch.stack(squares), torch.stack(both), torch.stack(alone)
