"""Bias by distance with other slopes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.reference_layer import ReferenceLayer


class _Alibi(Injector):
    family = "bias by distance"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for ALiBi."""
        return geometry.alibi

    def with_slopes(
        self, layer: ReferenceLayer, slopes: Tensor, draw: Draw, **truth: Any
    ) -> FaultCase:
        """Return the case of other slopes; heads with equal slopes are not concerned."""
        differs = slopes != layer.weight("slopes")
        heads = tuple(differs.nonzero().flatten().tolist())
        faulty = layer.with_weights(slopes=slopes)
        return self.case(layer, faulty, draw, stage="scores", heads=heads, **truth)


class DistanceCoefficient(_Alibi):
    """All slopes have a factor, as if added before the scale (TensorRT-Model-Connect #11)."""

    name = "distance bias coefficient"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Multiply the slopes; zero leaves the bias out."""
        d = layer.geometry.head_dim
        factor = draw.choice((0.0, 0.5, 2.0, d**0.5, d**-0.5))
        slopes = layer.weight("slopes").detach() * factor
        return self.with_slopes(layer, slopes, draw, parameters={"factor": factor})


class SlopeRule(_Alibi):
    """Slopes from another rule (mlx #343, transformers #28380, aprender #2143).

    An exponent that is off by one gives all slopes the same factor, if the number of heads is
    a power of two.
    """

    name = "distance bias slope rule"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Take another rule."""
        heads = layer.geometry.num_heads
        power = heads & (heads - 1) == 0
        ranks = torch.arange(heads, dtype=torch.float64)
        rules = {
            "exponent starts at zero": 2 ** (-8 * ranks / heads),
            "exponents of half the size": 2 ** (-4 * (ranks + 1) / heads),
            "heads reversed": layer.weight("slopes").detach().flip(0),
        }
        if not power:
            rules["no case for heads that are no power of two"] = 2 ** (-8 * (ranks + 1) / heads)
        rule = draw.choice(sorted(rules))
        constant = power and rule == "exponent starts at zero"
        return self.with_slopes(
            layer,
            rules[rule],
            draw,
            parameters={"rule": rule, "slopes": tuple(rules[rule].tolist())},
            equals=frozenset({"distance bias coefficient"} if constant else ()),
        )


INJECTORS = (DistanceCoefficient(), SlopeRule())
