"""Attention over ranks equals attention without them: outputs and all gradients, each way."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from headwise.function.budget import Budget
from headwise.matrix.operator import AttentionMatrix
from headwise.sharding import attend
from headwise.sharding.sequence._attend import find_heads_refusal
from tests.quick import others_extra
from tests.sharding.ranks import ranks
from tests.sharding.sequence.cases import (
    DOUBLE,
    MASKS,
    layouts_of,
    make,
    with_leaves,
)

pytestmark = pytest.mark.slow

TINY = [f"{name} {n}" for name in ("causal", "segments", "dense") for n in (1, 3, 5)]
SEEDS = [f"seed {seed}" for seed in range(16)]
NAMES = [*MASKS, *TINY, "causal 61 8 2", "heads 40 6 3", "window 61 8 4"]
NAMES_OF = {2: [*NAMES, *SEEDS[::2]], 4: [*NAMES, *SEEDS[1::2]]}
PLACED = ("contiguous", "zigzag")


def upstream_of(p: Any) -> Tensor:
    shape = (*p.q.shape[:3], p.v.shape[3])
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)


def ways_of(p: Any, count: int) -> tuple[str, ...]:
    refusal = find_heads_refusal(p.q.shape[1], p.k.shape[1], count)
    return ("gather", "ring") if refusal else ("heads", "gather", "ring")


def attend_to(names: list[str]) -> list[list[Any]]:
    """Attend to each problem, each way and with each layout; return local outputs and gradients."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, results = dist.get_rank(), []
    for name in names:
        p = make(name)
        upstream = upstream_of(p)
        for by in ways_of(p, mesh.size()):
            for kind in PLACED:
                layout, key_layout = layouts_of(p, kind, mesh.size())
                local, leaves = with_leaves(p)
                q = layout.split(p.q, rank).clone().requires_grad_()
                k, v = (key_layout.split(x, rank).clone().requires_grad_() for x in (p.k, p.v))
                out = attend(
                    *(q, k, v, mesh),
                    by=by,
                    layout=layout,
                    key_layout=key_layout,
                    **local.kwargs,
                )
                gradients = torch.autograd.grad(
                    out, [q, k, v, *leaves], layout.split(upstream, rank), materialize_grads=True
                )
                results.append([x.numpy() for x in (out.detach(), *gradients)])
    return results


@pytest.mark.parametrize("count", others_extra([2, 4]))
def test_outputs_and_gradients_are_those_of_the_whole_sequence(count: int) -> None:
    names = NAMES_OF[count]
    results = zip(*ranks(count).run(attend_to, names), strict=True)
    for name in names:
        p, budgets, expected = make(name), budgets_of(name), gradients_of_biases(name)
        for by in ways_of(p, count):
            for kind in PLACED:
                parts = [list(map(torch.from_numpy, result)) for result in next(results)]
                layout, key_layout = layouts_of(p, kind, count)
                out, q, k, v, *shared = zip(*parts, strict=True)
                budgets["head outputs"].assert_holds(join(layout, out))
                budgets["q"].assert_holds(join(layout, q))
                budgets["k"].assert_holds(join(key_layout, k))
                budgets["v"].assert_holds(join(key_layout, v))
                sums = [torch.stack(x).sum(0) for x in shared]
                if p.sink is not None:
                    budgets["sink"].assert_holds(sums.pop(0))
                for a, b in zip(sums, expected, strict=True):
                    message = f"gradient of a bias, {name}, by {by}, {kind}"
                    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=message)
    assert next(results, None) is None


def join(layout: Any, parts: tuple[Tensor, ...]) -> Tensor:
    return layout.to_sequence_order(torch.cat(parts, 2), dim=2)


@cache
def budgets_of(name: str) -> dict[str, Budget]:
    p = make(name)
    outputs = Budget.for_head_outputs(p.q, p.k, p.v, **p.kwargs)
    gradients = Budget.for_gradients(p.q, p.k, p.v, grad_output=upstream_of(p), **p.kwargs)
    return {"head outputs": outputs, **gradients}


@cache
def gradients_of_biases(name: str) -> list[Tensor]:
    p, leaves = with_leaves(make(name))
    biases = leaves if p.sink is None else leaves[1:]
    if not biases:
        return []
    out = AttentionMatrix(p.q, p.k, **p.kwargs) @ p.v
    return list(torch.autograd.grad(out, biases, upstream_of(p), materialize_grads=True))
