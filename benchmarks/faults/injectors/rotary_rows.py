"""Rows of q and k that a converter reorders for the other pairing of the rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import Injector, heads_of, reordered
from benchmarks.faults.reference_layer import ReferenceLayer


def rotary_order(heads: int, channels: int, width: int) -> Tensor:
    """Return the rows of an interleaved matrix in the order of the half-split pairing."""
    first = torch.arange(width).unflatten(0, (-1, 2)).T.flatten()
    head = torch.cat([first, torch.arange(width, channels)])
    return (torch.arange(heads)[:, None] * channels + head).flatten()


def conversion(geometry: Geometry, heads: int, channels: int) -> Tensor:
    """Return the order that converts rows to the pairing of the geometry."""
    rotary = geometry.rotary
    assert rotary is not None
    width = min(rotary.width, channels)
    order = rotary_order(heads, channels, width)
    return order if rotary.pairing == "half-split" else order.argsort()


def has_planes(geometry: Geometry) -> bool:
    """Return True if the two pairings differ and the conversion is no involution."""
    return geometry.rotary is not None and geometry.rotary.width > 4


class RotaryRowsMissing(Injector):
    """Rows of q and k are not converted (llama.cpp #22611, nanotron #241).

    The other pairing in the faulty layer would repair it.
    """

    name = "rotary permutation missing"
    family = "rotary rows"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a rotary embedding."""
        return has_planes(geometry)

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Undo the conversion of q and k."""
        g = layer.geometry
        changed: dict[str, Tensor] = {}
        for role in "qk":
            order = conversion(g, heads_of(g, role), g.head_dim).argsort()
            changed |= reordered(layer, role, order)
        return self.case(layer, layer.with_weights(**changed), draw, stage="q")


class RotaryRowsDoubled(Injector):
    """Rows of q and k are converted twice (onnxruntime/mobius #396).

    Without a norm, the other pairing on the right rows gives the same function.
    """

    name = "rotary permutation doubled"
    family = "rotary rows"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a rotary embedding."""
        return has_planes(geometry)

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Convert q and k once more."""
        g = layer.geometry
        changed: dict[str, Tensor] = {}
        for role in "qk":
            changed |= reordered(layer, role, conversion(g, heads_of(g, role), g.head_dim))
        equals = frozenset(() if g.qk_norm else {"rotary pairing"})
        return self.case(layer, layer.with_weights(**changed), draw, stage="q", equals=equals)


class RotaryRowsWrongHeads(Injector):
    """Rows of k are converted with a wrong number of heads (llama.cpp #2376, #3364)."""

    name = "rotary permutation with a wrong number of heads"
    family = "rotary rows"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for a full rotary embedding where another head count divides the rows."""
        return has_planes(geometry) and bool(self.counts(geometry))

    def counts(self, geometry: Geometry) -> list[int]:
        """Return wrong numbers of heads that divide the rows of k."""
        g = geometry
        if g.rotary is None or g.rotary.width != g.head_dim:
            return []
        rows = g.num_kv_heads * g.head_dim
        options = {g.num_heads, g.group, 2 * g.num_kv_heads, 1} - {g.num_kv_heads}
        return sorted(n for n in options if rows % (2 * n) == 0)

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Undo the right conversion of k and apply the wrong one."""
        g = layer.geometry
        count = draw.choice(self.counts(g))
        rows = g.num_kv_heads * g.head_dim
        stored = conversion(g, g.num_kv_heads, g.head_dim).argsort()
        wide = rows // count
        wrong = rotary_order(count, wide, wide)
        half_split = g.rotary is not None and g.rotary.pairing == "half-split"
        order = stored[wrong if half_split else wrong.argsort()]
        faulty = layer.with_weights(**reordered(layer, "k", order))
        return self.case(layer, faulty, draw, stage="k", parameters={"role": "k", "heads": count})


INJECTORS = (RotaryRowsMissing(), RotaryRowsDoubled(), RotaryRowsWrongHeads())
