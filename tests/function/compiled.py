"""Positions compiled and exported. Run by test_rotary.py in an interpreter of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import Rotary
from headwise.function.scaling import YarnScaling
from headwise.layers.distance import Alibi, PositionBias, T5Bias
from tests.honest import normal

LAYERS: dict[str, Rotary | PositionBias] = {
    "half-split": Rotary(width=6, scaling=YarnScaling(8.0, 256)),
    "interleaved": Rotary(width=6, pairing="interleaved", scaling=YarnScaling(8.0, 256)),
    "ALiBi": Alibi(),
    "T5": T5Bias(buckets=8, max_distance=20),
}


class Layer(nn.Module):
    def __init__(self, option: Rotary | PositionBias) -> None:
        super().__init__()
        self.rotary = option if isinstance(option, Rotary) else None
        self.position_bias = None if isinstance(option, Rotary) else option.module(6)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.rotary is not None:
            return self.rotary.rotate_both(q, k, positions)
        assert self.position_bias is not None
        bias = self.position_bias(align="bottom-right")
        shape = {"batch": 3, "heads": 6, "queries": 7, "keys": k.shape[2]}
        return bias.bind(**shape, device=q.device).table, k.clone()


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k = normal(3, 6, length, 10), normal(3, 2, length, 10, seed=1)
    return q.float(), k.float(), torch.arange(length)


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_as_one_graph_for_any_length(name: str) -> None:
    torch.compiler.reset()
    layer, graphs = Layer(LAYERS[name]), []

    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for length in (24, 29, 300):
        for found, expected in zip(compiled(*inputs(length)), layer(*inputs(length)), strict=True):
            assert torch.equal(found, expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", LAYERS)
def test_exported_for_any_length(name: str) -> None:
    layer = Layer(LAYERS[name]).eval()
    length = torch.export.Dim("length", min=2, max=4096)
    dims = ({2: length}, {2: length}, {0: length})
    program = torch.export.export(layer, inputs(29), dynamic_shapes=dims)
    for found, expected in zip(program.module()(*inputs(24)), layer(*inputs(24)), strict=True):
        assert torch.equal(found, expected)
