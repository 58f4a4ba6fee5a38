"""Single faults with the causes of the first set, in other forms or with other constants."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase, Probe, Subject, padded_probe
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import (
    STAGE_OF_ROLE,
    Injector,
    heads_of,
    names_of_a_scale,
    reordered,
)
from benchmarks.faults.injectors.masks import mask_of
from benchmarks.faults.injectors.packing import Fused, changed_heads, from_groups, reread
from benchmarks.faults.injectors.rotary import FIRST, settings_of
from benchmarks.faults.injectors.rotary_rows import conversion, has_planes
from benchmarks.faults.reference_layer import Call, ReferenceLayer


class Variant(Injector):
    """Another form of a fault of the first set.

    Attributes:
        cause: the name of that fault.
    """

    family = "variants"
    cause: ClassVar[str]

    def case(
        self,
        good: ReferenceLayer,
        faulty: Subject,
        draw: Draw,
        *,
        stage: str,
        probe: Probe | None = None,
        **truth: Any,
    ) -> FaultCase:
        """Return a case whose truth names the cause."""
        made = super().case(good, faulty, draw, stage=stage, probe=probe, **truth)
        return replace(made, truth=replace(made.truth, cause=self.cause))


class _RotaryVariant(Variant):
    def applies(self, geometry: Geometry) -> bool:
        """Return True for a rotary embedding."""
        return geometry.rotary is not None


class OtherScale(Variant):
    """Scales that the first set does not take (attorch #14, scaling-matrix #2, Megatron-LM #175).

    The scale 1 / head_dim is also the plain scale applied twice.
    """

    name = "scale: other constants"
    cause = "scale"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Take 1 / head_dim, a constant, or the plain scale divided by a layer's number."""
        g = layer.geometry
        forms = {
            "1 / head_dim": 1 / g.head_dim,
            "0.5": 0.5,
            "head_dim ** -0.5 / 7": g.head_dim**-0.5 / 7,
        }
        form = draw.choice(sorted(forms))
        twice = {"scale twice"} if form == "1 / head_dim" else set()
        return self.case(
            layer,
            layer.with_geometry(scale=forms[form]),
            draw,
            stage="scores",
            parameters={"scale": forms[form], "form": form},
            equals=names_of_a_scale(g) - {self.cause} | twice,
        )


class OtherTheta(_RotaryVariant):
    """Thetas of other models (DeepSpeed #8341, gemma.cpp #986, airllm #369)."""

    name = "rotary theta: other constants"
    cause = "rotary theta"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Take a theta that the first set does not take."""
        theta = draw.choice((5e4, 1e5, 1.5e5, 8e6))
        faulty = layer.with_geometry(rotary=replace(settings_of(layer), theta=theta))
        return self.case(layer, faulty, draw, stage=FIRST, parameters={"theta": theta})


class HalfOfTables(_RotaryVariant):
    """Half of the planes rotate, with the frequencies of the full width (TransformerLens #1621)."""

    name = "rotary partial width: half of the tables"
    cause = "rotary partial width"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Halve the width, down to an even number, and keep the exponent."""
        rotary = settings_of(layer)
        changes: dict[str, Any] = {"width": rotary.width // 4 * 2, "exponent_width": rotary.width}
        faulty = layer.with_geometry(rotary=replace(rotary, **changes))
        return self.case(layer, faulty, draw, stage=FIRST, parameters=changes)


class QueryAttentionFactor(_RotaryVariant):
    """The attention factor multiplies rotated queries, and no keys (vLLM #48351, prime-rl #3028).

    With a full rotary embedding, that is another scale.
    """

    name = "rotary attention factor: queries only"
    cause = "rotary attention factor"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Multiply the rotated channels of q by YaRN's factor, or by its inverse."""
        g, rotary = layer.geometry, settings_of(layer)
        yarn = 0.1 * draw.choice((0.707, 1.0)) * math.log(40) + 1
        factor = draw.choice((yarn, 1 / yarn))

        def turned(layer: ReferenceLayer, x: Tensor, positions: Tensor, role: str) -> Tensor:
            result = layer.turned(x, positions, role).clone()
            if role == "q":
                result[..., : rotary.width] *= factor
            return result

        full = rotary.width == g.head_dim
        return self.case(
            layer,
            layer.with_stages(turned=turned),
            draw,
            stage=FIRST,
            parameters={"role": "q", "factor": factor},
            equals=names_of_a_scale(g) - {self.cause} if full else frozenset(),
        )


class KeyRowsUnconverted(Variant):
    """Rows of k alone are not converted (flash-attention #546, transformers #31788)."""

    name = "rotary permutation missing: keys only"
    cause = "rotary permutation missing"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a rotary embedding."""
        return has_planes(geometry)

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Undo the conversion of k."""
        g = layer.geometry
        order = conversion(g, heads_of(g, "k"), g.head_dim).argsort()
        faulty = layer.with_weights(**reordered(layer, "k", order))
        return self.case(layer, faulty, draw, stage="k", parameters={"role": "k"})


class GroupedRowsReordered(Variant):
    """Roles have another order within each kv group (jsbaan #1, gpt-neox #1315).

    The rows of each group are stored in that order and read as query heads, key, value.
    """

    name = "order of fused rows: within kv groups"
    cause = "order of fused rows"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for several kv heads that are shared, with one channel count."""
        same = geometry.head_dim == geometry.value_dim and not geometry.cross
        return same and geometry.group > 1 and geometry.num_kv_heads > 1

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Store the groups in an order that moves more than k and v."""
        stored = draw.choice(("kqv", "kvq", "vkq", "vqk"))

        def joined(rows: Fused, geometry: Geometry) -> Tensor:
            heads = geometry.num_kv_heads
            groups = [rows[role].unflatten(0, (heads, -1)) for role in stored]
            return torch.cat(groups, 1).flatten(0, 1)

        faulty = reread(layer, joined, from_groups)
        heads = changed_heads(layer, faulty)
        parameters = {"stored": stored, "nesting": "by group"}
        return self.case(layer, faulty, draw, stage="q", parameters=parameters, heads=heads)


class SmallInitialValues(Variant):
    """A weight was never loaded; its initial values are normal (vLLM #58142, metaseq #442)."""

    name = "weights at their initial values: normal"
    cause = "weights at their initial values"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Draw one weight as Hugging Face does."""
        role, std = draw.choice("qkvo"), 0.02
        fresh = draw.normal(*layer.weight(f"w{role}").shape, std=std)
        return self.case(
            layer,
            layer.with_weights(**{f"w{role}": fresh}),
            draw,
            stage=STAGE_OF_ROLE[role],
            parameters={"role": role, "std": std},
        )


class AddedPolarity(Variant):
    """A large number is added where the mask shows a key (pytorch #120668, transformers #12007).

    A query that sees only such keys reads them all the same, unlike with an inverted mask.
    """

    name = "mask polarity: added number"
    cause = "mask polarity"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Add -1e4 or -1e9 at the keys that the mask shows."""
        number = draw.choice((-1e4, -1e9))

        def masked(layer: ReferenceLayer, scores: Tensor, call: Call) -> Tensor:
            added = scores + number * mask_of(call).to(scores.dtype)
            return layer.masked(added, replace(call, mask=None))

        probe = padded_probe(layer.geometry, draw)
        faulty = layer.with_stages(masked=masked)
        parameters = {"added": number}
        return self.case(layer, faulty, draw, stage="scores", probe=probe, parameters=parameters)


VARIANTS: tuple[Injector, ...] = (
    OtherScale(),
    OtherTheta(),
    HalfOfTables(),
    QueryAttentionFactor(),
    KeyRowsUnconverted(),
    GroupedRowsReordered(),
    SmallInitialValues(),
    AddedPolarity(),
)
