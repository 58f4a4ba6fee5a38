"""Fused rows of q, k and v, read in another nesting or order."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import Injector, is_mha
from benchmarks.faults.reference_layer import ReferenceLayer

Fused = dict[str, Tensor]  # rows by role "q", "k", "v"
Join = Callable[[Fused, Geometry], Tensor]
Split = Callable[[Tensor, Geometry], Fused]


def by_role(rows: Fused, geometry: Geometry) -> Tensor:
    """Join the rows of q, then of k, then of v."""
    return torch.cat([rows["q"], rows["k"], rows["v"]])


def from_roles(fused: Tensor, geometry: Geometry) -> Fused:
    """Split rows that `by_role` joined."""
    kv_rows = geometry.num_kv_heads * geometry.head_dim
    q, k, v = fused.split([fused.shape[0] - 2 * kv_rows, kv_rows, kv_rows])
    return {"q": q, "k": k, "v": v}


def by_group(rows: Fused, geometry: Geometry) -> Tensor:
    """Join the rows of each kv head: its query heads, its key, its value."""
    heads = geometry.num_kv_heads
    return torch.cat([rows[role].unflatten(0, (heads, -1)) for role in "qkv"], 1).flatten(0, 1)


def from_groups(fused: Tensor, geometry: Geometry) -> Fused:
    """Split rows that `by_group` joined."""
    d = geometry.head_dim
    parts = fused.unflatten(0, (geometry.num_kv_heads, -1)).split([geometry.group * d, d, d], 1)
    return {role: part.flatten(0, 1) for role, part in zip("qkv", parts, strict=True)}


def reread(
    layer: ReferenceLayer,
    join: Join,
    split: Split,
) -> ReferenceLayer:
    """Return a layer whose weights and biases are joined and split in two ways."""
    changed: dict[str, Tensor] = {}
    for kind in ("w", "b"):
        if f"{kind}q" in layer.names:
            rows = {role: layer.weight(f"{kind}{role}").detach() for role in "qkv"}
            read = split(join(rows, layer.geometry), layer.geometry)
            changed |= {f"{kind}{role}": part for role, part in read.items()}
    return layer.with_weights(**changed)


def changed_heads(good: ReferenceLayer, faulty: ReferenceLayer) -> tuple[int, ...]:
    """Return the query heads whose rows of q differ."""
    heads = good.geometry.num_heads
    differs = (good.weight("wq") != faulty.weight("wq")).unflatten(0, (heads, -1)).flatten(1).any(1)
    return tuple(differs.nonzero().flatten().tolist())


class _Nesting(Injector):
    """Rows are joined in one nesting and split in another."""

    family = "fused rows"
    readings: ClassVar[dict[str, tuple[Join, Split]]] = {
        "by role": (by_group, from_roles),
        "by head": (by_role, from_groups),
    }

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Read the rows in the wrong nesting."""
        read = draw.choice(sorted(self.readings))
        faulty = reread(layer, *self.readings[read])
        parameters = {"read": read, "stored": ({*self.readings} - {read}).pop()}
        heads = changed_heads(layer, faulty)
        return self.case(layer, faulty, draw, stage="q", parameters=parameters, heads=heads)


class FusedNesting(_Nesting):
    """Rows [3, H, d] are read as [H, 3, d] or the reverse (mlxcel #928, transformers #35088)."""

    name = "nesting of fused rows"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for multi-head attention of several heads with one channel count."""
        return is_mha(geometry)


class FusedGroups(_Nesting):
    """Rows by kv group are read as [q|k|v] or the reverse (NeMo-RL #2802, gpt-neox #1314)."""

    name = "kv groups of fused rows"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for several kv heads that are shared."""
        same = geometry.head_dim == geometry.value_dim and not geometry.cross
        return same and geometry.group > 1 and geometry.num_kv_heads > 1


class FusedOrder(Injector):
    """The three roles of fused rows are read in turned order (jsbaan/transformer-from-scratch #1).

    Exchanges of two roles are causes of their own.
    """

    name = "order of fused rows"
    family = "fused rows"

    def applies(self, geometry: Geometry) -> bool:
        """Return True where the three roles have the same shape."""
        return is_mha(geometry)

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Read the roles in the order "kvq" or "vqk"."""
        stored = draw.choice(("kvq", "vqk"))
        weights = layer.all_weights()
        changed = {
            f"{kind}{role}": weights[f"{kind}{source}"]
            for kind in "wb"
            for role, source in zip("qkv", stored, strict=True)
            if f"{kind}{role}" in weights
        }
        faulty = layer.with_weights(**changed)
        return self.case(layer, faulty, draw, stage="q", parameters={"stored": stored})


INJECTORS = (FusedNesting(), FusedGroups(), FusedOrder())
