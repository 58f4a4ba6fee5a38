"""Scans of models that are divided over ranks: those of the whole model, on every rank."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import headwise
from headwise import Attention, Mask, MultiheadAttention
from headwise.errors import HeadwiseError
from headwise.layers.distance import Alibi
from headwise.models import tiny
from headwise.scanning.result import HeadScan
from headwise.sharding import heads_plan, scan_sharded
from headwise.sharding.scan import _gather_tensor_heads_from_ranks
from tests.sharding.ranks import ranks

pytestmark = pytest.mark.slow

TEXT = "def attend(q, k, v):\n    return softmax(q @ k.T) @ v\n" * 2
ROUNDING = 1e-5  # of float32 activations of size 1 whose sums have another order
LLAMA = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 6,
}


def worst(scan: HeadScan, whole: HeadScan) -> dict[str, float]:
    """The largest difference in each statistic, of those that differ."""
    apart = {
        name: float((scan[name] - whole[name]).abs().nan_to_num().max()) for name in whole.measured
    }
    return {name: value for name, value in apart.items() if value}


def message_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    try:
        call(*arguments, **options)
    except HeadwiseError as error:
        return error.saw
    return "no error"


# ---- FSDP2 -------------------------------------------------------------------------------------


def fsdp(units: str) -> nn.Module:
    model = tiny.load()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kinds = {"linear": nn.Linear, "block": type(model.blocks[0])}[units]
    for module in list(model.modules()):
        if isinstance(module, kinds):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def scans_of_fsdp() -> list[tuple[str, str | None, dict[str, float], bool]]:
    ids = tiny.encode(TEXT)[None]
    whole = headwise.scan(tiny.load(), ids)
    results = []
    for units, run in (("block", headwise.scan), ("linear", scan_sharded)):
        model = fsdp(units)
        is_divided = all(isinstance(p, DTensor) for p in model.parameters())
        scan = run(model, ids)
        results.append(
            (scan.model, whole.reason_not_mergeable(scan), worst(scan, whole), is_divided)
        )
    return results


def test_fsdp2_gives_the_scan_of_the_whole_model() -> None:
    """The same bits, of every statistic, also those of the unembedding."""
    for results in ranks(2).run(scans_of_fsdp):
        assert results == [("Tiny", None, {}, True)] * 2


def infinite_weights() -> str:
    model = fsdp("block")
    with torch.no_grad():
        local = model.blocks[1].attention.q_proj.weight.to_local()
        if dist.get_rank() == 1:
            local[0, 0] = torch.inf
    return message_of(headwise.scan, model, tiny.encode(TEXT)[None])


def test_an_infinite_weight_of_one_rank_is_an_error_on_both() -> None:
    first, second = ranks(2).run(infinite_weights)
    assert first == second
    assert (
        "blocks.1.attention.q_proj.weight holds 1 of 65,536 numbers" in first
        or "holds 1 of" in first
    )


# ---- transformers' tensor-parallel plan ---------------------------------------------------------


def save_llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)


def load_llama(folder: Path, **options: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM  # only in ranks that need it: it takes seconds

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="headwise", **options)


def scans_of_plan(folder: Path) -> tuple[str, str | None, dict[str, float], tuple[int, ...], bool]:
    from transformers.distributed import DistributedConfig

    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count)
    headwise.register_huggingface()
    ids = torch.randint(120, (2, 29), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][0, :5] = 0
    whole = headwise.scan(load_llama(folder), inputs)
    sharded = load_llama(folder, distributed_config=DistributedConfig(tp_plan="auto"))
    refusal = message_of(headwise.scan, sharded, inputs)
    scan = scan_sharded(sharded, inputs)
    again = scan_sharded(sharded, inputs, heads=[1, 10], statistics="entropy")
    heads = again.layer_scans[0].heads
    is_column = bool((again["entropy"][:, [1, 10]] == scan["entropy"][:, [1, 10]]).all())
    return refusal, whole.reason_not_mergeable(scan), worst(scan, whole), heads, is_column


def test_transformers_plan_has_the_heads_of_the_whole_model(tmp_path: Path) -> None:
    save_llama(tmp_path)
    for refusal, difference, apart, heads, is_column in ranks(2).run(scans_of_plan, tmp_path):
        assert refusal == (
            "model.layers.0.self_attn, whose output projection is divided over devices: "
            "6 of 12 heads are computed here"
        )
        assert difference is None
        assert max(apart.values()) < ROUNDING
        assert heads == (1, 10)
        assert is_column


# ---- headwise's own layers ----------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        native = Attention(36, 6, num_kv_heads=2, head_dim=10, value_dim=7, **options)
        self.layers = nn.ModuleList([native, MultiheadAttention(36, 6, batch_first=True)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layers[0](x, mask=Mask.causal())
        return x + self.layers[1](x, x, x, need_weights=False)[0]


def embeddings() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 24, 36, dtype=torch.float64, generator=generator)


def scans_of_heads() -> list[Any]:
    """Two scans with their differences, and two refusals."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, results = embeddings(), []
    for options in ({}, {"sink": True}):
        model = Layers(**options).double()
        whole = headwise.scan(model, x)
        parallelize_module(model, mesh, heads_plan(model))
        scan = scan_sharded(model, x)
        results.append(
            (whole.reason_not_mergeable(scan), max(worst(scan, whole).values(), default=0.0))
        )
    slopes = Layers(score_bias=Alibi()).double()
    parallelize_module(slopes, mesh, heads_plan(slopes))
    return [*results, message_of(scan_sharded, slopes, x), message_of(headwise.scan, model, x)]


def test_heads_over_ranks_have_the_scan_of_the_whole_model() -> None:
    for plain, sink, biased, refusal in ranks(2).run(scans_of_heads):
        for difference, apart in (plain, sink):
            assert difference is None
            assert apart < 1e-12
        assert biased == (
            "layers.0, whose heads are divided over devices and have score biases of their own"
        )
        assert refusal.startswith(
            "layers.0, whose output projection is divided over devices: 3 of 6"
        )


def other_inputs() -> list[str]:
    ids = tiny.encode(TEXT)[None]
    return [message_of(scan_sharded, tiny.load(), ids + dist.get_rank())]


def test_other_inputs_on_a_rank_are_refused_on_both() -> None:
    message = "inputs of rank 1, which differs from inputs of rank 0"
    assert ranks(2).run(other_inputs) == [[message]] * 2


def scan_of_heads_and_fsdp() -> tuple[str | None, float, str]:
    """The scan on a mesh of two dimensions, and the refusal of heads over both of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    model, x = Layers().double(), embeddings()
    whole = headwise.scan(model, x)
    parallelize_module(model, mesh["heads"], heads_plan(model))
    fully_shard(model, mesh=mesh["data"])
    scan = scan_sharded(model, x)
    weight: Any = distribute_tensor(torch.randn(5, 8), mesh, [Shard(1), Shard(1)])
    refusal = message_of(_gather_tensor_heads_from_ranks, torch.randn(1, 2, 3, 4), weight)
    return whole.reason_not_mergeable(scan), max(worst(scan, whole).values(), default=0.0), refusal


def test_heads_and_fsdp2_have_the_scan_of_the_whole_model() -> None:
    for difference, apart, refusal in ranks(4).run(scan_of_heads_and_fsdp):
        assert difference is None
        assert apart < 1e-12
        assert refusal.startswith("an output projection with the placements (Shard(dim=1), Shard")
