"""Bytes of the plan against bytes that real processes count, for each way and in both passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from headwise import Attention, Mask, reference
from headwise.sharding import Heads, SequenceLayout, attend, counted_bytes, explain_attend
from headwise.sharding.costs.layer_costs import LayerCosts
from headwise.sharding.costs.model_sizes import ModelSizes
from headwise.sharding.costs.sharding_way import ShardingWay
from tests.sharding.ranks import ranks

pytestmark = pytest.mark.slow

BATCH, EMBED_DIM, HEADS, KV_HEADS, HEAD_DIM = 3, 40, 12, 2, 10
SIZES = ModelSizes(layers=1, embed_dim=EMBED_DIM, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
UNBIASED = dict.fromkeys(("q_bias", "k_bias", "v_bias", "out_bias"), False)
BY = {"all_to_all": "heads", "gather": "gather", "ring": "ring"}
GROUPS: dict[int, list[dict[str, int]]] = {
    2: [{"heads": 2}, {"all_to_all": 2}, {"gather": 2}, {"ring": 2}],
    4: [
        {"heads": 4},
        {"all_to_all": 4},
        {"gather": 4},
        {"ring": 4},
        {"heads": 2, "all_to_all": 2},
        {"heads": 2, "gather": 2},
        {"heads": 2, "ring": 2},
    ],
}


def tokens_of(n: int) -> int:
    return 120 * n


def run_layer(layer: Attention, x: Tensor, mesh: DeviceMesh | None, by: Any) -> Tensor:
    """The forward pass of a layer for this rank's heads and, with a mesh, its tokens."""
    if mesh is None:
        return layer(x, mask=Mask.causal())
    part, heads, kv_heads = layer.part, HEADS, KV_HEADS
    if part is not None:
        x, heads, kv_heads = (
            part.check_inputs_and_sum_gradients({"x": x})["x"],
            len(part.heads),
            len(part.kv_heads),
        )
    layout = SequenceLayout.zigzag(tokens_of(dist.get_world_size()), mesh.size())
    q = reference.split_heads(layer.q_proj(x), heads=heads)
    k, v = (reference.split_heads(p(x), heads=kv_heads) for p in (layer.k_proj, layer.v_proj))
    outputs = attend(q, k, v, mesh, by=by, layout=layout, mask=Mask.causal())
    output: Tensor = layer.out_proj(reference.merge_heads(outputs))
    return output


def count_layer(groups: dict[str, int]) -> tuple[int, int, int]:
    """Return the bytes that this rank sends in both passes, and those that the first one keeps."""
    heads = groups.get("heads", 1)
    token_ranks = dist.get_world_size() // heads
    mesh = init_device_mesh("cpu", (token_ranks, heads), mesh_dim_names=("tokens", "heads"))
    layer = Attention(EMBED_DIM, HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    if heads > 1:
        kv = "split" if heads <= KV_HEADS else "replicate"
        parallelize_module(layer, mesh["heads"], Heads(kv=kv, check_inputs="never"))
    length = tokens_of(dist.get_world_size()) // token_ranks
    x = torch.randn(BATCH, length, EMBED_DIM, requires_grad=True)
    by = next((BY[group] for group in groups if group != "heads"), None)
    kept: dict[int, int] = {}  # storage -> bytes
    weights = {whole.untyped_storage().data_ptr() for whole in map(local, layer.parameters())}

    def keep(tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with counted_bytes() as forward, saved_tensors_hooks(keep, lambda tensor: tensor):
        normalised = torch.nn.functional.rms_norm(x, (EMBED_DIM,))
        output = run_layer(layer, normalised, mesh["tokens"] if by else None, by)
    with counted_bytes() as backward:
        output.sum().backward()
    return forward.total, backward.total, sum(kept.values())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def count_ways(ways: list[dict[str, int]]) -> list[tuple[int, int, int]]:
    return [count_layer(groups) for groups in ways]


def costs(n: int, **groups: int) -> LayerCosts:
    return LayerCosts(
        sizes=SIZES, way=ShardingWay(**groups), batch=BATCH, context=tokens_of(n), itemsize=4
    )


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_of_a_layer_are_those_of_the_plan(n: int) -> None:
    """Those sent, with the comparison of shapes and masks, within 1 %; those kept within 15 %."""
    by_way = zip(*ranks(n).run(count_ways, GROUPS[n]), strict=True)
    for groups, counts in zip(GROUPS[n], by_way, strict=True):
        layer = costs(n, **groups)
        for forward, backward, _ in counts:
            assert forward == pytest.approx(sum(layer.sent_forward().values()), rel=0.01), groups
            assert backward == pytest.approx(sum(layer.sent_backward().values()), rel=0.01), groups
        # Ranks whose queries are one run keep fewer copies of gathered keys.
        most = max(kept for _, _, kept in counts)
        assert most == pytest.approx(layer.attention_bytes(), rel=0.15), groups


def explain_peaks(ways: list[str]) -> list[int]:
    """Return the bytes of a rank's operands and of the peak of both passes, beside them."""
    mesh, n = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size()
    layout = SequenceLayout.zigzag(tokens_of(n), n)
    q, k, v = (torch.empty(BATCH, h, tokens_of(1), HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS))
    options = {"layout": layout, "mask": Mask.causal()}
    plans = [explain_attend(q, k, v, mesh, by=by, **options) for by in ways]  # type: ignore[arg-type]
    return [plan.peak + q.nbytes + k.nbytes + v.nbytes for plan in plans]


@pytest.mark.parametrize(("n", "groups"), [(2, ["all_to_all", "gather", "ring"]), (4, ["ring"])])
def test_the_peak_of_a_layer_is_that_of_attend(n: int, groups: list[str]) -> None:
    """Measured peaks are at most that of `attend`: see benchmarks/sharding.py."""
    peaks = ranks(n).run(explain_peaks, [BY[group] for group in groups])[0]
    for group, peak in zip(groups, peaks, strict=True):
        layer = costs(n, **{group: n})
        row_statistics = HEADS * 4 * (2 if group == "ring" else 1)
        beside = layer.local_tokens * (2 * EMBED_DIM * 4 + row_statistics)  # input, statistics
        assert layer.attention_bytes() + layer.gradient_buffer_bytes() - beside == peak, group


def count_weights() -> tuple[int, int]:
    """Return the bytes that FSDP2 sends for a layer in the passes."""
    layer = Attention(EMBED_DIM, HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, **UNBIASED)
    fully_shard(
        layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=True
    )
    with counted_bytes() as forward:
        output = layer(torch.randn(BATCH, 24, EMBED_DIM, requires_grad=True))
    with counted_bytes() as backward:
        output.sum().backward()
    return forward.total, backward.total


@pytest.mark.parametrize("n", [2, 4])
def test_counted_bytes_of_weights_are_those_of_the_plan(n: int) -> None:
    for counted in ranks(n).run(count_weights):
        assert counted == pytest.approx(costs(n, gather=n).sent_for_weights(), rel=0.01)
