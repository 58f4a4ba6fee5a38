"""Clause 4: honest arithmetic stays within the budget; mostly within its floor alone (factor 0)."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.function import stages
from headwise.function.budget import Budget
from headwise.masks.score_bias import ScoreBias
from tests.honest import (
    accumulation,
    budgets_of_readings,
    for_the_fused_kernel,
    fused,
    gradients,
    honest,
    normal,
    ordinary,
    readings,
    strictest,
)
from tests.strategies import DTYPES, Problem, problem


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", range(2))
def test_the_fused_kernel_is_within(dtype: torch.dtype, chunk: int) -> None:
    for seed in range(50 * chunk, 50 * chunk + 50):
        drawn = problem(seed, dtype=dtype, softcap=None, sink=None, value_dim="head_dim")
        p, bias = for_the_fused_kernel(drawn)
        # The floor alone: the contract's allowance is wider.
        Budget.for_head_outputs(p.q, p.k, p.v, factor=0.0, **p.kwargs).assert_holds(fused(p, bias))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradients_of_the_fused_kernel_are_within(dtype: torch.dtype) -> None:
    for seed in range(20):
        drawn = problem(seed, dtype=dtype, softcap=None, sink=None, value_dim="head_dim")
        p, bias = for_the_fused_kernel(drawn)
        g = normal(*p.q.shape[:3], p.v.shape[3], seed=seed, dtype=dtype)
        got = gradients(p, lambda p, bias=bias: fused(p, bias), g)
        budgets = Budget.for_gradients(p.q, p.k, p.v, grad_output=g, factor=0.0, **p.kwargs)
        for name, budget in budgets.items():
            budget.assert_holds(got[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loud", [1.0, 6.0])
def test_long_rows_are_within(dtype: torch.dtype, loud: float) -> None:
    q = normal(1, 2, 67, 64, dtype=dtype) * loud
    k, v = normal(1, 2, 4099, 64, seed=1, dtype=dtype), normal(1, 2, 4099, 64, seed=2, dtype=dtype)
    p = Problem(q, k, v, score_bias=ScoreBias.dense(torch.zeros(1, dtype=dtype), axes="heads"))
    budget = Budget.for_head_outputs(q, k, v, factor=0.0)
    budget.assert_holds(fused(p, torch.zeros(67, 4099, dtype=dtype)))
    budget.assert_holds(honest(q, k, v))


@pytest.mark.parametrize("keys", [12, 300, 1024, 4096])
@pytest.mark.parametrize("share", [0.3, 0.99, 1.01, 2.5])
def test_a_sum_that_stands_still_is_within(keys: int, share: float) -> None:
    # One weight near 1, and all others about as large as its rounding error: the denominator loses
    # every addition, in the same direction. Why a sum is granted 4 * sqrt(n), and n when short.
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, keys, 16), torch.zeros(1, 1, keys, 16)
    q[..., 0], v[..., 0, :] = 4.0, 1.0
    k[..., 1:, 0] = math.log(share * 2**-24)
    p, bias = Problem(q, k, v), torch.zeros(1, 1, 1, keys)
    Budget.for_head_outputs(q, k, v, factor=0.0).assert_holds(fused(p, bias))
    # torch's softmax adds n / 8 terms one after the other in each lane of AVX2 (n / 16 of AVX-512):
    # more than 4 * sqrt(n) from 1,024 keys, in a row as contrived as this one.
    if keys <= 1024:
        weights = torch.softmax(stages.scores(q, k), -1)
        Budget.for_weights(q, k, factor=0.0).assert_holds(weights)
    exp = (stages.scores(q, k)).exp()
    Budget.for_logsumexp(q, k, factor=0.0).assert_holds(exp.sum(-1).log())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_readings_are_within(dtype: torch.dtype) -> None:
    for seed in range(25):
        p = problem(seed, dtype=dtype)
        got = readings(p)
        for name, budget in budgets_of_readings(p, factor=0.0).items():
            budget.assert_holds(got[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_with_softcap_sink_and_bias_are_within(dtype: torch.dtype) -> None:
    def in_float32(p: Problem) -> Tensor:
        return honest(p.q, p.k, p.v, **p.kwargs)

    for seed in range(20):
        p = problem(seed, dtype=dtype)
        g = normal(*p.q.shape[:3], p.v.shape[3], seed=seed, dtype=dtype)
        got = gradients(p, in_float32, g)
        budgets = Budget.for_gradients(p.q, p.k, p.v, grad_output=g, factor=0.0, **p.kwargs)
        assert budgets.keys() == got.keys()
        for name, budget in budgets.items():
            budget.assert_holds(got[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_a_score_bias_is_within(dtype: torch.dtype) -> None:
    q, k, v = ordinary(dtype)
    g = normal(3, 6, 24, 7, seed=5, dtype=dtype)
    bias = normal(6, 24, 29, seed=6).to(accumulation(dtype)).requires_grad_()
    score_bias = ScoreBias.dense(bias, axes="heads queries keys")
    honest(q, k, v, score_bias=score_bias, softcap=3.0).backward(g)
    options: dict[str, Any] = {"grad_output": g, "score_bias": score_bias, "softcap": 3.0}
    budgets = Budget.for_gradients(
        q, k, v, bias_gradient=lambda x: x.sum(0), factor=strictest(dtype), **options
    )
    assert bias.grad is not None
    budgets["score_bias"].assert_holds(bias.grad)
    assert not budgets["score_bias"].check(bias.grad * 1.01).within


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_products_are_within(dtype: torch.dtype) -> None:
    q, k, _ = ordinary(dtype)
    y = normal(3, 6, 24, 5, seed=9, dtype=dtype)
    wide = accumulation(dtype)
    got = (stages.weights(q.to(wide), k.to(wide)).mT @ y.to(wide)).to(dtype)
    budget = Budget.for_transposed(q, k, y, factor=strictest(dtype))
    budget.assert_holds(got)
    assert not budget.check(got * 1.02).within
