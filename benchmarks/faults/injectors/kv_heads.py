"""Key/value heads given to the wrong query heads."""

from __future__ import annotations

from torch import Tensor

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import Injector
from benchmarks.faults.reference_layer import ReferenceLayer


def tiled(layer: ReferenceLayer, x: Tensor) -> Tensor:
    """Return kv heads in the order 0, 1, 0, 1 for 0, 0, 1, 1."""
    return x.repeat(1, 1, layer.geometry.group, 1)


class KeyValueTiled(Injector):
    """kv heads are tiled where they should be repeated (onnx #7274, NATTEN #92)."""

    name = "kv heads tiled instead of repeated"
    family = "kv heads"

    def applies(self, geometry: Geometry) -> bool:
        """Return True for several kv heads that are shared."""
        return geometry.group > 1 and geometry.num_kv_heads > 1

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Tile keys and values."""
        g = layer.geometry
        heads = [h for h in range(g.num_heads) if h // g.group != h % g.num_kv_heads]
        faulty = layer.with_stages(repeated=tiled)
        return self.case(layer, faulty, draw, stage="scores", heads=tuple(heads))


INJECTORS = (KeyValueTiled(),)
