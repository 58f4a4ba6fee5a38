"""Base class of the injectors, and what several of them use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase, Probe, Subject, Truth, default_probe
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.reference_layer import ReferenceLayer


class Injector(ABC):
    """One true cause, put into a reference layer.

    Attributes:
        name: the cause in plain words.
        family: the group of causes.
        equals: other names of causes that give the same function.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    equals: ClassVar[frozenset[str]] = frozenset()

    def applies(self, geometry: Geometry) -> bool:
        """Return True if the fault changes the function of layers of this geometry."""
        return True

    @abstractmethod
    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Return a case with the fault; the choices come from ``draw``."""

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
        """Return a case whose probe is the default one if none is given."""
        probe = probe or default_probe(good.geometry, draw)
        truth.setdefault("equals", self.equals)
        return FaultCase(good, faulty, probe, Truth(self.name, stage, **truth))


# The first stage that shows a fault in the projection of a role.
STAGE_OF_ROLE = {"q": "q", "k": "k", "v": "v", "o": "output"}


def is_mha(geometry: Geometry) -> bool:
    """Return True if q, k and v have the same shape and the same input."""
    return geometry.group == 1 and geometry.head_dim == geometry.value_dim and not geometry.cross


def heads_of(geometry: Geometry, role: str) -> int:
    """Return the number of heads of the role's rows, or of the columns of "o"."""
    return geometry.num_heads if role in "qo" else geometry.num_kv_heads


def weights_of(layer: ReferenceLayer, role: str) -> list[str]:
    """Return the names of the weight and, if there is one, the bias of the role."""
    return [name for name in (f"w{role}", f"b{role}") if name in layer.names]


def reordered(layer: ReferenceLayer, role: str, order: Tensor) -> dict[str, Tensor]:
    """Return the role's weight and bias with their rows in another order.

    For the role "o", the columns of the weight are reordered, which belong to the heads.
    """
    if role == "o":
        return {"wo": layer.weight("wo").detach()[:, order]}
    return {name: layer.weight(name).detach()[order] for name in weights_of(layer, role)}


def names_of_a_scale(geometry: Geometry) -> frozenset[str]:
    """Return the causes that can multiply the products of q and k by any number.

    A norm undoes a factor of the weights. The attention factor needs a full rotary embedding.
    """
    names = {"scale"}
    if geometry.qk_norm is None:
        names.add("factor")
    if geometry.rotary is not None and geometry.rotary.width == geometry.head_dim:
        names.add("rotary attention factor")
    return frozenset(names)
