"""One all-reduce forward and one backward for each layer, and the bytes that these send."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise import Mask, MultiheadAttention, Rotary, ScoreBias
from headwise.function import Latent
from headwise.layers.distance import T5Bias
from headwise.layers.norm import QKNorm
from tests.sharding.counted_bytes import counted_bytes
from tests.sharding.heads.compared import HEADS, attention, counted, divided
from tests.sharding.ranks import ranks

pytestmark = pytest.mark.slow

ONE = ({"all_reduce": 1}, {"all_reduce": 1})
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "split"),
    "gqa, rotary, sink": ({"num_kv_heads": 4, "rotary": Rotary(), "sink": True}, "split"),
    "norm of heads": ({"qk_norm": QKNorm(kind="layer")}, "split"),
    "t5": ({"score_bias": T5Bias(buckets=8, max_distance=20)}, "split"),
    "one kv head": ({"num_kv_heads": 1, "qk_norm": QKNorm()}, "replicate"),
    "output gate": ({"output_gate": "channel", "num_kv_heads": 4}, "split"),
    "latent": ({"latent": Latent(rank=9, shared_width=4, query_rank=7)}, "split"),
    "cross attention": ({"source_dim": 33}, "split"),
}
WIDTH = {
    "rms": (QKNorm(over="width"), 3),
    "layer": (QKNorm(over="width", kind="layer"), 5),
}


def calls_of_layers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    x, source = torch.randn(2, 23, 40).double(), torch.randn(2, 29, 33).double()
    bias, gate = torch.randn(HEADS, 23, 23).double(), torch.rand(HEADS).double()

    def call(layer: nn.Module, leaves: list[Tensor]) -> Tensor:
        if len(leaves) == 2:
            return layer(*leaves)
        score_bias = ScoreBias.dense(leaves[1], axes="heads queries keys")
        return layer(leaves[0], mask=Mask.causal(), score_bias=score_bias, gate=leaves[2])

    for name, (options, kv) in OPTIONS.items():
        leaves = [x, source] if "source_dim" in options else [x, bias, gate]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        layer = divided(attention(**options), kv=kv, check_inputs="never")
        found[name] = counted(layer, call, leaves)
    for name, (norm, _) in WIDTH.items():
        layer = divided(attention(qk_norm=norm), check_inputs="never")
        found[name] = counted(layer, call, [t.clone().requires_grad_() for t in (x, bias, gate)])
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_one_all_reduce_each_way(count: int) -> None:
    for found in ranks(count).run(calls_of_layers):
        for name in OPTIONS:
            assert found[name] == ONE, name
        for name, (_, calls) in WIDTH.items():
            assert found[name] == ({"all_reduce": calls}, {"all_reduce": calls}), name


def calls_of_the_drop_in() -> list[Any]:
    found = []
    for need_weights in (False, True):
        layer = divided(MultiheadAttention(36, HEADS), check_inputs="never")

        def call(layer: nn.Module, leaves: list[Tensor], need: bool = need_weights) -> Tensor:
            return layer(*leaves, need_weights=need)[0]

        leaves = [torch.randn(23, 2, 36, requires_grad=True) for _ in range(3)]
        found.append(counted(layer, call, leaves))
    return found


def test_the_drop_in_adds_one_for_returned_weights() -> None:
    for found in ranks(2).run(calls_of_the_drop_in):
        assert found == [ONE, ({"all_reduce": 2}, {"all_reduce": 1})]


def sent_by_a_layer() -> tuple[int, int, list[int]]:
    layer, x = divided(attention(), check_inputs="never"), torch.randn(2, 23, 40).double()
    with counted_bytes() as forward:
        output = layer(x.requires_grad_())
    with counted_bytes() as backward:
        output.sum().backward()
    with counted_bytes() as inference, torch.no_grad():
        layer(x)
    return forward.total, backward.total, [inference.total, dist.get_world_size()]


@pytest.mark.parametrize("count", [2, 4])
def test_bytes_are_those_of_the_formula(count: int) -> None:
    """2 (n - 1) / n times the output, and the input, in bytes."""
    tokens, share = 2 * 23, 2 * (count - 1) / count
    for forward, backward, (inference, ranks_of_mesh) in ranks(count).run(sent_by_a_layer):
        assert ranks_of_mesh == count
        assert forward == inference == share * tokens * 17 * 8
        assert backward == share * tokens * 40 * 8
