"""What changed between two scans, head by head; also where heads have changed places.

The distance between two heads is the mean over statistics of

    sqrt(mean over the statistic's entries of (x - y)²) / mean of the same over all pairs,

where the pairs are those of a head of one scan with a head of the other in the same layer, taken
over all layers. So a statistic has the same say in nats as in tokens, a map of thousands of cells
the same say as a single number, and 1 is how far apart two heads of a layer are on average. An
entry that neither head has does not count; one that only one of them has counts as 1. A statistic
that is the same for all pairs has no say. Statistics that set the heads of a layer side by side
have no part in it, since they change with the order of the heads.

What names keys and tokens, such as the keys that receive most, has no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.errors import OptionError
from headwise.scanning.layer_scan import (
    OTHER_HEAD,
    HeadValue,
    Row,
    ScanReadings,
    table_of,
    top_of,
)
from headwise.support.optional_imports import require

FIELD = "field"  # the axis of a statistic that names keys and tokens
APART = "apart"  # the distance of two heads, among the columns of a table


@dataclass(frozen=True, eq=False, kw_only=True)
class ScanDiff:
    """A scan and another of as many layers and heads; `HeadScan.diff` makes one.

    Attributes:
        before: the first scan; layers and heads are called as in it.
        after: the other.
        names: the statistics that both have, and that are quantities.
        assignment: for each layer, and each head that was looked at, the head of ``after`` that it
            is compared with. Without matching, the same.
    """

    before: ScanReadings
    after: ScanReadings
    names: tuple[str, ...]
    assignment: tuple[tuple[int, ...], ...]

    @classmethod
    def between(cls, before: ScanReadings, after: ScanReadings, *, match: bool) -> ScanDiff:
        """As `HeadScan.diff`.

        Raises:
            OptionError: other layers or heads, or no statistic that both have.
            MissingExtraError: matching without scipy.
        """
        _require_same_heads(before, after)
        names = _names_of_both(before, after)
        assignment = tuple(layer.heads for layer in before.layer_scans)
        if match:
            distances = _distances(before, after, names)
            pairs = zip(assignment, distances, strict=True)
            assignment = tuple(_assigned(heads, distance) for heads, distance in pairs)
        return cls(before=before, after=after, names=names, assignment=assignment)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, as in ``before``."""
        return self.before.layers

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __getitem__(self, name: str) -> Tensor:
        """(layers, heads, *axes) in float64: ``after - before``, NaN where either has no value.

        Raises:
            OptionError: not a statistic that both have.
        """
        if name not in self.names:
            raise OptionError(
                saw=f"statistic {name!r}",
                needed=f"one that both scans have: {', '.join(self.names)}",
                do="take one of these",
            )
        before, after = self.before[name], self.after[name]
        partners = torch.full_like(before, torch.nan)
        for index, layer in enumerate(self.before.layer_scans):
            found = after[index, list(self.assignment[index])]
            for axis, what in enumerate(self.before.definition(name).axes, start=1):
                if what == OTHER_HEAD:
                    order = torch.arange(found.shape[axis])
                    order[list(layer.heads)] = torch.tensor(self.assignment[index])
                    found = found.index_select(axis, order)
            partners[index, list(layer.heads)] = found
        return partners - before

    @cached_property
    def apart(self) -> Float[Tensor, "layers heads"]:
        """The distance of each head from the one it is compared with, as the module says."""
        heads = max(layer.num_heads for layer in self.before.layer_scans)
        whole = torch.full((len(self.layers), heads), torch.nan, dtype=torch.float64)
        distances = _distances(self.before, self.after, self.names)
        for index, (layer, distance) in enumerate(
            zip(self.before.layer_scans, distances, strict=True)
        ):
            column = [layer.heads.index(head) for head in self.assignment[index]]
            whole[index, list(layer.heads)] = distance[range(len(column)), column]
        return whole

    def top(self, name: str = APART, n: int = 5, *, lowest: bool = False) -> list[HeadValue]:
        """Return the ``n`` heads that changed most, the first of equals first.

        The signature is that of `HeadScan.top`. Heads without a value are left out.

        Args:
            name: "apart", the distance of `apart`, which counts all statistics; or a statistic with
                one number a head. Its largest changes are found, up or down, and the values are
                the changes with their signs.
            n: how many heads.
            lowest: True for the heads that changed least.

        Raises:
            OptionError: neither "apart" nor a statistic that both have, or not one number a head.
        """
        if name == APART:
            return top_of(self.layers, self.apart, n, lowest=lowest)
        if name not in self.names:
            raise OptionError(
                saw=f"name={name!r}, which is no statistic of this comparison",
                needed=f"{APART!r}, or one that both scans have: {', '.join(self.names)}",
                do=f"diff.top({APART!r}, 5) for the heads that changed most in all of them",
            )
        change = self[name]
        if axes := self.before.definition(name).axes:
            raise OptionError(
                saw=f"{name}, which has {' x '.join(axes)} numbers for each head",
                needed="one number for each head",
                do=f"reduce diff[{name!r}] yourself",
            )
        chosen = top_of(self.layers, change.abs(), n, lowest=lowest)
        return [head._replace(value=float(change[head.layer_index, head.head])) for head in chosen]

    def table(self) -> list[Row]:
        """A row for each head: layer, layer_index, head, the head it is compared with as ``after``.

        Then how far apart the two are, and the change of each statistic with one number a head.
        """
        partners = torch.full(self.apart.shape, -1)
        for index, layer in enumerate(self.before.layer_scans):
            partners[index, list(layer.heads)] = torch.tensor(self.assignment[index])
        scalars = [name for name in self.names if not self.before.definition(name).axes]
        changes = {name: self[name] for name in scalars}
        return table_of(self.before.heads, {"after": partners, APART: self.apart, **changes})


