"""Rotary embeddings computed at other positions, axes, channels or heads."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.injectors.rotary import FIRST, settings_of
from benchmarks.faults.reference_layer import Call, ReferenceLayer
from benchmarks.faults.rotary_math import frequencies, pairs, turn


class _Rotary(Injector):
    family = "rotary"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a rotary embedding."""
        return geometry.rotary is not None


class RotaryMissing(_Rotary):
    """No channel rotates; the limit of a smaller width (mlx-lm #1698, TransformerLens #1621)."""

    name = "rotary missing"
    equals = frozenset({"rotary partial width", "rotary axis"})

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Leave the rotary embedding out, but not its attention factor."""
        rotary = replace(settings_of(layer), width=0)
        faulty = layer.with_geometry(rotary=rotary)
        return self.case(layer, faulty, draw, stage=FIRST, parameters={"width": 0})


class RotaryAcrossHead(_Rotary):
    """Pairs are (i, i + head_dim / 2) for (i, i + width / 2) (coreai-models #66, pie #603)."""

    name = "rotary pairs across the whole head"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a partial half-split rotary embedding."""
        rotary = geometry.rotary
        partial = rotary is not None and rotary.width < geometry.head_dim
        return partial and rotary is not None and rotary.pairing == "half-split"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Pair the channels across the head."""
        span = layer.geometry.head_dim // 2

        def turned(layer: ReferenceLayer, x: Tensor, positions: Tensor, role: str) -> Tensor:
            rotary = settings_of(layer)
            angles = positions[..., None, None].double() * frequencies(rotary)
            return turn(x, angles, pairs(rotary, span), rotary.attention_factor)

        faulty = layer.with_stages(turned=turned)
        return self.case(layer, faulty, draw, stage=FIRST, parameters={"span": span})


class RotaryOffset(_Rotary):
    """Queries or keys rotate as if they stood elsewhere; no public report.

    An offset of both would cancel.
    """

    name = "rotary position offset"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Move the positions of q or of k."""
        role, offset = draw.choice("qk"), draw.choice((-2, -1, 1, 2, 5))

        def turned(layer: ReferenceLayer, x: Tensor, positions: Tensor, this: str) -> Tensor:
            return layer.turned(x, positions + offset * (this == role), this)

        return self.case(
            layer,
            layer.with_stages(turned=turned),
            draw,
            stage=f"{role} after rotary",
            parameters={"role": role, "offset": offset},
        )


class RotaryAxis(_Rotary):
    """The index of the head or of the sequence is taken for the position (emlx #121).

    Where a query and its keys get the same angle, the function is that without a rotary
    embedding: for the batch axis, and for heads in multi-head attention.
    """

    name = "rotary axis"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Take the angle from another axis."""
        axis = draw.choice(("heads", "batch"))

        def turned(layer: ReferenceLayer, x: Tensor, positions: Tensor, role: str) -> Tensor:
            rotary = settings_of(layer)
            index = torch.arange(x.shape[2])[:, None]
            if axis == "batch":
                index = torch.arange(x.shape[0])[:, None, None, None]
            angles = index.double() * frequencies(rotary)
            return turn(x, angles, pairs(rotary), rotary.attention_factor)

        cancels = axis == "batch" or layer.geometry.group == 1
        return self.case(
            layer,
            layer.with_stages(turned=turned),
            draw,
            stage=FIRST,
            parameters={"axis": axis},
            equals=frozenset({"rotary missing", "rotary partial width"} if cancels else ()),
        )


class RotaryTwice(_Rotary):
    """Queries or keys rotate twice, as keys that a cache holds rotated; no public report.

    Without a scaling, a linear one by a half turns both as far.
    """

    name = "rotary applied twice"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Rotate queries, keys or both again."""
        roles = draw.choice(("q", "k", "qk"))

        def turned(layer: ReferenceLayer, x: Tensor, positions: Tensor, role: str) -> Tensor:
            once = layer.turned(x, positions, role)
            return layer.turned(once, positions, role) if role in roles else once

        names = {"rotary scaling kind", "rotary scaling factor"} if roles == "qk" else ()
        return self.case(
            layer,
            layer.with_stages(turned=turned),
            draw,
            stage=f"{roles[0]} after rotary",
            parameters={"turned": roles},
            equals=frozenset(names),
        )


class RotaryOnValues(_Rotary):
    """Values turn like keys (mistral-inference #147 asks why they do not)."""

    name = "rotary on values"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for values that are as wide as the rotary embedding."""
        return geometry.rotary is not None and geometry.rotary.width <= geometry.value_dim

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Rotate the values by the positions of the keys."""

        def project(layer: ReferenceLayer, call: Call) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = layer.project(call)
            return q, k, layer.turned(v, call.key_positions, "v")

        return self.case(layer, layer.with_stages(project=project), draw, stage="v")


class RotaryOtherChannels(_Rotary):
    """The last channels of a head rotate, as in DeepSeek's attention; no public report."""

    name = "rotary on other channels"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a partial rotary embedding."""
        return geometry.rotary is not None and geometry.rotary.width < geometry.head_dim

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Rotate the last channels."""

        def turned(layer: ReferenceLayer, x: Tensor, positions: Tensor, role: str) -> Tensor:
            width = settings_of(layer).width
            last = layer.turned(x[..., -width:], positions, role)
            return torch.cat([x[..., :-width], last], -1)

        faulty = layer.with_stages(turned=turned)
        return self.case(layer, faulty, draw, stage=FIRST, parameters={"channels": "the last"})


class RotaryOverHeads(_Rotary):
    """All heads rotate as one, before the split (LTX-Video #224)."""

    name = "rotary over all heads at once"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a full rotary embedding of several kv heads, without a scaling."""
        rotary = geometry.rotary
        is_full = rotary is not None and rotary.width == geometry.head_dim
        return is_full and rotary is not None and rotary.scaling == "none"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Rotate the joined heads."""

        def turned(layer: ReferenceLayer, x: Tensor, positions: Tensor, role: str) -> Tensor:
            joined = x.flatten(-2)[..., None, :]
            rotary = replace(settings_of(layer), width=joined.shape[-1])
            angles = positions[..., None, None].double() * frequencies(rotary)
            return turn(joined, angles, pairs(rotary), rotary.attention_factor).reshape(x.shape)

        return self.case(layer, layer.with_stages(turned=turned), draw, stage=FIRST)


class RotarySomeHeads(_Rotary):
    """Only some heads rotate (transformers #47403)."""

    name = "rotary on some heads only"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Rotate the first query heads, and the first kv heads if there are several."""
        g = layer.geometry
        kept = draw.integer(1, g.num_heads)

        def turned(layer: ReferenceLayer, x: Tensor, positions: Tensor, role: str) -> Tensor:
            result = layer.turned(x, positions, role)
            return torch.cat([result[:, :, :kept], x[:, :, kept:]], 2)

        return self.case(
            layer,
            layer.with_stages(turned=turned),
            draw,
            stage=FIRST,
            parameters={"rotated": kept},
            heads=tuple(range(kept, g.num_heads)),
        )


INJECTORS = (
    RotaryMissing(),
    RotaryAcrossHead(),
    RotaryOffset(),
    RotaryAxis(),
    RotaryTwice(),
    RotaryOnValues(),
    RotaryOtherChannels(),
    RotaryOverHeads(),
    RotarySomeHeads(),
)
