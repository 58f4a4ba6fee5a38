"""Merges of the kv heads of a model: which become one, by which maps, and what is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import OptionError
from headwise.surgery.cut import Cut, LayerCut
from headwise.surgery.maps import (
    Channels,
    How,
    Maps,
    cost,
    fit,
    has_place_for_means,
    key_channels,
    mean_values,
    real_maps,
    select,
    value_channels,
)
from headwise.surgery.models import ModelHeads
from headwise.surgery.moments import InputProducts
from headwise.surgery.steps import allows, require_free_keys, require_free_values

Groups = list[list[int]]


def neighbours(total: int, count: int) -> Groups:
    """Return groups of ``count`` heads that follow each other."""
    return [[*range(start, start + count)] for start in range(0, total, count)]


def group_alike(costs: Float[Tensor, "heads heads"], count: int) -> Groups:
    """Return groups of ``count`` heads with a small sum of the costs of all pairs inside them.

    Beginning with neighbours, the exchange of two heads that saves most is made until none saves
    anything. Heads of a group are in order, and groups by their first head.
    """
    table: list[list[float]] = costs.tolist()
    groups = neighbours(len(table), count)

    def cost_beside(head: int, others: Iterable[int]) -> float:
        return sum(table[head][other] for other in others)

    def saving(i: int, j: int, a: int, b: int) -> float:
        ours, theirs = [x for x in groups[i] if x != a], [x for x in groups[j] if x != b]
        before = cost_beside(a, ours) + cost_beside(b, theirs)
        return before - cost_beside(b, ours) - cost_beside(a, theirs)

    least = torch.finfo(costs.dtype).eps * float(costs.abs().sum())  # what rounding can save
    while True:
        swaps = (
            (saving(i, j, a, b), i, j, a, b)
            for i, j in combinations(range(len(groups)), 2)
            for a, b in product(groups[i], groups[j])
        )
        best, i, j, a, b = max(swaps, default=(0.0, 0, 0, 0, 0))
        if not best > least:
            return sorted(sorted(group) for group in groups)
        groups[i] = [b if x == a else x for x in groups[i]]
        groups[j] = [a if x == b else x for x in groups[j]]


@dataclass(frozen=True)
class Merged:
    """Merge of the kv heads of one layer."""

    kv_heads: int  # their number before
    groups: Groups  # numbers of the kv heads that become one
    keys: float  # the cost of what is lost of the keys, as a share of that of losing all of them
    values: float  # the same of the values


def merge_heads(
    heads: ModelHeads,
    products: Mapping[str, InputProducts],
    kv_heads: int,
    how: How,
    *,
    alike: bool = True,
) -> tuple[Cut, dict[str, Merged]]:
    """Return the cut to fewer kv heads in each layer, and what each layer loses.

    With ``alike`` those are merged that lose least together, else neighbours.

    Raises:
        OptionError: another number, or a layer without products.
    """
    layers, merged = {}, {}
    for name, whole in heads.whole():
        if whole.num_kv_heads == kv_heads:
            continue
        _ = whole.merge(kv_heads)  # raises for another number
        if name not in products:
            raise OptionError(
                saw=f"{name.rstrip('.')}, which did not run on the inputs",
                needed="inputs that run every layer whose kv heads are merged",
                do="give inputs of the whole model",
            )
        layer = _Layer(heads, name, products[name], kv_heads, how)
        groups = layer.group_alike() if alike else layer.neighbours
        layers[name], merged[name] = layer.merge(groups)
    return Cut(layers), merged


class _Layer:
    """One layer whose kv heads are merged."""

    def __init__(
        self, heads: ModelHeads, name: str, products: InputProducts, kv_heads: int, how: How
    ) -> None:
        self.whole, self.kv_heads = heads.whole().layers[name], kv_heads
        self.count = self.whole.num_kv_heads // kv_heads
        self.spec = heads.specs[name]
        self.state = {tensor: x.cpu() for tensor, x in heads.canonical(name).items()}
        self.keys = key_channels(self.state, self.spec, products)
        self.values = value_channels(self.state, products)
        self.means = mean_values(self.state, products)
        self.hows: tuple[How, How] = (
            how if allows(require_free_keys, self.spec) else "mean",
            how if allows(require_free_values, self.spec) else "mean",
        )
        self.shares_order = any(name in stack and len(stack) > 1 for stack in heads.stacks)

    @property
    def neighbours(self) -> Groups:
        return neighbours(self.whole.num_kv_heads, self.count)

    def group_alike(self) -> Groups:
        """Return the groups that lose least, or neighbours where heads cannot change places."""
        total = self.whole.num_kv_heads
        moved = self.whole.keep(self._heads_of([*reversed(range(total))]))
        if self.shares_order or not allows(moved.steps[0].require_function, self.spec):
            return self.neighbours
        pairs = torch.tensor([*combinations(range(total), 2)])
        lost = sum(share for share, _ in self._fit_all(pairs))
        costs = torch.zeros(total, total, dtype=torch.float64)
        costs[pairs[:, 0], pairs[:, 1]] = costs[pairs[:, 1], pairs[:, 0]] = torch.as_tensor(lost)
        return group_alike(costs, self.count)

    def merge(self, groups: Groups) -> tuple[LayerCut, Merged]:
        order = torch.tensor(groups)
        (keys, key_maps), (values, value_maps) = self._fit_all(order)
        cut = self.whole
        if groups != self.neighbours:
            cut = cut.keep(self._heads_of(order.flatten().tolist()))
        maps: dict[str, Tensor] = {}
        if self.hows[0] != "mean":
            maps |= _as_step(("key", "query"), self.keys, key_maps, self.state["wk"].shape[1])
        if self.hows[1] != "mean":
            maps |= _as_step(("value", "output"), self.values, value_maps, self.means.shape[1])
        cut = cut.merge(self.kv_heads, **maps)
        if "value" in maps and has_place_for_means(self.state):
            means, wo = self.means[order.flatten()], self.state["wo"].double()
            merged = (maps["value"] @ means[..., None]).squeeze(-1).unflatten(0, (-1, self.count))
            merged = merged.sum(1).repeat_interleave(self.count, 0)[..., None]
            lost_mean = means - (maps["output"].mT @ merged).squeeze(-1)
            wo = wo.unflatten(0, (len(means), -1)).sum(1)[order.flatten()]
            cut = cut.shift(torch.einsum("nv,nvo->o", lost_mean, wo))
        lost = float(keys.sum()), float(values.sum())
        return cut, Merged(self.whole.num_kv_heads, groups, *lost)

    def _fit_all(self, heads: Tensor) -> list[tuple[Tensor, list[Maps]]]:
        """Return the shares that groups of heads (groups, n) lose, and their maps: keys, values."""
        fitted = []
        for channels, how in zip((self.keys, self.values), self.hows, strict=True):
            groups = [select(each, heads) for each in channels]
            maps = [fit(group, how) for group in groups]
            lost = torch.stack([cost(g, m).sum(0) for g, m in zip(groups, maps, strict=True)])
            total = sum(each.total for each in channels)
            fitted.append((lost.sum(0) / (total or 1.0), maps))  # nothing is lost of nothing
        return fitted

    def _heads_of(self, kv_heads: list[int]) -> list[int]:
        group = self.whole.origins.group
        return [kv * group + head for kv in kv_heads for head in range(group)]


def _as_step(
    names: tuple[str, str], channels: Sequence[Channels], maps: Sequence[Maps], width: int
) -> dict[str, Tensor]:
    """Return maps (p, groups, n, m, m) as the matrices of a merge, in the order of the groups."""
    to = [each.to.flatten(1, 2) for each in maps]
    back = [each.back.mH.flatten(1, 2) for each in maps]
    return {n: real_maps(channels, x, width) for n, x in zip(names, (to, back), strict=True)}
