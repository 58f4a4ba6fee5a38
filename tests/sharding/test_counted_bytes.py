"""Bytes that each collective sends, against the formulas, in the forward and the backward pass."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.sharding.counted_bytes import _CollectiveCounter, counted_bytes
from tests.sharding.ranks import ranks

pytestmark = pytest.mark.slow

ROWS, WIDTH = 12, 5  # of float64: 480 bytes
SIZE = ROWS * WIDTH * 8


def call_each() -> dict[str, int]:
    """Call every collective once; return the bytes of each."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    part = x[: ROWS // n].clone()
    parts = [torch.empty_like(part) for _ in range(n)]
    after, before = (rank + 1) % n, (rank - 1) % n
    splits = [ROWS - n + 1, *[1] * (n - 1)]  # all that is not 1 row goes to rank 0
    received = torch.empty(n * splits[rank], WIDTH, dtype=torch.float64)
    calls: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather(parts, part),
        "all_gather of one tensor": lambda: dist.all_gather_single(torch.empty_like(x), part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, x),
        "all_to_all": lambda: dist.all_to_all(parts, list(x.chunk(n))),
        "all_to_all of one tensor": lambda: dist.all_to_all_single(torch.empty_like(x), x),
        "all_to_all with splits": lambda: dist.all_to_all_single(
            received, x, [splits[rank]] * n, splits
        ),
        "broadcast": lambda: dist.broadcast(x, 1),
        "scatter": lambda: dist.scatter(part, list(x.chunk(n)) if rank == 1 else None, 1),
        "gather": lambda: dist.gather(part, parts if rank == 1 else None, 1),
        "reduce": lambda: dist.reduce(x, 1),
        "barrier": dist.barrier,
        "send": lambda: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, after),
                    dist.P2POp(dist.irecv, torch.empty_like(x), before),
                ]
            )
        ],
    }
    counts = {}
    for name, call in calls.items():
        with counted_bytes() as sent:
            call()
        counts[name] = sent.total
    return counts


@pytest.mark.parametrize("n", [2, 4])
def test_each_collective_sends_what_its_formula_says(n: int) -> None:
    part = SIZE // n
    for rank, counts in enumerate(ranks(n).run(call_each)):
        root = rank == 1
        kept = ROWS - n + 1 if rank == 0 else 1  # rows of the rank's own part with splits
        assert counts == {
            "all_reduce": 2 * (n - 1) * part,
            "all_gather": (n - 1) * part,
            "all_gather of one tensor": (n - 1) * part,
            "reduce_scatter": (n - 1) * part,
            "all_to_all": (n - 1) * part,
            "all_to_all of one tensor": (n - 1) * part,
            "all_to_all with splits": (ROWS - kept) * WIDTH * 8,
            "broadcast": (n - 1) * SIZE if root else 0,
            "scatter": (n - 1) * part if root else 0,
            "gather": 0 if root else part,
            "reduce": 0 if root else SIZE,
            "barrier": 0,
            "send": SIZE,
        }


def train_two_layers() -> tuple[dict[str, int], dict[str, int], str]:
    """Tensor parallelism by torch, and a redistribution: functional collectives."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False))
    parallelize_module(layers, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    x = torch.ones(16, 8, requires_grad=True)
    with counted_bytes() as forward:
        y = layers(x).sum()
    with counted_bytes() as backward:
        y.backward()
    sharded = distribute_tensor(torch.ones(16, 8), mesh, [Shard(0)])
    with counted_bytes() as backward_and_gather:
        sharded.redistribute(placements=[Replicate()]).to_local().sum()
    assert str(backward_and_gather).startswith("all_gather")
    return dict(forward.by_kind), dict(backward.by_kind), str(backward_and_gather)


def test_functional_collectives_are_counted_in_both_passes() -> None:
    for forward, backward, text in ranks(2).run(train_two_layers):
        assert forward == backward == {"all_reduce": 16 * 8 * 4}  # 2 x / 2 with float32
        assert "1 calls    256 B" in text


def test_an_unknown_collective_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="collective teleport"):
        _CollectiveCounter(None)._count_call("teleport", {})
