"""A layer whose heads are divided over ranks, compared with the same layer on one process."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from headwise import Attention
from headwise.layers.torch_api.layer import PACKED, SEPARATE
from headwise.sharding import Heads
from tests.sharding.counted_bytes import counted_bytes

HEADS = 12  # divisible by 2 and by 4
# A call of a layer with the leaves in the place of its inputs.
Call = Callable[[nn.Module, list[Tensor]], Tensor]


def world() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def moved(layer: nn.Module) -> nn.Module:
    """The layer with parameters of which none is 0 or 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return layer


def divided(layer: nn.Module, **options: Any) -> nn.Module:
    """A copy of the layer, with its heads divided over all ranks."""
    return parallelize_module(copy.deepcopy(layer), world(), Heads(**options))


def results(layer: nn.Module, call: Call, leaves: list[Tensor]) -> dict[str, Tensor]:
    """Run a call and its backward pass; return the output and all gradients by name."""
    leaves = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
    layer.zero_grad()
    output = call(layer, leaves)
    output.backward(direction_like(output))
    tensors = {"output": output.detach()}
    tensors |= {f"leaf {i}": x.grad for i, x in enumerate(leaves) if x.grad is not None}
    return tensors | {n: whole(p.grad) for n, p in layer.named_parameters() if p.grad is not None}


def direction_like(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)


def largest_excess(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, terms: int = 500
) -> float:
    """The largest error in units of float64 rounding: at most 1 for the same function.

    An output is a sum of ``terms`` products, and a gradient one of 100 tokens more.
    """
    assert found.keys() == expected.keys()
    excess = 0.0
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        rounding = terms * (1 if name == "output" else 100) * torch.finfo(torch.float64).eps
        error = (found[name] - tensor).abs().nan_to_num(torch.inf).max()
        excess = max(excess, float(error) / rounding / max(1.0, float(tensor.abs().max())))
    return excess


def compared(layer: nn.Module, call: Call, leaves: list[Tensor], **options: Any) -> float:
    """Return the excess over rounding of the layer with its heads divided over all ranks."""
    sharded = divided(layer, **{"check_inputs": "never"} | options)
    found, expected = results(sharded, call, leaves), results(layer, call, leaves)
    if options.get("in_proj") == "separate" and PACKED in expected:
        found[PACKED] = torch.cat([found.pop(name) for name in SEPARATE])
    return largest_excess(found, expected)


def counted(layer: nn.Module, call: Call, leaves: list[Tensor]) -> tuple[dict[str, int], ...]:
    """The collective calls of the forward pass and of the backward pass, by kind."""
    with counted_bytes() as forward:
        output = call(layer, leaves)
    with counted_bytes() as backward:
        output.backward(direction_like(output))
    return dict(forward.calls), dict(backward.calls)


def attention(**options: Any) -> Attention:
    """A layer in float64 in which no two axes have one length."""
    torch.manual_seed(0)
    sizes = {"head_dim": 10, "value_dim": 7, "out_dim": 17}
    layer = Attention(40, HEADS, **sizes | options, dtype=torch.float64)
    moved(layer)
    return layer
