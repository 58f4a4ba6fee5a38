"""Rotary embeddings with other settings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry, RotarySettings, Scaling
from benchmarks.faults.injectors.injector import Injector, names_of_a_scale
from benchmarks.faults.reference_layer import ReferenceLayer

FIRST = "q after rotary"


def settings_of(layer: ReferenceLayer) -> RotarySettings:
    """Return the rotary settings of a layer that has some."""
    rotary = layer.geometry.rotary
    assert rotary is not None
    return rotary


class RotaryFault(Injector):
    """Base of faults that are another setting of the rotary embedding."""

    family = "rotary"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a rotary embedding."""
        return geometry.rotary is not None

    def changes(self, geometry: Geometry, rotary: RotarySettings, draw: Draw) -> dict[str, Any]:
        """Return the settings that change, which are the parameters of the truth."""
        raise NotImplementedError

    def equal_causes(self, rotary: RotarySettings, geometry: Geometry) -> frozenset[str]:
        """Return other names of the same function; ``rotary`` holds the faulty settings."""
        return self.equals

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Change the settings."""
        changes = self.changes(layer.geometry, settings_of(layer), draw)
        rotary = replace(settings_of(layer), **changes)
        return self.case(
            layer,
            layer.with_geometry(rotary=rotary),
            draw,
            stage=FIRST,
            parameters=changes,
            equals=self.equal_causes(rotary, layer.geometry),
        )


class RotaryPairing(RotaryFault):
    """The other pairing of channels (transformers #39687, nanotron #241)."""

    name = "rotary pairing"

    def equal_causes(self, rotary: RotarySettings, geometry: Geometry) -> frozenset[str]:
        """Without a norm, rows in the other order give the same function."""
        return frozenset() if geometry.qk_norm else frozenset({"rotary permutation doubled"})

    def changes(self, geometry: Geometry, rotary: RotarySettings, draw: Draw) -> dict[str, Any]:
        """Take the other pairing."""
        other = "interleaved" if rotary.pairing == "half-split" else "half-split"
        return {"pairing": other}


class RotaryWidth(RotaryFault):
    """Another number of channels rotates (mlx-lm #1698, TransformerLens #1621)."""

    name = "rotary partial width"

    def changes(self, geometry: Geometry, rotary: RotarySettings, draw: Draw) -> dict[str, Any]:
        """Take the full, half or quarter head."""
        d = geometry.head_dim
        widths = {d, d // 2 // 2 * 2, d // 4 // 2 * 2} - {rotary.width}
        return {"width": draw.choice(sorted(widths))}


class RotaryExponent(RotaryFault):
    """The exponent is divided by head_dim for the rotary width (coreai-models #66, pie #603).

    The same frequencies come from theta ** (width / head_dim).
    """

    name = "rotary exponent width"
    equals = frozenset({"rotary theta"})

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a partial rotary embedding."""
        rotary = geometry.rotary
        return rotary is not None and rotary.width < geometry.head_dim

    def changes(self, geometry: Geometry, rotary: RotarySettings, draw: Draw) -> dict[str, Any]:
        """Divide by head_dim."""
        return {"exponent_width": geometry.head_dim}


class RotaryTheta(RotaryFault):
    """Another theta (DeepSpeed #8341, gemma.cpp #986, airllm #368)."""

    name = "rotary theta"

    def changes(self, geometry: Geometry, rotary: RotarySettings, draw: Draw) -> dict[str, Any]:
        """Take another usual theta."""
        thetas = [t for t in (1e3, 1e4, 2.5e4, 5e5, 1e6) if t != rotary.theta]
        return {"theta": draw.choice(thetas)}


class RotaryScalingKind(RotaryFault):
    """Another kind of scaling, or none (DeepSpeed #8345)."""

    name = "rotary scaling kind"

    def equal_causes(self, rotary: RotarySettings, geometry: Geometry) -> frozenset[str]:
        """Scaling of theta is the same as another theta."""
        assert geometry.rotary is not None
        plain = {rotary.scaling, geometry.rotary.scaling} == {"none", "ntk"}
        return frozenset({"rotary theta"} if plain else ())

    def changes(self, geometry: Geometry, rotary: RotarySettings, draw: Draw) -> dict[str, Any]:
        """Take another kind."""
        kinds: tuple[Scaling, ...] = ("none", "linear", "ntk", "llama3")
        kind = draw.choice([k for k in kinds if k != rotary.scaling])
        factor = rotary.factor if rotary.factor != 1.0 else draw.choice((2.0, 4.0, 8.0))
        return {"scaling": kind, "factor": factor}


class RotaryScalingFactor(RotaryFault):
    """Another factor of the same scaling, such as one applied twice (vLLM #30384)."""

    name = "rotary scaling factor"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a scaled rotary embedding."""
        return geometry.rotary is not None and geometry.rotary.scaling != "none"

    def changes(self, geometry: Geometry, rotary: RotarySettings, draw: Draw) -> dict[str, Any]:
        """Take the square, half or double of the factor."""
        return {"factor": draw.choice((rotary.factor**2, rotary.factor / 2, rotary.factor * 2))}


class RotaryAttentionFactor(RotaryFault):
    """The attention factor is dropped or another (vLLM #48351, prime-rl #3028)."""

    name = "rotary attention factor"

    def equal_causes(self, rotary: RotarySettings, geometry: Geometry) -> frozenset[str]:
        """A factor on all channels is the same as another scale."""
        full = rotary.width == geometry.head_dim
        return names_of_a_scale(geometry) - {self.name} if full else frozenset()

    def changes(self, geometry: Geometry, rotary: RotarySettings, draw: Draw) -> dict[str, Any]:
        """Drop the factor, or apply that of YaRN to a layer that has none."""
        if rotary.attention_factor != 1.0:
            return {"attention_factor": draw.choice((1.0, rotary.attention_factor**2))}
        return {"attention_factor": 0.1 * math.log(draw.choice((4.0, 8.0, 32.0))) + 1.0}


INJECTORS = (
    RotaryPairing(),
    RotaryWidth(),
    RotaryExponent(),
    RotaryTheta(),
    RotaryScalingKind(),
    RotaryScalingFactor(),
    RotaryAttentionFactor(),
)
