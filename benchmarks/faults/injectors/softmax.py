"""Softmax over another axis or in another dtype; what enters it in another dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.reference_layer import Call, ReferenceLayer


class SoftmaxAxis(Injector):
    """The softmax runs over queries or heads; no public report."""

    name = "softmax axis"
    family = "softmax"

    def applies(self, geometry: Geometry) -> bool:
        """Return True without sinks, which stand beside the keys."""
        return not geometry.sink

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Take the softmax over another axis."""
        axis = draw.choice(("heads", "queries"))

        def weights(layer: ReferenceLayer, scores: Tensor, call: Call) -> Tensor:
            return scores.softmax(1 if axis == "heads" else 2).nan_to_num(0.0)

        faulty = layer.with_stages(weights=weights)
        return self.case(layer, faulty, draw, stage="weights", parameters={"axis": axis})


class SoftmaxDtype(Injector):
    """The softmax runs in a narrower dtype (Hugging Face's eager code takes float32)."""

    name = "softmax dtype"
    family = "softmax"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Round the scores and the weights."""
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))

        def weights(layer: ReferenceLayer, scores: Tensor, call: Call) -> Tensor:
            narrow = scores.to(dtype).to(scores.dtype)
            return layer.weights(narrow, call).to(dtype).to(scores.dtype)

        return self.case(
            layer,
            layer.with_stages(weights=weights),
            draw,
            stage="weights",
            parameters={"dtype": str(dtype)},
        )


class ActivationsDtype(Injector):
    """Values, or queries and keys, are rounded (nexusquant #10, xFasterTransformer #336)."""

    name = "activations in a narrower dtype"
    family = "softmax"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Round the values, or queries and keys."""
        dtype, roles = draw.choice((torch.bfloat16, torch.float16)), draw.choice(("v", "qk"))

        def rounded(x: Tensor) -> Tensor:
            return x.to(dtype).to(x.dtype)

        def products(layer: ReferenceLayer, q: Tensor, k: Tensor) -> Tensor:
            return layer.products(rounded(q), rounded(k))

        def merge(layer: ReferenceLayer, weights: Tensor, v: Tensor) -> Tensor:
            return layer.merge(weights, rounded(v))

        if roles == "v":
            faulty, stage = layer.with_stages(merge=merge), "head outputs"
        else:
            faulty, stage = layer.with_stages(products=products), "scores"
        return self.case(layer, faulty, draw, stage=stage, parameters={"dtype": str(dtype)})


INJECTORS = (SoftmaxAxis(), SoftmaxDtype(), ActivationsDtype())
