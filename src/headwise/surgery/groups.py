"""Groups of kv heads that cost least to merge."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product

import torch
from jaxtyping import Float
from torch import Tensor

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
