"""Fault cases: a good layer, a faulty one, the inputs that show it, and the truth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.faults.draw import Draw
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.reference_layer import STAGES, Cache, ReferenceLayer, Stages

BATCH, QUERIES, KEYS = 3, 13, 9  # KEYS is the length of the other sequence in cross attention


class LayerStack(nn.Module):
    """Layers in sequence, each with a residual connection."""

    def __init__(self, layers: list[ReferenceLayer]) -> None:
        super().__init__()
        self.layers = layers
        self.members = nn.ModuleList(layers)

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        """Return the output of the last layer."""
        for layer in self.layers:
            x = x + layer(x, **arguments)
        return x

    def stages(self, x: Tensor, **arguments: Any) -> Stages:
        """Return the stages of every layer, under names such as "layer 2 scores"."""
        stages: Stages = {}
        for index, layer in enumerate(self.layers):
            values = layer.stages(x, **arguments)
            stages |= {f"layer {index} {name}": values[name] for name in STAGES}
            x = x + values["output"]
        return stages


Subject = ReferenceLayer | LayerStack


@dataclass(frozen=True)
class Probe:
    """Inputs of a case. With ``steps``, chunks of these lengths are called with a cache.

    The mask broadcasts to (batch, heads, queries, keys); True lets a query see a key.
    """

    x: Tensor
    source: Tensor | None = None
    mask: Tensor | None = None
    positions: Tensor | None = None
    steps: tuple[int, ...] = ()

    def run(self, subject: Subject) -> list[Stages]:
        """Return the stages of each call."""
        with torch.no_grad():
            if not self.steps:
                arguments: dict[str, Any] = {"mask": self.mask, "positions": self.positions}
                if self.source is not None:
                    arguments["source"] = self.source
                return [subject.stages(self.x, **arguments)]
            return self._decode(subject)

    def _decode(self, subject: Subject) -> list[Stages]:
        cache, start, calls = Cache(), 0, []
        for length in self.steps:
            end = start + length
            mask = None if self.mask is None else self.mask[..., :end]
            positions = None if self.positions is None else self.positions[:, start:end]
            calls.append(
                subject.stages(self.x[:, start:end], mask=mask, positions=positions, cache=cache)
            )
            start = end
        return calls


def default_probe(geometry: Geometry, draw: Draw) -> Probe:
    """Return random inputs without a mask, in one call."""
    x = draw.normal(BATCH, QUERIES, geometry.embed_dim)
    source = draw.normal(BATCH, KEYS, geometry.key_dim) if geometry.cross else None
    return Probe(x, source)


def padded_probe(geometry: Geometry, draw: Draw) -> Probe:
    """Return random inputs whose sequences end with hidden keys."""
    probe = default_probe(geometry, draw)
    keys = KEYS if geometry.cross else QUERIES
    lengths = torch.tensor([keys, keys - 2, keys - 5])
    mask = torch.arange(keys)[None] < lengths[:, None]
    return replace(probe, mask=mask[:, None, None])


def decoding_probe(geometry: Geometry, draw: Draw) -> Probe:
    """Return random inputs that come as a prefill and two calls of one and two tokens."""
    return replace(default_probe(geometry, draw), steps=(QUERIES - 3, 1, 2))


@dataclass(frozen=True)
class Truth:
    """The fault of a case.

    ``stage`` is the first stage that parts; with a stack, ``layer`` is its layer. ``step`` is the
    first call that parts. ``heads`` are the query heads concerned in that stage, or the kv heads
    for a stage of k or v; None means all. ``equals`` are other names of the same function.
    """

    cause: str
    stage: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    heads: tuple[int, ...] | None = None
    equals: frozenset[str] = frozenset()
    layer: int | None = None
    step: int = 0

    @property
    def full_stage(self) -> str:
        """Name of the stage in the stages of the case."""
        return self.stage if self.layer is None else f"layer {self.layer} {self.stage}"


@dataclass(frozen=True)
class FaultCase:
    """A good and a faulty layer, or stacks of layers, that part on the probe."""

    good: Subject
    faulty: Subject
    probe: Probe
    truth: Truth


def distance(good: Tensor, faulty: Tensor) -> float:
    """Return the norm of the difference by the norm of ``good``; infinity where it has no number.

    Entries that are -inf in both count as equal.
    """
    if good.shape != faulty.shape:
        return float("inf")
    good, faulty = good.detach().double(), faulty.detach().double()
    same = good == faulty
    gap = torch.where(same, 0.0, faulty - good).norm()
    size = torch.where(good.isfinite(), good, 0.0).norm().clamp_min(1e-300)
    relative = float(gap / size)
    return float("inf") if math.isnan(relative) else relative


def first_parting(
    good: list[Stages], faulty: list[Stages], tolerance: float
) -> tuple[int, str] | None:
    """Return the first call and stage whose distance is above the tolerance."""
    for step, (left, right) in enumerate(zip(good, faulty, strict=True)):
        for stage in left:
            if distance(left[stage], right[stage]) > tolerance:
                return step, stage
    return None


def parted_heads(good: Tensor, faulty: Tensor, stage: str, tolerance: float) -> set[int] | None:
    """Return the heads whose values of a stage part; None if the shapes differ."""
    if good.shape != faulty.shape:
        return None
    axis = 1 if stage in ("scores", "weights") else 2
    return {
        head
        for head in range(good.shape[axis])
        if distance(good.select(axis, head), faulty.select(axis, head)) > tolerance
    }
