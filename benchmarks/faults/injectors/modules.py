"""Faults of the module around the formulas: axes, dropout, residual, norm and dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.reference_layer import Call, ReferenceLayer


class _Module(Injector):
    family = "modules"


class BatchFirst(_Module):
    """Batch and sequence are exchanged (pytorch #63560, opacus #774).

    Projections do not depend on these axes, so the first parting is that of the positions of
    the rotary embedding, or that of the scores.
    """

    name = "batch and sequence exchanged"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for self-attention; in cross attention the call fails."""
        return not geometry.cross

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Exchange the axes between the projections and the output projection."""

        def prepare(layer: ReferenceLayer, x: Tensor, *args: Any) -> Call:
            call = layer.prepare(x, *args)
            index = torch.arange(x.shape[0])[:, None].expand(x.shape[:2])
            return replace(call, positions=index, key_positions=index)

        def scores(layer: ReferenceLayer, q: Tensor, k: Tensor, call: Call) -> Tensor:
            swapped = replace(call, positions=call.positions.T, key_positions=call.key_positions.T)
            return layer.scores(q.transpose(0, 1), k.transpose(0, 1), swapped)

        def merge(layer: ReferenceLayer, weights: Tensor, v: Tensor) -> Tensor:
            return layer.merge(weights, v.transpose(0, 1)).transpose(0, 1)

        faulty = layer.with_stages(prepare=prepare, scores=scores, merge=merge)
        stage = "scores" if layer.geometry.rotary is None else "q after rotary"
        return self.case(layer, faulty, draw, stage=stage)


class DropoutOn(_Module):
    """Dropout of the weights is left on; no public report."""

    name = "dropout left on"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Drop weights at random in every call."""
        share = draw.choice((0.1, 0.2, 0.5))

        def weights(layer: ReferenceLayer, scores: Tensor, call: Call) -> Tensor:
            return F.dropout(layer.weights(scores, call), share)

        return self.case(
            layer,
            layer.with_stages(weights=weights),
            draw,
            stage="weights",
            parameters={"dropout": share},
        )


class ResidualInside(_Module):
    """The layer adds its input to its output; no public report."""

    name = "residual inside"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Add the input."""

        def output(layer: ReferenceLayer, heads: Tensor, call: Call) -> Tensor:
            return layer.output(heads, call) + call.x

        return self.case(layer, layer.with_stages(output=output), draw, stage="output")


class NormInside(_Module):
    """The layer normalises its input or its output; no public report."""

    name = "norm inside"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Normalise x, or the output."""
        place = draw.choice(("input", "output"))

        def prepare(layer: ReferenceLayer, x: Tensor, source: Tensor | None, *args: Any) -> Call:
            normed = F.layer_norm(x, x.shape[-1:])
            return layer.prepare(normed, source, *args)

        def output(layer: ReferenceLayer, heads: Tensor, call: Call) -> Tensor:
            y = layer.output(heads, call)
            return F.layer_norm(y, y.shape[-1:])

        if place == "input":
            faulty = layer.with_stages(prepare=prepare)
        else:
            faulty = layer.with_stages(output=output)
        stage = "q" if place == "input" else "output"
        return self.case(layer, faulty, draw, stage=stage, parameters={"place": place})


class DtypeOnly(_Module):
    """The whole layer runs in a narrower dtype (TransformerLens #683, llava #34467)."""

    name = "dtype only"
    family = "dtype"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Compute in float32 or bfloat16."""
        dtype = draw.choice((torch.float32, torch.bfloat16))

        def prepare(layer: ReferenceLayer, x: Tensor, source: Tensor | None, *args: Any) -> Call:
            narrow = None if source is None else source.to(dtype)
            return layer.prepare(x.to(dtype), narrow, *args)

        faulty = layer.with_stages(prepare=prepare).to(dtype)
        return self.case(layer, faulty, draw, stage="q", parameters={"dtype": str(dtype)})


INJECTORS = (BatchFirst(), DropoutOn(), ResidualInside(), NormInside(), DtypeOnly())
