"""Heads split, joined or counted in another way on the same projections."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometries import alibi_slopes
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import Injector, is_mha
from benchmarks.faults.reference_layer import ReferenceLayer


class HeadCount(Injector):
    """Another number of heads on the same projections (lmdeploy #2761, transformers #32065)."""

    name = "number of heads"
    family = "head shapes"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for multi-head attention without weights of single heads."""
        partial = geometry.rotary is not None and geometry.rotary.width != geometry.head_dim
        plain = not partial and not geometry.sink and geometry.qk_norm is None
        return is_mha(geometry) and plain

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Split the channels into another number of heads."""
        g = layer.geometry
        rows = g.num_heads * g.head_dim
        counts = [n for n in range(1, 13) if n != g.num_heads and rows % (2 * n) == 0]
        count = draw.choice(counts)
        channels = rows // count
        rotary = g.rotary and replace(g.rotary, width=channels)
        faulty = layer.with_geometry(
            num_heads=count,
            num_kv_heads=count,
            head_dim=channels,
            value_dim=channels,
            rotary=rotary,
        )
        if g.alibi:
            faulty = faulty.with_weights(slopes=alibi_slopes(count))
        return self.case(layer, faulty, draw, stage="q", parameters={"heads": count})


def split_by_view(layer: ReferenceLayer, rows: Tensor, heads: int) -> Tensor:
    """Split (batch, length, rows) as if the heads came before the length."""
    batch, length, _ = rows.shape
    return rows.reshape(batch, heads, length, -1).transpose(1, 2)


class SplitByView(Injector):
    """Heads are split by a view without a transpose (jsbaan/transformer-from-scratch #4)."""

    name = "split without transpose"
    family = "head shapes"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for several heads."""
        return geometry.num_heads > 1

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Split q, k and v by a view."""
        return self.case(layer, layer.with_stages(split=split_by_view), draw, stage="q")


def joined_by_view(layer: ReferenceLayer, heads: Tensor) -> Tensor:
    """Join (batch, heads, queries, channels) as if the queries came before the heads."""
    batch, queries = heads.shape[:2]
    return heads.transpose(1, 2).reshape(batch, queries, -1)


class MergeByView(Injector):
    """Heads are joined without a transpose (649453932/Chinese-Text-Classification #53)."""

    name = "merge without transpose"
    family = "head shapes"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for several heads."""
        return geometry.num_heads > 1

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Join the heads by a view."""
        return self.case(layer, layer.with_stages(joined=joined_by_view), draw, stage="output")


INJECTORS = (HeadCount(), SplitByView(), MergeByView())
