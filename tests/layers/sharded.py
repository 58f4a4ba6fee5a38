"""The layer under FSDP2 and tensor parallelism: ``python -m tests.layers.sharded FOLDER``.

Run by test_ecosystem_fsdp.py. Two processes on the CPU need no network: they meet in a file, and
talk over the loopback interface.
"""

import os
import socket
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from headwise import Attention, Mask, Rotary
from headwise.layers.distance import T5Bias
from headwise.layers.norm import QKNorm
from tests.layers.ecosystem import BATCH, EMBED, HEADS, LENGTH, PROJECTIONS, SIZES, layer_of, tokens

RANKS, SECONDS = 2, 60
MASK = Mask.causal()
OPTIONS = {
    "rotary": Rotary(),
    "qk_norm": QKNorm(),
    "sink": True,
    "score_bias": T5Bias(buckets=8, max_distance=20),
}


def whole() -> Attention:
    return layer_of(**OPTIONS)


def shard(layer: Attention, mesh: DeviceMesh, *, each: bool) -> Attention:
    """The layer as one unit, or each projection as a unit of its own within it."""
    if each:
        for name in PROJECTIONS:
            fully_shard(layer.get_submodule(name), mesh=mesh)
    fully_shard(layer, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in layer.parameters())
    return layer


def mine(x: Tensor) -> Tensor:
    """The part of a batch that this process computes."""
    return x.chunk(RANKS)[dist.get_rank()]


def loss(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, mask=MASK).square().mean()


def gathered(layer: Attention) -> dict[str, Tensor]:
    return {name: p.full_tensor() for name, p in layer.named_parameters()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(value, expected[name]) for name, value in found.items()
    )


# ---- what is checked ---------------------------------------------------------------------------


def training(mesh: DeviceMesh, *, each: bool = False) -> None:
    """Output, gradients and parameters after two steps, bit by bit those of the whole layer."""
    plain, sharded = whole(), shard(whole(), mesh, each=each)
    x = tokens(batch=RANKS * BATCH)
    optimisers = [torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in (plain, sharded)]
    for _ in range(2):
        assert torch.equal(sharded(mine(x), mask=MASK), plain(mine(x), mask=MASK))
        loss(sharded, mine(x)).backward()
        # FSDP gives the mean over the processes, each of which had its own part of the batch.
        for part in x.chunk(RANKS):
            (loss(plain, part) / RANKS).backward()
        found = {name: p.grad.full_tensor() for name, p in sharded.named_parameters()}
        assert same(found, {name: p.grad for name, p in plain.named_parameters()})
        assert all(own.abs().max() > 0 for own in found.values())
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        assert same(gathered(sharded), dict(plain.named_parameters()))
    assert not same(gathered(sharded), dict(whole().named_parameters()))


def training_of_units(mesh: DeviceMesh) -> None:
    """The same with four units within the layer's."""
    training(mesh, each=True)


def readings(mesh: DeviceMesh) -> None:
    """A cache is no DTensor, and what FSDP is told of gathers the weights as forward does."""
    plain, sharded = whole(), shard(whole(), mesh, each=False)
    x = mine(tokens(batch=RANKS * BATCH))
    with torch.no_grad():
        assert torch.equal(stepped(sharded, x), stepped(plain, x))
        for name in ("contributions", "head_outputs"):
            sharded.reshard()
            register_fsdp_forward_method(sharded, name)
            assert torch.equal(getattr(sharded, name)(x), getattr(plain, name)(x))


def stepped(layer: Attention, x: Tensor) -> Tensor:
    cache = layer.cache(batch=BATCH, length=LENGTH)
    steps = [layer(part, mask=MASK, cache=cache) for part in x.split(1, dim=1)]
    return torch.cat(steps, dim=1)


def tensor_parallel(mesh: DeviceMesh) -> None:
    """Float32 DTensors: each process has half of the heads, and torch's plan the rest."""
    plain, split, exact = whole(), whole(), whole().double()
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = dict.fromkeys(PROJECTIONS[:3], columns) | {"out_proj": rows}
    parallelize_module(split, mesh, plan)
    split.num_heads //= RANKS
    split.num_kv_heads //= RANKS
    for layer in (plain, split, exact):
        layer.score_bias = layer.sink = None  # theirs are for all heads
    x = tokens()
    with torch.no_grad():
        torch.testing.assert_close(split(x, mask=MASK), plain(x, mask=MASK))
    for layer in (plain, split, exact):
        layer(x.to(layer.q_norm.weight.dtype), mask=MASK).square().sum().backward()
    for name in PROJECTIONS:
        grads = [layer.get_submodule(name).weight.grad for layer in (split, plain, exact)]
        assert isinstance(grads[0], DTensor)
        found, single, double = grads[0].full_tensor(), *grads[1:]
        limit = 3 * (single - double).abs().max()
        limit += torch.finfo(torch.float32).eps * double.abs().max()
        assert (found - double).abs().max() <= limit


def from_meta(mesh: DeviceMesh) -> None:
    """Made without memory, sharded, and then drawn, or loaded from a whole state_dict."""
    with torch.device("meta"):
        layer = Attention(EMBED, HEADS, **SIZES, **OPTIONS)
    shard(layer, mesh, each=False).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(3 + dist.get_rank())
    layer.reset_parameters()
    for name, value in gathered(layer).items():
        own = layer.get_submodule(name.rpartition(".")[0])
        if name.endswith("proj.weight"):
            together = 60 + 20 + 14  # the widths of queries, keys and values
            width = own.in_features if name.startswith("out") else (EMBED + together) / 6
            assert 0.9 * width**-0.5 < value.abs().max() <= width**-0.5
            assert len(value.unique()) > 0.99 * value.numel()
        else:
            assert torch.all(value == (1 if "norm" in name else 0)), name
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(layer, whole().state_dict(), options=options)
    x = mine(tokens(batch=RANKS * BATCH))
    assert torch.equal(layer(x, mask=MASK), whole()(x, mask=MASK))
    state = get_model_state_dict(layer, options=options)
    assert same(state, dict(whole().state_dict()))


CHECKS: tuple[Callable[[DeviceMesh], None], ...] = (
    training,
    training_of_units,
    readings,
    tensor_parallel,
    from_meta,
)


def work(rank: int, file: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=SECONDS),
    )
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        for check in CHECKS:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # torch's own linear layer returns a view for input of three axes.
                warnings.filterwarnings("ignore", ".*returned a view tensor")
                # Each process has a seed of its own, as this one asks for.
                warnings.filterwarnings("ignore", ".*random operators may not have complete")
                check(mesh)
            if rank == 0:
                print(check.__name__, flush=True)
        dist.barrier()  # neither leaves while the other still speaks to it
    finally:
        dist.destroy_process_group()
    # Every check has passed. gloo's threads may abort an interpreter that takes its time to leave.
    os._exit(0)


def main(folder: str) -> None:
    """All checks in two processes; raises what any of them raises."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
    torch.multiprocessing.spawn(work, args=(str(Path(folder) / "meeting"),), nprocs=RANKS)


if __name__ == "__main__":
    main(sys.argv[1])
