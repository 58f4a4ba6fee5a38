"""Projections whose adapter or hook has no effect, or the double one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.faults.draw import Draw
from benchmarks.faults.fault_case import FaultCase
from benchmarks.faults.geometry import Geometry
from benchmarks.faults.injectors.injector import STAGE_OF_ROLE, Injector, names_of_a_scale
from benchmarks.faults.reference_layer import ReferenceLayer


def usable_roles(geometry: Geometry) -> str:
    """Return the roles on which a gain has an effect; a norm undoes those of q and k."""
    return "vo" if geometry.qk_norm else "qkvo"


def projection_of(layer: ReferenceLayer, role: str) -> nn.Linear:
    """Return a module with the weights of a role."""
    weight, bias = layer.weight(f"w{role}").detach(), layer.bias_of(f"b{role}")
    rows, columns = weight.shape
    module = nn.Linear(columns, rows, bias=bias is not None, dtype=weight.dtype)
    state = {"weight": weight} | ({} if bias is None else {"bias": bias.detach()})
    module.load_state_dict(state)
    return module


class ProjectionNeverCalled(Injector):
    """The weight of a projection is used, and its module is not called; no public report.

    A forward hook of the module multiplies its result, which the faulty layer passes by.
    """

    name = "projection never called"
    family = "adapters"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Call the module in the good layer, and use only its weight in the faulty one."""
        role, gain = draw.choice(usable_roles(layer.geometry)), draw.uniform(1.3, 2.5)
        layers: list[ReferenceLayer] = []
        for called in (True, False):
            module = projection_of(layer, role)
            module.register_forward_hook(lambda *call: call[2] * gain)
            replaced = layer.with_stages(linear=_linear(module, role, called))
            replaced.add_module(f"{role}_proj", module)
            layers.append(replaced)
        good, faulty = layers
        equals = names_of_a_scale(layer.geometry) if role in "qk" else frozenset({"factor"})
        parameters = {"role": role, "factor": 1 / gain}
        stage = STAGE_OF_ROLE[role]
        return self.case(good, faulty, draw, stage=stage, parameters=parameters, equals=equals)


def _linear(module: nn.Linear, role: str, called: bool) -> Any:
    def linear(layer: ReferenceLayer, this: str, x: Tensor) -> Tensor:
        if this != role:
            return layer.linear(this, x)
        if called:
            result: Tensor = module(x)
            return result
        return F.linear(x, module.weight, module.bias)

    return linear


class AdapterMerged(Injector):
    """A low-rank adapter is left out or merged twice (slowllama #16)."""

    name = "adapters merged or not"
    family = "adapters"

    def inject(self, layer: ReferenceLayer, draw: Draw) -> FaultCase:
        """Add the adapter once to the good layer, and never or twice to the faulty one."""
        role, rank = draw.choice("qkvo"), draw.choice((2, 3))
        times = draw.choice((0, 2))
        weight = layer.weight(f"w{role}").detach()
        rows, columns = weight.shape
        up = draw.normal(rows, rank, std=0.5 * rank**-0.5)
        delta = up @ draw.normal(rank, columns, std=columns**-0.5)
        good = layer.with_weights(**{f"w{role}": weight + delta})
        faulty = layer.with_weights(**{f"w{role}": weight + times * delta})
        return self.case(
            good,
            faulty,
            draw,
            stage=STAGE_OF_ROLE[role],
            parameters={"role": role, "rank": rank, "times": times},
        )


INJECTORS = (ProjectionNeverCalled(), AdapterMerged())
