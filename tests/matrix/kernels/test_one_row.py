"""One query without a mask: outputs and the average of heads from the row itself."""

import pytest
import torch
from torch import Tensor

from headwise import AttentionMatrix, Mask, MultiheadAttention
from headwise.function.budget import Budget
from headwise.matrix.kernels import dense


def operands(
    queries: int = 1, kv_heads: int = 6, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    q = torch.randn(3, 6, queries, 10, dtype=dtype)
    return [q, *(torch.randn(3, kv_heads, 29, 10, dtype=dtype) for _ in range(2))]


@pytest.mark.parametrize("size", [1.0, 30.0])  # of the queries: even weights, and steep ones
def test_it_is_within_the_budget(size: float) -> None:
    q, k, v = operands()
    q = q * size
    row = dense.attend_one_query(q, k, v, 0.3)
    assert row is not None
    Budget.for_head_outputs(q, k, v, scale=0.3).assert_holds(row[0])
    Budget.for_weights(q, k, read=lambda w: w.mean(1), scale=0.3).assert_holds(row[1])
    outputs, average = AttentionMatrix(q, k, scale=0.3).outputs_and_average(v)
    assert torch.equal(outputs, row[0])
    assert torch.equal(average, row[1])


@pytest.mark.parametrize(
    "other", [{"queries": 2}, {"kv_heads": 2}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}]
)
def test_whatever_it_does_not_serve_goes_to_a_kernel(other: dict[str, object]) -> None:
    q, k, v = operands(**other)  # type: ignore[arg-type]
    assert dense.attend_one_query(q, k, v, 0.3) is None


def test_a_mask_goes_to_a_kernel() -> None:
    q, k, v = operands()
    seen = torch.arange(29) < 5
    matrix = AttentionMatrix(q, k, mask=Mask.may_attend(seen, axes="keys"))
    assert not matrix.outputs_and_average(v)[1][..., 5:].any()


def test_autocast_goes_to_a_kernel() -> None:
    q, k, v = operands()
    with torch.autocast("cpu", torch.bfloat16):
        assert dense.attend_one_query(q, k, v, 0.3) is None


def test_the_explanation_says_so() -> None:
    layer = MultiheadAttention(40, 4, batch_first=True).eval()
    x = torch.randn(3, 5, 40)
    with torch.no_grad():
        assert "from the single row of weights" in str(layer.explain(x[:, :1], x, x))
        assert "in one tiled pass" in str(layer.explain(x, x, x))
