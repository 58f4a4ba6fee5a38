"""Bytes on the wire and the choice of a way, against the formulas of the documentation."""

from dataclasses import astuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from headwise.masks.mask import Mask
from headwise.sharding import SequenceLayout, attend, explain_attend
from tests.sharding.counted_bytes import counted_bytes
from tests.sharding.ranks import ranks

pytestmark = pytest.mark.slow

BATCH, HEAD_DIM, VALUE_DIM = 2, 10, 7


def operands(length: int, heads: int, kv_heads: int, value_dim: int) -> list[Tensor]:
    sizes = ((heads, HEAD_DIM), (kv_heads, HEAD_DIM), (kv_heads, value_dim))
    return [torch.randn(BATCH, n, length, width, requires_grad=True) for n, width in sizes]


def count(by: str, lengths: list[int], heads: int, kv_heads: int, value_dim: int) -> Any:
    """Return the counted bytes of both passes, and those of the plan."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout = SequenceLayout.of_lengths(lengths)
    local = operands(layout.lengths[mesh.get_local_rank()], heads, kv_heads, value_dim)
    options = {"by": by, "layout": layout, "mask": Mask.causal()}
    plan = explain_attend(*local, mesh, **options)
    with counted_bytes() as checks:
        explain_attend(*local, mesh, **options)
    with counted_bytes() as forward:
        out = attend(*local, mesh, **options, check="never")
    with counted_bytes() as backward:
        out.sum().backward()
    return forward.total, backward.total, checks.total, astuple(plan)


@pytest.mark.parametrize(("n", "heads", "kv_heads"), [(2, 6, 2), (4, 8, 2)])
def test_counted_bytes_are_those_of_the_formula(n: int, heads: int, kv_heads: int) -> None:
    length, width = 60 * n, HEAD_DIM
    size, cost = 4 * BATCH * length * width, (n - 1) / n
    formulas = {
        "heads": [size * (2 * heads + 2 * max(kv_heads, n)) * cost / n] * 2,
        "gather": [size * 2 * kv_heads * cost] * 2,
        "ring": [size * 2 * kv_heads * cost, 2 * size * 2 * kv_heads * cost],
    }
    for by, expected in formulas.items():
        for forward, backward, checks, _ in ranks(n).run(
            count, by, [60] * n, heads, kv_heads, width
        ):
            assert [forward, backward] == expected
            assert checks < 0.01 * expected[0]


@pytest.mark.parametrize("lengths", [[13, 12], [5, 0], [4, 3, 3, 3], [1, 0, 2, 0]], ids=str)
def test_a_plan_is_exact_for_odd_lengths(lengths: list[int]) -> None:
    n = len(lengths)
    for by in ("heads", "gather", "ring"):
        for forward, backward, _, plan in ranks(n).run(count, by, lengths, 2 * n, n, VALUE_DIM):
            assert (forward, backward) == plan[2:4], by


def explain(heads: int, kv_heads: int, limit: int | None, kind: str) -> tuple[str, str, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout: SequenceLayout = getattr(SequenceLayout, kind)(64 * mesh.size(), mesh.size())
    local = operands(64, heads, kv_heads, VALUE_DIM)
    options = {"layout": layout, "mask": Mask.causal(), "limit": limit}
    plan = explain_attend(*local, mesh, **options)
    return plan.by, str(plan), plan.imbalance


def test_the_default_way_and_its_reason() -> None:
    ((by, text, _), *others) = ranks(2).run(explain, 6, 2, None, "contiguous")
    assert (by, text) == others[0][:2]
    assert by == "heads"
    assert "each rank gets whole heads" in text
    assert "0.0 % more than the mean" in text  # each rank has all queries of some heads
    by, text, imbalance = ranks(4).run(explain, 6, 2, None, "contiguous")[0]
    assert by == "gather"
    assert "4 ranks do not divide 6 heads; all keys and values take 70 kB" in text
    assert imbalance > 0.7
    by, text, imbalance = ranks(4).run(explain, 6, 2, 60_000, "zigzag")[0]
    assert by == "ring"
    assert "would take 70 kB, the limit is 60 kB" in text
    assert imbalance < 0.01
    text = ranks(4).run(explain, 12, 3, None, "zigzag")[0][1]
    assert text.startswith("by gather: 3 kv_heads and 4 ranks do not divide each other")
    assert ranks(4).run(explain, 8, 2, None, "zigzag")[0][0] == "heads"
