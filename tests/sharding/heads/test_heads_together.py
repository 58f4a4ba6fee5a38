"""Heads over ranks together with FSDP2, checkpointing, AdamW, clipping and a cache."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from headwise import Attention, Mask, MultiheadAttention, Rotary
from headwise.layers.distance import Alibi, T5Bias
from headwise.layers.norm import QKNorm
from headwise.sharding import Heads, clip_gradients, gather_state, heads_plan, load_state
from tests.sharding.heads.compared import HEADS, attention, divided, largest_excess, moved, whole
from tests.sharding.ranks import ranks

pytestmark = pytest.mark.slow

STEPS, BATCH, LENGTH, EMBED = 3, 4, 23, 36
# Without a bias of keys, whose gradient is rounding alone, which AdamW would make a full step.
NATIVE: dict[str, Any] = {
    "num_kv_heads": 4,
    "k_bias": False,
    "out_dim": EMBED,
    "rotary": Rotary(),
    "qk_norm": QKNorm(),
    "sink": True,
    "score_bias": T5Bias(buckets=8, max_distance=20),
}


class Block(nn.Module):
    """Attention of both kinds with a plain layer between, recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(EMBED, 40).double()
        self.native = attention(**NATIVE)
        drop_in = MultiheadAttention(EMBED, HEADS, bias=False, batch_first=True)
        self.drop_in = moved(drop_in).double()

    def attend(self, x: Tensor) -> Tensor:
        x = x + self.native(self.inner(x), mask=Mask.causal())
        return x + self.drop_in(x, x, x, need_weights=False)[0]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.attend, x, use_reentrant=False)
        return result


def tokens() -> Tensor:
    shape = (BATCH, LENGTH, EMBED)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).double()


def trained(model: nn.Module, x: Tensor) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and norms of gradients after some steps of AdamW with clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    norms = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norms.append(float(clip_gradients(model.parameters(), max_norm=0.5)))
        optimizer.step()
    return gather_state(model), norms


def steps_differ(first: Any, second: Any) -> list[float]:
    norms = max(abs(a - b) / b for a, b in zip(first[1], second[1], strict=True))
    return [largest_excess(first[0], second[0]), norms]


def train_with(shard: Callable[[nn.Module], Tensor]) -> list[float]:
    model, plain = Block(), Block()
    found, expected = trained(model, shard(model)), trained(plain, tokens())
    assert expected[1][0] > 1, "clipping does nothing"
    first = Block().state_dict()
    assert all(not torch.equal(x, first[name]) for name, x in found[0].items())
    return steps_differ(found, expected)


def heads_alone(model: nn.Module) -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, heads_plan(model))
    return tokens()


def heads_and_data(model: nn.Module) -> Tensor:
    """Two ranks for the heads, and the batch over two: FSDP's gradient is the mean of both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    parallelize_module(model, mesh["heads"], heads_plan(model))
    fully_shard(model, mesh=mesh["data"])
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return tokens().chunk(2)[mesh.get_local_rank("data")]


def train_heads() -> list[float]:
    return train_with(heads_alone)


def train_both() -> list[float]:
    return train_with(heads_and_data)


@pytest.mark.parametrize(("count", "train"), [(2, train_heads), (4, train_both)])
def test_training_is_that_of_one_process(count: int, train: Callable[[], list[float]]) -> None:
    for excess, norms in ranks(count).run(train):
        assert excess <= 1
        assert norms <= 1e-12


# ---- other uses of a layer ---------------------------------------------------------------------


def second_derivatives() -> list[float]:
    # torch's fused kernel has no second derivative; that of a softcap does.
    layer = attention(num_kv_heads=4, rotary=Rotary(), qk_norm=QKNorm(), softcap=3.0)
    x = torch.randn(2, LENGTH, 40, generator=torch.Generator().manual_seed(1)).double()
    found = []
    for module in (layer, divided(layer)):
        leaf = x.clone().requires_grad_()
        output = module(leaf).square().sum()
        (gradient,) = torch.autograd.grad(output, leaf, create_graph=True)
        gradient.square().sum().backward()
        found.append({"input": leaf.grad, "weight": whole(module.v_proj.weight.grad)})
    return [
        float((found[0][name] - found[1][name]).abs().max() / found[0][name].abs().max())
        for name in found[0]
    ]


def test_gradients_of_gradients() -> None:
    assert max(max(errors) for errors in ranks(2).run(second_derivatives)) <= 1e-12


def readings_and_steps() -> dict[str, float]:
    options = {"num_kv_heads": 4, "score_bias": Alibi(), "window": (9, 0), "sink": True}
    layer = attention(**options)
    sharded = divided(layer)
    x = torch.randn(3, LENGTH, 40, generator=torch.Generator().manual_seed(1)).double()
    part = sharded.part
    chosen = slice(part.heads.start, part.heads.stop)
    lengths = Mask.lengths(queries=torch.tensor([23, 7, 1]), keys=torch.tensor([23, 7, 1]))
    with torch.no_grad():
        cache, own = layer.cache(batch=3, length=40), sharded.cache(batch=3, length=40)
        kv_heads = own._k.shape[1]
        pairs = [(layer(x, mask=lengths, cache=cache), sharded(x, mask=lengths, cache=own))]
        for _ in range(4):
            token = torch.randn(3, 1, 40, generator=torch.Generator().manual_seed(2)).double()
            pairs.append((layer(token, cache=cache), sharded(token, cache=own)))
        return {
            "steps": max(float((a - b).abs().max()) for a, b in pairs),
            "kv_heads": kv_heads - 4 / dist.get_world_size(),
            "contributions": float((layer.contributions(x) - sharded.contributions(x)).abs().max()),
            "matrix": float(
                (layer.matrix(x).entropy()[:, chosen] - sharded.matrix(x).entropy()).abs().max()
            ),
            "copy": float((copy.deepcopy(sharded)(x) - layer(x)).abs().max()),
        }


def test_readings_and_steps_with_a_cache() -> None:
    for found in ranks(2).run(readings_and_steps):
        assert {name for name, error in found.items() if not error <= 1e-12} == set()


def from_meta() -> list[Any]:
    """Made without memory, divided, and filled from a whole state dict."""
    options = {**NATIVE, "head_dim": 10}
    with torch.device("meta"):
        layer = Attention(40, HEADS, **options, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(layer, mesh, Heads()).to_empty(device="cpu")
    plain = Attention(40, HEADS, **options, dtype=torch.float64)
    load_state(layer, plain.state_dict())
    x = torch.randn(2, LENGTH, 40, generator=torch.Generator().manual_seed(1)).double()
    layer(x).sum().backward()
    # The gradient of what all heads share is a sum that has not been computed yet.
    partial = isinstance(layer.q_norm.weight.grad.placements[0], Partial)
    return [float((layer(x) - plain(x)).detach().abs().max()), partial, repr(layer).count("here")]


def test_a_layer_made_on_the_meta_device() -> None:
    for error, partial, described in ranks(2).run(from_meta):
        assert error <= 1e-12
        assert partial
        assert described == 1


def outside_of_fsdp() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    layer = parallelize_module(attention(), mesh["heads"], Heads())
    fully_shard(layer, mesh=mesh["data"])
    try:
        layer.matrix(torch.randn(1, 5, 40).double())
    except ValueError as error:
        return str(error)
    return ""


def test_a_reading_outside_of_fsdp_is_refused() -> None:
    assert {"register_fsdp_forward_method" in text for text in ranks(4).run(outside_of_fsdp)} == {
        True
    }
