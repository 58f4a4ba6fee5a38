"""Faults of four further mechanisms that no catalogue of causes names."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.unknown.mechanisms import Mechanism


class AbsoluteQueries(Mechanism):
    """Queries of one head lose their signs."""

    name = "unknown: absolute queries in one head"
    stage = "q"
    one_head = True

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Take absolute values."""
        return value.abs()


class ValuesWithoutPeak(Mechanism):
    """Each value loses its channel of the largest size."""

    name = "unknown: largest channel of values left out"
    stage = "v"

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Zero the largest channel of each head and token."""
        size = value.abs()
        return torch.where(size < size.amax(-1, keepdim=True), value, 0.0)


class NegativeScoresShrunk(Mechanism):
    """Scores below zero have a factor, those above zero have none."""

    name = "unknown: negative scores shrunk"
    stage = "scores"

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Multiply negative scores; hidden keys stay hidden."""
        factor = draw.uniform(0.1, 0.4)
        return torch.where(value < 0, factor * value, value)


class WithoutLargestWeight(Mechanism):
    """Queries of one head do not read the key of their largest weight."""

    name = "unknown: largest weight left out in one head"
    stage = "weights"
    one_head = True

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Zero the largest weight of a query and normalise the others."""
        kept = torch.where(value < value.amax(-1, keepdim=True), value, 0.0)
        return kept / kept.sum(-1, keepdim=True).clamp_min(1e-12)


SECOND_MECHANISMS: tuple[Injector, ...] = (
    AbsoluteQueries(),
    ValuesWithoutPeak(),
    NegativeScoresShrunk(),
    WithoutLargestWeight(),
)
