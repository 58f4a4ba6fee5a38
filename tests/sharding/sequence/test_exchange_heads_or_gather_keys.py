"""The ways on their own: bit-identity, half types, two mesh dimensions, and second gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from headwise.function.budget import Budget
from headwise.masks.mask import Mask
from headwise.matrix.operator import AttentionMatrix
from headwise.sharding import SequenceLayout, attend
from tests.sharding.ranks import ranks

pytestmark = pytest.mark.slow


def operands(length: int, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(2, n, length, 16, generator=generator).to(dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def split(layout: SequenceLayout, tensors: list[Tensor], rank: int) -> list[Tensor]:
    return [layout.split(x.detach(), rank).clone().requires_grad_() for x in tensors]


def attend_by_heads(kind: str) -> list[bool]:
    """Compare every bit of outputs and gradients with those of one process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = operands(203, torch.float32)
    layout: SequenceLayout = getattr(SequenceLayout, kind)(203, mesh.size())
    local = split(layout, whole, mesh.get_local_rank())
    expected = AttentionMatrix(*whole[:2], mask=Mask.causal()) @ whole[2]
    out = attend(*local, mesh, layout=layout, mask=Mask.causal())
    results = [expected, *torch.autograd.grad(expected.square().sum(), whole)]
    found = [out, *torch.autograd.grad(out.square().sum(), local)]
    parts = [layout.split(x, mesh.get_local_rank()) for x in results]
    return [torch.equal(a, b) for a, b in zip(found, parts, strict=True)]


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_exchanged_heads_give_the_same_bits_as_one_process(kind: str) -> None:
    assert ranks(2).run(attend_by_heads, kind) == [[True] * 4] * 2


def attend_in(dtype: torch.dtype, by: str) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout = SequenceLayout.zigzag(61, mesh.size())
    local = split(layout, operands(61, dtype), mesh.get_local_rank())
    out = attend(*local, mesh, by=by, layout=layout, mask=Mask.causal(), softcap=3.0)
    gradients = torch.autograd.grad(out.float().square().sum(), local)
    return [x.detach().float().numpy() for x in (out, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by", ["heads", "gather", "ring"])
def test_half_types_keep_the_budget(dtype: torch.dtype, by: str) -> None:
    q, k, v = (x.detach() for x in operands(61, dtype))
    layout = SequenceLayout.zigzag(61, 2)
    parts = zip(*ranks(2).run(attend_in, dtype, by), strict=True)
    whole = [
        layout.to_sequence_order(torch.cat([*map(torch.from_numpy, x)], 2), dim=2) for x in parts
    ]
    out = whole[0].to(dtype)
    options = {"mask": Mask.causal(), "softcap": 3.0}
    Budget.for_head_outputs(q, k, v, **options).assert_holds(out)
    upstream = (2 * out.float()).to(dtype)
    budgets = Budget.for_gradients(q, k, v, grad_output=upstream, **options)
    for name, gradient in zip("qkv", whole[1:], strict=True):
        budgets[name].assert_holds(gradient.to(dtype))


def attend_on_both_axes(by: str) -> list[bool]:
    """Divide heads over one axis of a mesh by hand, and the sequence over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "sequence"))
    whole = operands(37, torch.float64)
    expected = AttentionMatrix(*whole[:2], mask=Mask.causal()) @ whole[2]
    results = [expected, *torch.autograd.grad(expected.square().sum(), whole)]
    of_heads, rank = mesh.get_local_rank("heads"), mesh.get_local_rank("sequence")
    layout = SequenceLayout.zigzag(37, 2)
    mine = [layout.split(x.detach().chunk(2, 1)[of_heads], rank) for x in whole]
    local = [x.clone().requires_grad_() for x in mine]
    out = attend(*local, mesh["sequence"], by=by, layout=layout, mask=Mask.causal())
    found = [out, *torch.autograd.grad(out.square().sum(), local)]
    parts = [layout.split(x.chunk(2, 1)[of_heads], rank) for x in results]
    return [torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in zip(found, parts, strict=True)]


@pytest.mark.parametrize("by", ["gather", "ring"])
def test_one_axis_of_a_mesh_of_two(by: str) -> None:
    assert ranks(4).run(attend_on_both_axes, by) == [[True] * 4] * 4


def second_gradient(by: str) -> bool | str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = operands(13, torch.float64)
    layout = SequenceLayout.contiguous(13, mesh.size())
    local = split(layout, whole, mesh.get_local_rank())
    # The softcap leads to the tiled kernel: torch's fused one has no second gradient.
    found = [attend(*local, mesh, by=by, layout=layout, softcap=2.0)]
    expected = [AttentionMatrix(*whole[:2], softcap=2.0) @ whole[2]]
    for results, leaves in ((found, local), (expected, whole)):
        first = torch.autograd.grad(results[0].square().sum(), leaves, create_graph=True)
        penalty = torch.stack([x.square().sum() for x in first]).sum()
        try:
            penalty.backward()
        except RuntimeError as error:
            return str(error)
        results += [leaf.grad for leaf in leaves]
    parts = [layout.split(x, mesh.get_local_rank()) for x in expected]
    return all(map(torch.allclose, found, parts))


def test_second_gradients_of_exchanged_heads_and_gathered_keys() -> None:
    assert ranks(2).run(second_gradient, "heads") == [True, True]
    assert ranks(2).run(second_gradient, "gather") == [True, True]
    assert "once_differentiable" in ranks(2).run(second_gradient, "ring")[0]
