"""Projections in each other's place."""

from __future__ import annotations

from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import Injector, is_mha, weights_of
from benchmarks.faults.reference_layer import ReferenceLayer


def exchanged(layer: ReferenceLayer, first: str, second: str) -> ReferenceLayer:
    """Return a layer whose weights of two roles are exchanged, biases included."""
    weights = layer.all_weights()
    changed: dict[str, Tensor] = {}
    for role, other in ((first, second), (second, first)):
        changed |= {name: weights[name[0] + other] for name in weights_of(layer, role)}
    return layer.with_weights(**changed)


class QueryKeyExchanged(Injector):
    """The weights of q and k are exchanged (femtoGPT #30)."""

    name = "q and k exchanged"
    family = "roles"
    equals = frozenset({"order of fused rows"})

    def applies(self, geometry: Geometry) -> bool:
        """Return True where q and k have the same shape."""
        return is_mha(geometry)

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Exchange q and k."""
        return self.case(layer, exchanged(layer, "q", "k"), draw, stage="q")


class KeyValueExchanged(Injector):
    """The weights of k and v are exchanged (jsbaan/transformer-from-scratch #1)."""

    name = "k and v exchanged"
    family = "roles"
    equals = frozenset({"order of fused rows"})

    def applies(self, geometry: Geometry) -> bool:
        """Return True where k and v have the same shape."""
        return geometry.head_dim == geometry.value_dim

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Exchange k and v."""
        return self.case(layer, exchanged(layer, "k", "v"), draw, stage="k")


class QueryValueExchanged(Injector):
    """The weights of q and v are exchanged; no public report."""

    name = "q and v exchanged"
    family = "roles"
    equals = frozenset({"order of fused rows"})

    def applies(self, geometry: Geometry) -> bool:
        """Return True where q and v have the same shape."""
        return is_mha(geometry)

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Exchange q and v."""
        return self.case(layer, exchanged(layer, "q", "v"), draw, stage="q")


INJECTORS = (QueryKeyExchanged(), KeyValueExchanged(), QueryValueExchanged())
