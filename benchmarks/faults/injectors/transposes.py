"""Square matrices that are transposed."""

from __future__ import annotations

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import STAGE_OF_ROLE, Injector
from benchmarks.faults.reference_layer import ReferenceLayer


def square_roles(geometry: Geometry) -> list[str]:
    """Return the roles whose weight is square."""
    g = geometry
    sizes = {
        "q": (g.num_heads * g.head_dim, g.embed_dim),
        "k": (g.num_kv_heads * g.head_dim, g.key_dim),
        "v": (g.num_kv_heads * g.value_dim, g.key_dim),
        "o": (g.num_heads * g.value_dim, g.embed_dim),
    }
    return [role for role, (rows, columns) in sizes.items() if rows == columns]


class SquareTransposed(Injector):
    """A square weight is transposed, which raises nothing (transformers #311, AutoGPTQ #139)."""

    name = "square matrix transposed"
    family = "transposes"

    def applies(self, geometry: Geometry) -> bool:
        """Return True where a weight is square."""
        return bool(square_roles(geometry))

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Transpose the weight of one role."""
        role = draw.choice(square_roles(layer.geometry))
        faulty = layer.with_weights(**{f"w{role}": layer.weight(f"w{role}").detach().T})
        return self.case(layer, faulty, draw, stage=STAGE_OF_ROLE[role], parameters={"role": role})


INJECTORS = (SquareTransposed(),)
