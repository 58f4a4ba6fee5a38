"""What does not fit is refused, before anything is divided: layers, meshes, weights, inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from headwise import Attention, AttentionMatrix, MultiheadAttention
from headwise.errors import HeadwiseError, OptionError
from headwise.layers.norm import QKNorm
from headwise.sharding import Heads, heads_plan
from tests.sharding.heads.compared import world
from tests.sharding.ranks import ranks

pytestmark = pytest.mark.slow


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except HeadwiseError as error:
        return str(error)
    return ""


def divide(layer: nn.Module, **options: Any) -> nn.Module:
    return parallelize_module(layer, world(), Heads(**options))


def pair(first: nn.Module, second: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"first": first, "second": second})


# ---- layers ------------------------------------------------------------------------------------


def refused_layers() -> dict[str, tuple[str, bool]]:
    """For each case the message, and whether every parameter is still plain."""
    pruned = Attention(40, 4)
    nn.utils.parametrizations.weight_norm(pruned.v_proj)
    adapted, own_norm, extended = (
        Attention(40, 4),
        Attention(40, 4, qk_norm=QKNorm()),
        Attention(40, 4),
    )
    adapted.q_proj = nn.Sequential(adapted.q_proj)
    own_norm.q_norm = nn.RMSNorm(10)
    extended.factor = nn.Parameter(torch.ones(4))
    mixed = pair(Attention(48, 4), Attention(48, 6, num_kv_heads=3))
    tied = pair(Attention(48, 4), Attention(48, 4))
    tied["second"].q_proj.weight = tied["first"].q_proj.weight
    twice = divide(Attention(40, 4))
    sharded = Attention(40, 4)
    fully_shard(sharded, mesh=world())
    cases: dict[str, tuple[nn.Module, Callable[[], Any]]] = {
        "heads": (layer := Attention(42, 3), lambda layer=layer: divide(layer)),
        "kv": (layer := Attention(48, 6, num_kv_heads=3), lambda layer=layer: divide(layer)),
        "drop-in": (layer := MultiheadAttention(42, 3), lambda layer=layer: divide(layer)),
        "torch": (layer := nn.MultiheadAttention(40, 4), lambda layer=layer: divide(layer)),
        "linear": (layer := nn.Linear(4, 4), lambda layer=layer: divide(layer)),
        "parametrized": (pruned, lambda: divide(pruned)),
        "adapter": (adapted, lambda: divide(adapted)),
        "norm": (own_norm, lambda: divide(own_norm)),
        "extra parameter": (extended, lambda: divide(extended)),
        "second of a plan": (mixed, lambda: parallelize_module(mixed, world(), heads_plan(mixed))),
        "tied": (tied, lambda: heads_plan(tied)),
        "twice": (nn.Identity(), lambda: divide(twice)),
        "fsdp": (nn.Identity(), lambda: divide(sharded)),
        "itself": (layer := Attention(40, 4), lambda layer=layer: heads_plan(layer)),
        "none": (nn.Identity(), lambda: heads_plan(nn.Sequential(nn.MultiheadAttention(40, 4)))),
        "option": (nn.Identity(), lambda: Heads(kv="share")),  # type: ignore[arg-type]
    }
    found = {}
    for name, (module, call) in cases.items():
        message = message_of(call)
        plain = not any(isinstance(p, DTensor) for p in module.parameters())
        found[name] = (message, plain)
    return found


WORDS = {
    "heads": "num_heads=3 over 2 ranks",
    "kv": 'Heads(kv="replicate"), or a mesh of 1, 3 ranks',
    "drop-in": "a mesh of 1, 3 ranks",
    "torch": "headwise.upgrade(model) first",
    "linear": "Heads() for a Linear",
    "parametrized": "v_proj is a ParametrizedLinear with a parametrization",
    "adapter": "q_proj is a Sequential",
    "norm": "q_norm is a RMSNorm",
    "extra parameter": "factor",
    "second of a plan": "num_kv_heads=3 over 2 ranks",
    "tied": "first.q_proj.weight and second.q_proj.weight are one parameter",
    "twice": "computes heads 0 to 1 of 4 already",
    "fsdp": "is a DTensor already",
    "itself": "parallelize_module(layer, mesh, Heads())",
    "none": "headwise.upgrade(model) first",
    "option": "Heads(kv='share')",
}


def test_layers_that_do_not_fit() -> None:
    (found, _) = ranks(2).run(refused_layers)
    assert found.keys() == WORDS.keys()
    for name, (message, plain) in found.items():
        assert WORDS[name] in message, (name, message)
        assert plain, name


# ---- ranks that do not agree -------------------------------------------------------------------


def other_ranks() -> dict[str, str]:
    rank, found = dist.get_rank(), {}
    torch.manual_seed(rank)
    other = Attention(40, 4)
    found["weights"] = message_of(lambda: divide(other))
    found["still whole"] = str(any(isinstance(p, DTensor) for p in other.parameters()))
    torch.manual_seed(0)
    x = torch.randn(2, 7, 40)
    for checks in ("first", "always", "never"):
        layer = divide(Attention(40, 4), check_inputs=checks)
        found[f"{checks}: same"] = message_of(lambda layer=layer: layer(x))
        found[f"{checks}: other"] = message_of(lambda layer=layer: layer(x + rank))
    layer = divide(Attention(40, 4))
    found["other in the first call"] = message_of(lambda: layer(x + rank))
    drop_in = divide(MultiheadAttention(40, 4))
    found["key"] = message_of(lambda: drop_in(x, x + rank, x))
    layer = divide(Attention(40, 4, source_dim=33))
    source = torch.randn(2, 29, 33)
    found["later"] = message_of(lambda: layer(x, source)) or "equal in the first call"
    found["later, another length"] = message_of(lambda: layer(x, source[:, rank:]))
    found["later, a gradient"] = message_of(
        lambda: layer(x.clone().requires_grad_(bool(rank)), source)
    )
    found["later again"] = message_of(lambda: layer(x, source[:, 1:]))
    replicated = distribute_tensor(x, world(), [Replicate()])
    found["DTensor"] = message_of(lambda: divide(Attention(40, 4))(replicated))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "heads"))
    style = Heads()
    found["mesh"] = message_of(lambda: style._apply(Attention(40, 4), mesh))
    return found


def test_ranks_with_other_weights_or_inputs() -> None:
    first, second = ranks(2).run(other_ranks)
    assert first == second | {"DTensor": first["DTensor"]}
    assert "q_proj.weight differs between ranks" in first["weights"]
    assert first["still whole"] == "False"
    for name in ("first: same", "first: other", "always: same", "never: same", "never: other"):
        assert first[name] == "", name
    assert "x differs between ranks" in first["always: other"]
    assert "x differs between ranks" in first["other in the first call"]
    assert "key differs between ranks" in first["key"]
    assert first["later"] == "equal in the first call"
    assert "holds x (2, 7, 40) torch.float32, source (2, 28, 33)" in first["later, another length"]
    assert "holds x (2, 7, 40) torch.float32 with a gradient" in first["later, a gradient"]
    assert first["later again"] == ""
    assert "x is a DTensor" in first["DTensor"]
    assert 'mesh["data"] for one of data, heads' in first["mesh"]


# ---- torch's own plans and DTensors ------------------------------------------------------------


def torch_plan() -> dict[str, str]:
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    x, mesh = torch.randn(2, 7, 40), world()
    layer = parallelize_module(Attention(40, 4), mesh, columns | {"out_proj": RowwiseParallel()})
    values = parallelize_module(Attention(40, 4), mesh, {"v_proj": ColwiseParallel()})
    gathered = ColwiseParallel(output_layouts=Replicate())
    kept = ColwiseParallel(use_local_output=False)
    torch.manual_seed(0)
    plain = Attention(40, 4)
    whole = parallelize_module(plain, mesh, dict.fromkeys(("q_proj", "v_proj"), gathered))
    torch.manual_seed(0)
    difference = float((whole(x) - Attention(40, 4)(x)).abs().max().detach())
    dtensors = parallelize_module(
        Attention(40, 4), mesh, dict.fromkeys(("q_proj", "k_proj", "v_proj"), kept)
    )
    q = distribute_tensor(torch.randn(2, 4, 7, 10), mesh, [Shard(1)])
    undivided = torch.randn(2, 4, 7, 10)
    matrix = AttentionMatrix(undivided, undivided)
    return {
        "plan": message_of(lambda: layer(x)),
        "values": message_of(lambda: values(x)),
        "kept": message_of(lambda: dtensors(x)),
        "gathered": f"{difference <= 1e-6}",
        "matrix": message_of(lambda: AttentionMatrix(q, q)),
        "keys": message_of(lambda: AttentionMatrix(undivided, q)),
        "product": message_of(lambda: matrix @ q),
        "transposed": message_of(lambda: matrix.mT @ q),
    }


def test_torch_plans_and_dtensors_are_refused_or_right() -> None:
    for found in ranks(2).run(torch_plan):
        assert "q_proj gives 20 channels for 4 heads of 10" in found["plan"]
        assert "v_proj gives 20 channels for 4 kv_heads of 10" in found["values"]
        assert "headwise.sharding.Heads()" in found["plan"]
        assert found["gathered"] == "True"
        for name, operand in (
            ("matrix", "q"),
            ("keys", "k"),
            ("product", "v"),
            ("transposed", "y"),
        ):
            assert found[name].startswith(f"{operand} is a DTensor"), name
        assert found["kept"].startswith("q is a DTensor")


def test_without_a_process_group() -> None:
    with pytest.raises(OptionError, match="without a process group"):
        Heads()._apply(Attention(40, 4), None)  # type: ignore[arg-type]
