"""Heads over two ranks and the sequence over two others, on one mesh of four."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from headwise import Attention, Mask, Rotary
from headwise.function import stages
from headwise.sharding import Heads, SequenceLayout, attend
from tests.sharding.heads.compared import attention, largest_excess, whole
from tests.sharding.ranks import ranks

pytestmark = pytest.mark.slow

LENGTH, ROTARY = 61, Rotary()


def attend_over_sequence(
    layer: Attention, x: Tensor, mesh: DeviceMesh, layout: SequenceLayout
) -> Tensor:
    """The forward pass of a layer for this rank's heads and tokens."""
    part = layer.part
    assert part is not None
    x = part.check_inputs_and_sum_gradients({"x": x})["x"]
    q = stages.split_heads(layer.q_proj(x), heads=len(part.heads))
    k, v = (
        stages.split_heads(projection(x), heads=len(part.kv_heads))
        for projection in (layer.k_proj, layer.v_proj)
    )
    q, k = ROTARY.rotate_both(q, k, layout.positions(mesh.get_local_rank("sequence")))
    outputs = attend(q, k, v, mesh["sequence"], layout=layout, mask=Mask.causal())
    output: Tensor = layer.out_proj(stages.merge_heads(outputs))
    return output


def excess() -> float:
    layer = attention(num_kv_heads=4, rotary=ROTARY)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, LENGTH, 40, generator=generator, dtype=torch.float64)
    direction = torch.randn(2, LENGTH, 17, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    output = layer(x, mask=Mask.causal())
    output.backward(direction)
    expected = {"output": output.detach(), "input": x.grad}
    expected |= {name: p.grad for name, p in layer.named_parameters()}

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "heads"))
    layout = SequenceLayout.zigzag(LENGTH, 2)
    divided = parallelize_module(attention(num_kv_heads=4), mesh["heads"], Heads())
    tokens = layout.split(x.detach(), mesh.get_local_rank("sequence")).requires_grad_()
    output = attend_over_sequence(divided, tokens, mesh, layout)
    output.backward(layout.split(direction, mesh.get_local_rank("sequence")))
    found = {
        "output": layout.gather(output.detach(), mesh["sequence"]),
        "input": layout.gather(tokens.grad, mesh["sequence"]),
    }
    for name, parameter in divided.named_parameters():
        # Every parameter has the gradient of this rank's tokens.
        gradient = whole(parameter.grad).clone()
        dist.all_reduce(gradient, group=mesh.get_group("sequence"))
        found[name] = gradient
    return largest_excess(found, expected)


def test_heads_and_sequence_on_one_mesh() -> None:
    assert max(ranks(4).run(excess)) <= 1
