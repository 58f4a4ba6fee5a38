"""Layers of all geometries, and the budget of what a cut layer must still return."""

import copy
from typing import Any

import torch
from torch import Tensor

from headwise import Attention
from headwise.function.budget import Budget
from headwise.surgery import LayerCut
from tests.layers import cases

# Options of the constructor only; what comes with a call is another room's. No cut moves heads
# that are in pairs.
GEOMETRIES = list(
    {
        tuple(sorted((axis, case[axis]) for axis in cases.LAYER)): case
        for case in cases.pairwise()
        if case["differential"] == "none"
    }.values()
)


def named(case: cases.Case) -> str:
    """The options of a case that are not the first of their axis."""
    return "-".join(
        case[axis] for axis, options in cases.LAYER.items() if case[axis] != next(iter(options))
    )


def layer_of(case: cases.Case, dtype: torch.dtype = torch.float64) -> Attention:
    """The layer of a case."""
    return cases.layer_of(case, dtype).eval()


def tensors_of(case: cases.Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, and the source where there is one."""
    return [x.detach() for x in cases.inputs_of({"source": case["source"]}, dtype)[0]]


def cut_of(layer: Attention) -> LayerCut:
    """The cut of a layer that does nothing yet."""
    return LayerCut(layer.num_heads, layer.num_kv_heads)


@torch.no_grad()
def budget_of(layer: Attention, tensors: list[Tensor]) -> Budget:
    """What the layer returns, and the rounding that every honest way of it may have."""
    names = [name for name, _ in layer.named_parameters()]

    def function(*given: Tensor) -> Tensor:
        wide: Any = copy.deepcopy(layer).to(given[0].dtype)
        state = dict(zip(names, given[len(tensors) :], strict=True))
        return torch.func.functional_call(wide, state, given[: len(tensors)])

    budget = Budget.for_function(function, *tensors, *(p.detach() for p in layer.parameters()))
    # Rounding of every sum in a row of the layer, each as long as it is.
    sums = layer.embed_dim + layer.source_dim + 4 * layer.head_dim + 160 + layer.out_dim
    sums += layer.num_heads * layer.value_dim
    floor = sums * torch.finfo(tensors[0].dtype).eps * max(1.0, float(budget.exact.abs().max()))
    return Budget(budget.name, budget.dtype, budget.exact, budget.allowed + floor, budget.axes)