def _require_same_heads(before: ScanReadings, after: ScanReadings) -> None:
    one, two = before.layer_scans, after.layer_scans
    found = None
    if len(one) != len(two):
        found = f"{len(one)} layers, and {len(two)}"
    elif not one:
        found = "no layer in either"
    for own, other in zip(one, two, strict=False):
        if found is None and (own.num_heads, own.heads) != (other.num_heads, other.heads):
            found = (
                f"{own.name} with {len(own.heads)} of {own.num_heads} heads looked at, and "
                f"{other.name} with {len(other.heads)} of {other.num_heads}"
            )
            if len(own.heads) == len(other.heads):
                found += f": {list(own.heads)}, and {list(other.heads)}"
    if found is not None:
        raise OptionError(
            saw=found,
            needed="scans of as many layers, with the same heads looked at",
            do="compare models of one shape, scanned with the same layers= and heads=",
        )


def _names_of_both(before: ScanReadings, after: ScanReadings) -> tuple[str, ...]:
    """Statistics that a layer of each has, and whose difference means something."""
    names = tuple(
        name
        for name in before.measured
        if name in after.measured and FIELD not in before.definition(name).axes
    )
    for name in names:
        own, other = before.definition(name), after.definition(name)
        if own.id != other.id:
            raise OptionError(
                saw=f"{name} as {own.formula} ({own.id}), and as {other.formula} ({other.id})",
                needed="one meaning of each name",
                do="scan both models with the same statistics",
            )
    if not names:
        raise OptionError(
            saw="scans without a statistic that both have",
            needed=f"one of {', '.join(before.measured) or 'none'} in the other too",
            do="scan both models with the same statistics",
        )
    return names


def _distances(before: ScanReadings, after: ScanReadings, names: tuple[str, ...]) -> list[Tensor]:
    """For each layer, from each head of one to each of the other, among those looked at."""
    looked = [list(layer.heads) for layer in before.layer_scans]
    totals = [torch.zeros(len(heads), len(heads), dtype=torch.float64) for heads in looked]
    votes = [torch.zeros_like(total) for total in totals]
    for name in names:
        if OTHER_HEAD in before.definition(name).axes:
            continue
        one, two = (scan[name][..., None].flatten(2) for scan in (before, after))
        gaps = [_gaps(one[index, heads], two[index, heads]) for index, heads in enumerate(looked)]
        # The mean over all pairs that have an entry in common; 1 where they are all the same.
        apart = torch.cat([(gap.squares / gap.both)[gap.both > 0].sqrt() for gap in gaps])
        scale = (float(apart.mean()) if apart.numel() else 0.0) or 1.0
        for (squares, both, alone), total, vote in zip(gaps, totals, votes, strict=True):
            counted = both + alone
            total += ((squares / scale**2 + alone) / counted.clamp(min=1)).sqrt()
            vote += counted > 0
    return [total / vote.clamp(min=1) for total, vote in zip(totals, votes, strict=True)]


class _Gaps(NamedTuple):
    """Of each pair of heads: the sum of squared differences, over how many, and how many alone."""

    squares: Float[Tensor, "own others"]
    both: Int[Tensor, "own others"]
    alone: Int[Tensor, "own others"]


def _gaps(one: Float[Tensor, "own entries"], two: Float[Tensor, "others entries"]) -> _Gaps:
    squares, both, alone = [], [], []
    for head in one:  # all pairs at once would be heads times as large as the statistic
        gap = head - two
        is_real = gap.isfinite()
        squares.append(gap.masked_fill(~is_real, 0.0).square().sum(-1))
        both.append(is_real.sum(-1))
        alone.append((head.isfinite() ^ two.isfinite()).sum(-1))
    return _Gaps(torch.stack(squares), torch.stack(both), torch.stack(alone))


def _assigned(heads: tuple[int, ...], distance: Float[Tensor, "own others"]) -> tuple[int, ...]:
    """The head of the other scan for each head of one, by the least total distance."""
    optimize = require("scipy.optimize", purpose="which assigns heads to heads", pip="scipy")
    _, columns = optimize.linear_sum_assignment(distance.numpy())
    return tuple(heads[column] for column in columns.tolist())
