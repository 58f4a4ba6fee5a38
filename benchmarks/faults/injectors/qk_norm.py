"""Norms of queries and keys of another kind, at another place or with another offset."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry, NormKind, NormSettings
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.reference_layer import ReferenceLayer


class _Norm(Injector):
    family = "qk-norm"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a norm of queries and keys."""
        return geometry.qk_norm is not None

    def changes(self, norm: NormSettings, draw: Draw) -> dict[str, Any]:
        """Return the settings that change."""
        raise NotImplementedError

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Change the settings of the norm."""
        norm = layer.geometry.qk_norm
        assert norm is not None
        changes = self.changes(norm, draw)
        faulty = layer.with_geometry(qk_norm=replace(norm, **changes))
        l2 = changes.get("kind") == "l2"
        return self.case(
            layer,
            faulty,
            draw,
            stage="q after norm",
            parameters=changes,
            equals=frozenset({"scale"} if l2 else ()),
        )


class NormKindFault(_Norm):
    """LayerNorm or L2 for RMSNorm (vllm-metal #691, gpt-neox #1367).

    Up to eps, L2 is RMSNorm with another factor of q and of k, so another scale.
    """

    name = "qk-norm kind"

    def changes(self, norm: NormSettings, draw: Draw) -> dict[str, Any]:
        """Take another kind."""
        kinds: tuple[NormKind, ...] = ("rms", "layer", "l2")
        return {"kind": draw.choice([kind for kind in kinds if kind != norm.kind])}


class NormPlace(_Norm):
    """The norm comes after the rotary embedding for before it (mlxcel #316)."""

    name = "qk-norm place"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a norm and a rotary embedding."""
        return geometry.qk_norm is not None and geometry.rotary is not None

    def changes(self, norm: NormSettings, draw: Draw) -> dict[str, Any]:
        """Take the other place."""
        before = norm.place == "before rotary"
        return {"place": "after rotary" if before else "before rotary"}


class NormOffset(_Norm):
    """The factor is 1 + weight for weight, or the reverse (Model-Optimizer #2276)."""

    name = "qk-norm weight offset"

    def changes(self, norm: NormSettings, draw: Draw) -> dict[str, Any]:
        """Take the other offset."""
        return {"weight_offset": 1.0 - norm.weight_offset}


class NormEps(_Norm):
    """Another eps (MinivLLM #82)."""

    name = "qk-norm eps"

    def changes(self, norm: NormSettings, draw: Draw) -> dict[str, Any]:
        """Take the eps of torch's layer norm, of Keras, or one between."""
        return {"eps": draw.choice((1e-5, 1e-4, 1e-3))}


class NormWeightsExchanged(_Norm):
    """The norm of q has the weight of k's, and the other way round; no public report."""

    name = "norm weights of q and k exchanged"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for weights of one shape."""
        norm = geometry.qk_norm
        return norm is not None and (norm.over == "head" or geometry.group == 1)

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Exchange the weights."""
        q, k = (layer.weight(name).detach() for name in ("q_norm", "k_norm"))
        faulty = layer.with_weights(q_norm=k, k_norm=q)
        return self.case(layer, faulty, draw, stage="q after norm")


INJECTORS = (
    NormKindFault(),
    NormPlace(),
    NormOffset(),
    NormEps(),
    NormWeightsExchanged(),
)
