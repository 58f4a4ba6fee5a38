"""Faults of mechanisms that no catalogue of causes names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.reference_layer import Call, ReferenceLayer

Change = Callable[[Tensor], Tensor]


class Mechanism(Injector):
    """A stage whose value changes, for all heads or for one.

    Attributes:
        stage: the first stage that parts.
        one_head: True if the change concerns one head, drawn at random.
    """

    family = "unknown"
    stage: ClassVar[str]
    one_head: ClassVar[bool] = False

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Return the faulty value of the stage, with the heads in axis 2 for projections."""
        raise NotImplementedError

    def heads(self, geometry: Geometry) -> int:
        """Return the number of heads of the stage."""
        return geometry.num_kv_heads if self.stage in "kv" else geometry.num_heads

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Put the change behind the stage."""
        head = draw.integer(0, self.heads(layer.geometry)) if self.one_head else None
        seed = draw.integer(0, 1 << 30)
        axis = 1 if self.stage in ("scores", "weights") else 2

        def change(value: Tensor) -> Tensor:
            changed = self.change(value, Draw(self.name, seed))
            if head is None:
                return changed
            here = torch.arange(value.shape[axis]) == head
            return torch.where(here.view(-1, *[1] * (value.dim() - axis - 1)), changed, value)

        faulty = layer.with_stages(**behind(self.stage, change))
        heads = None if head is None else (head,)
        return self.case(layer, faulty, draw, stage=self.stage, heads=heads)


def behind(stage: str, change: Change) -> dict[str, Any]:
    """Return the stages to replace so that ``change`` acts on the value of one stage."""
    if stage in ("q", "k", "v"):

        def project(layer: ReferenceLayer, call: Call) -> tuple[Tensor, ...]:
            values = zip("qkv", layer.project(call), strict=True)
            return tuple(change(value) if role == stage else value for role, value in values)

        return {"project": project}
    method = {"scores": "scores", "weights": "weights", "head outputs": "merge"}[stage]

    def replaced(layer: ReferenceLayer, *args: Any) -> Tensor:
        return change(getattr(layer, method)(*args))

    return {method: replaced}


class ReluForSoftmax(Mechanism):
    """Scores pass a ReLU and are divided by their sum, without an exponential."""

    name = "unknown: ReLU for softmax"
    stage = "weights"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Replace the softmax."""

        def weights(layer: ReferenceLayer, scores: Tensor, call: Call) -> Tensor:
            positive = scores.relu()
            return positive / (positive.sum(-1, keepdim=True) + 1e-3)

        return self.case(layer, layer.with_stages(weights=weights), draw, stage="weights")


class ClippedValues(Mechanism):
    """Values are clipped to a range."""

    name = "unknown: clipped values"
    stage = "v"

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Clip to two thirds of the typical size."""
        bound = draw.uniform(0.4, 0.8) * value.std().item()
        return value.clamp(-bound, bound)


class NoisyHead(Mechanism):
    """The output of one head has constant noise on every entry."""

    name = "unknown: noise in one head"
    stage = "head outputs"
    one_head = True

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Add noise of a tenth of the typical size."""
        return value + draw.normal(*value.shape, std=0.1) * value.std()


class SquaredWeights(Mechanism):
    """The weights of one head are squared and sum to less than one."""

    name = "unknown: squared weights"
    stage = "weights"
    one_head = True

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Square the weights."""
        return value.square()


class RolledHead(Mechanism):
    """One head's outputs come one token late."""

    name = "unknown: one head's output rolled by a token"
    stage = "head outputs"
    one_head = True

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Roll along the queries."""
        return value.roll(1, dims=1)


class TopWeights(Mechanism):
    """Only the largest weights of a query are kept."""

    name = "unknown: largest weights only"
    stage = "weights"

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Keep two or three weights and normalise them."""
        least = value.topk(draw.choice((2, 3)), dim=-1).values[..., -1:]
        kept = torch.where(value >= least, value, 0.0)
        return kept / kept.sum(-1, keepdim=True).clamp_min(1e-12)


class MixedHeads(Mechanism):
    """Each head's output has a share of the next head's."""

    name = "unknown: heads mixed"
    stage = "head outputs"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for several heads."""
        return geometry.num_heads > 1

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Mix neighbouring heads."""
        share = draw.uniform(0.1, 0.4)
        return (1 - share) * value + share * value.roll(1, dims=2)


class SmoothedKeys(Mechanism):
    """Keys are averaged with the key before."""

    name = "unknown: keys smoothed along the sequence"
    stage = "k"

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Average neighbouring keys; the first one stays."""
        share = draw.uniform(0.2, 0.5)
        before = torch.cat([value[:, :1], value[:, :-1]], 1)
        return (1 - share) * value + share * before


class GatedValues(Mechanism):
    """Values pass a gate of their own."""

    name = "unknown: values gated"
    stage = "v"

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Multiply by the sigmoid of the value."""
        return value * torch.sigmoid(3 * value)


class SteppedScores(Mechanism):
    """Scores of one head are rounded to coarse steps."""

    name = "unknown: scores in steps"
    stage = "scores"
    one_head = True

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Round to multiples of the step."""
        step = draw.uniform(0.2, 0.5)
        return (value / step).round() * step


class CubicQueries(Mechanism):
    """Queries of one head have an added cubic term."""

    name = "unknown: cubic term in queries"
    stage = "q"
    one_head = True

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Add a share of the cube."""
        return value + draw.uniform(0.2, 0.5) * value**3


class LongRowsSharper(Mechanism):
    """Later queries have sharper scores, by the logarithm of their index."""

    name = "unknown: scores grow with the index of the query"
    stage = "scores"

    def change(self, value: Tensor, draw: Draw) -> Tensor:
        """Multiply each row by a number of its own."""
        rows = torch.arange(value.shape[2], dtype=value.dtype)[:, None]
        return value * (1 + draw.uniform(0.2, 0.5) * torch.log1p(rows))


MECHANISMS: tuple[Injector, ...] = (
    ReluForSoftmax(),
    ClippedValues(),
    NoisyHead(),
    SquaredWeights(),
    RolledHead(),
    TopWeights(),
    MixedHeads(),
    SmoothedKeys(),
    GatedValues(),
    SteppedScores(),
    CubicQueries(),
    LongRowsSharper(),
)
