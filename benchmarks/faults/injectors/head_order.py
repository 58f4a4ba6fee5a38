"""Heads, or channels of heads, in another order in one projection."""

from __future__ import annotations

import torch

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import (
    STAGE_OF_ROLE,
    Injector,
    heads_of,
    reordered,
)
from benchmarks.faults.reference_layer import ReferenceLayer


def rows_of(geometry: Geometry, role: str) -> torch.Tensor:
    """Return the row numbers of a role as (heads, channels)."""
    channels = geometry.head_dim if role in "qk" else geometry.value_dim
    heads = heads_of(geometry, role)
    return torch.arange(heads * channels).view(heads, channels)


def roles_with_heads(geometry: Geometry) -> list[str]:
    """Return the roles with more than one head."""
    return [role for role in "qkvo" if heads_of(geometry, role) > 1]


class HeadsInterleaved(Injector):
    """Rows (heads, channels) are read as (channels, heads) (nntile #347)."""

    name = "heads interleaved"
    family = "head order"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for several heads."""
        return bool(roles_with_heads(geometry))

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Interleave the rows of one role."""
        role = draw.choice(roles_with_heads(layer.geometry))
        order = rows_of(layer.geometry, role).T.flatten()
        faulty = layer.with_weights(**reordered(layer, role, order))
        return self.case(layer, faulty, draw, stage=STAGE_OF_ROLE[role], parameters={"role": role})


class HeadsPermuted(Injector):
    """The heads of one role are permuted, those of the others not; no public report.

    Head i of the faulty layer is head order[i] of the good one.
    """

    name = "heads permuted"
    family = "head order"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for several heads."""
        return bool(roles_with_heads(geometry))

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Permute the heads of one role."""
        role = draw.choice(roles_with_heads(layer.geometry))
        rows = rows_of(layer.geometry, role)
        order = draw.moved(len(rows))
        faulty = layer.with_weights(**reordered(layer, role, rows[order].flatten()))
        moved = tuple((order != torch.arange(len(order))).nonzero().flatten().tolist())
        return self.case(
            layer,
            faulty,
            draw,
            stage=STAGE_OF_ROLE[role],
            parameters={"role": role, "order": tuple(order.tolist())},
            heads=None if role == "o" else moved,
        )


class OutputHeadsByGroup(Injector):
    """The columns of wo are in the order (group, kv head) for (kv head, group) (nntile #347)."""

    name = "output heads in another group order"
    family = "head order"
    equals = frozenset({"heads permuted"})

    def applies(self, geometry: Geometry) -> bool:
        """Return True for several kv heads that are shared."""
        return geometry.group > 1 and geometry.num_kv_heads > 1

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Exchange the two head axes of the columns of wo."""
        rows = rows_of(layer.geometry, "o").unflatten(0, (layer.geometry.num_kv_heads, -1))
        order = rows.transpose(0, 1).flatten()
        faulty = layer.with_weights(**reordered(layer, "o", order))
        return self.case(layer, faulty, draw, stage="output", parameters={"role": "o"})


class OutputAxesReshaped(Injector):
    """wo is reshaped as if its axes were (heads, channels, embed_dim) (nntile #402)."""

    name = "output projection reshaped with exchanged axes"
    family = "head order"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for wo that is not square; a square one would be transposed."""
        return geometry.num_heads * geometry.value_dim != geometry.embed_dim

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Store wo by columns and read it by rows."""
        wo = layer.weight("wo").detach()
        faulty = layer.with_weights(wo=wo.T.reshape(wo.shape))
        return self.case(layer, faulty, draw, stage="output", parameters={"role": "o"})


INJECTORS = (HeadsInterleaved(), HeadsPermuted(), OutputHeadsByGroup(), OutputAxesReshaped())
