"""Clause 3: returned weights are those before dropout, differentiable, and rows sum to 1."""

import pytest
import torch
from hypothesis import given

from headwise.function import stages
from headwise.function.budget import Budget
from headwise.matrix.operator import AttentionMatrix
from tests.contract.layers import identity_layer, inputs, split
from tests.strategies import DTYPES, Problem, problems


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_weights_are_before_dropout_and_differentiable(average: bool, dropout: float) -> None:
    layer, x = identity_layer(dropout=dropout).train(), inputs().requires_grad_()
    _, weights = layer(x, x, x, average_attn_weights=average)

    def read(w: torch.Tensor) -> torch.Tensor:
        return w.mean(1) if average else w

    heads = split(x.detach())
    Budget.for_weights(heads, heads, read=read).assert_holds(weights.detach())
    upstream = torch.randn_like(weights)
    (gradient,) = torch.autograd.grad(weights, x, upstream)
    (expected,) = torch.autograd.grad(read(stages.weights(split(x), split(x))), x, upstream)
    torch.testing.assert_close(gradient, expected)


def test_dropout_does_drop() -> None:
    layer, x = identity_layer(dropout=0.5), inputs()
    assert torch.equal(layer.eval()(x, x, x)[0], layer.eval()(x, x, x)[0])
    assert not torch.equal(layer.train()(x, x, x)[0], layer.train()(x, x, x)[0])


@given(problems(dtypes=DTYPES))
def test_rows_sum_to_one_less_the_share_of_the_sink(p: Problem) -> None:
    matrix = AttentionMatrix(p.q, p.k, **p.kwargs)
    sums = matrix.dense().double().sum(-1)
    share = torch.zeros_like(sums)
    if p.sink is not None:
        exact = matrix.logsumexp().double()
        share = torch.exp(p.sink.double()[:, None] - exact)
    empty = matrix.maximum() == 0
    keys = p.shape[3]
    # Each weight is rounded once to its dtype; the sum in float64 adds nothing.
    floor = keys * torch.finfo(p.q.dtype).eps + 64 * 2.0**-24
    expected = torch.where(empty & (p.sink is None), torch.zeros_like(sums), 1 - share)
    assert float((sums - expected).abs().max()) <= floor
