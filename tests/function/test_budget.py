"""Clause 4: the error budget in closed forms, and the mistakes that must exceed it."""

import math

import pytest
import torch
from torch import Tensor

from headwise.errors import DTypeError, ShapeError
from headwise.function import stages
from headwise.function.budget import Budget
from headwise.function.rounding import sum_error_bound
from headwise.masks.mask import Mask
from tests.honest import (
    budgets_of_readings,
    gradients,
    honest,
    normal,
    ordinary,
    readings,
    strictest,
)
from tests.strategies import DTYPES, Problem

WIDES = (torch.float64, torch.float32)


# ---- closed forms ----------------------------------------------------------------------------


def test_the_allowance_is_twice_the_plain_error_and_the_floor() -> None:
    x = torch.tensor([3.0, 5.0])

    def ten_percent_off_in_float32(x: Tensor) -> Tensor:
        return x * (1.0 if x.dtype == torch.float64 else 1.1)

    budget = Budget.for_function(ten_percent_off_in_float32, x, floor=torch.tensor([1.0, 2.0]))
    # The largest plain error is 10 % of 5, give or take the last place.
    torch.testing.assert_close(budget.allowed, torch.tensor([2.0, 3.0]).double(), rtol=1e-5, atol=0)
    assert budget.exact.tolist() == [3.0, 5.0]
    assert budget.check(torch.tensor([5.0, 8.0])).within
    assert not budget.check(torch.tensor([5.1, 8.0])).within
    three = Budget.for_function(ten_percent_off_in_float32, x, floor=torch.zeros(2), factor=3.0)
    torch.testing.assert_close(three.allowed, torch.full((2,), 1.5).double(), rtol=1e-5, atol=0)


def test_a_key_alone_gives_its_value_back() -> None:
    # One key: the weight is 1 and the output is v, whatever the scores.
    q, k, v = normal(1, 1, 3, 4).float(), normal(1, 1, 1, 4).float(), normal(1, 1, 1, 2).float()
    budget = Budget.for_head_outputs(q, k, v)
    assert torch.equal(budget.exact, v.double().expand(1, 1, 3, 2))
    assert float((budget.allowed / budget.exact.abs()).max()) < 100 * 2**-24
    budget.assert_holds(v.expand(1, 1, 3, 2))


def test_a_long_sum_is_granted_four_times_its_square_root() -> None:
    assert [sum_error_bound(terms) for terms in (1, 16, 100, 4096)] == [1, 16, 40, 256]


def test_a_lucky_plain_error_of_zero_does_not_make_the_budget_zero() -> None:
    # Powers of two: plain torch makes no error at all, and a bare "twice" would allow none.
    q, k = torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 4, 4)
    v = torch.tensor([1.0, 2.0, 4.0, 8.0]).reshape(1, 1, 4, 1)
    assert stages.head_outputs(q, k, v).flatten().tolist() == [3.75, 3.75]
    budget = Budget.for_head_outputs(q, k, v)
    budget.assert_holds(torch.full((1, 1, 2, 1), 3.75 * (1 + 2**-23)))
    assert not budget.check(torch.full((1, 1, 2, 1), 3.75 * (1 + 1e-4))).within


def test_the_family_draws_the_luck_again() -> None:
    # The sum of four ones is exact; the sums of their neighbours are not.
    budget = Budget.for_function(lambda x: x.sum(0, keepdim=True), torch.ones(4))
    assert 0 < float(budget.allowed) < 1e-5
    again = Budget.for_function(lambda x: x.sum(0, keepdim=True), torch.ones(4))
    assert torch.equal(budget.allowed, again.allowed)


def test_without_a_floor_the_inputs_may_move_by_a_last_place() -> None:
    # 1000 * x in float64: the plain error is zero, one unit in the last place of x is 1000 * eps.
    eps = 2.0**-52
    budget = Budget.for_function(lambda x: 1000 * x, torch.ones(50, dtype=torch.float64))
    assert 500 * eps < float(budget.allowed.max()) <= 1100 * eps


def test_where_plain_torch_overflows_the_floor_is_left() -> None:
    q, k, v = ordinary(torch.float16, loud=8000.0)
    assert q.isfinite().all()
    assert not stages.head_outputs(q, k, v).isfinite().all()
    budget = Budget.for_head_outputs(q, k, v)
    assert budget.allowed.isfinite().all()
    assert Budget.for_head_outputs(q, k, v, factor=0.0).check(honest(q, k, v)).within


def test_an_infinite_result_is_met_exactly() -> None:
    q, k, _ = ordinary(torch.float32)
    budget = Budget.for_logsumexp(q, k, mask=Mask.lengths(keys=torch.tensor([29, 0, 3])))
    right = budget.exact.float()
    assert right[1].eq(-torch.inf).all()
    budget.assert_holds(right)
    assert budget.check(right.clamp(min=-1e30)).outside == 6 * 24
    assert budget.check(right.nan_to_num(neginf=torch.nan)).outside == 6 * 24


def test_nan_is_never_within() -> None:
    q, k, v = ordinary(torch.float32)
    out = honest(q, k, v)
    out[1, 2, 3, 4] = torch.nan
    verdict = Budget.for_head_outputs(q, k, v).check(out)
    assert verdict.outside == 1
    assert verdict.ratio == math.inf


def test_nothing_to_compare_is_within() -> None:
    q, k, v = (x[:0] for x in ordinary(torch.float32))
    verdict = Budget.for_head_outputs(q, k, v).check(torch.zeros(0, 6, 24, 7))
    assert verdict.within
    assert verdict.elements == 0


def test_the_verdict_says_where_and_how_much() -> None:
    q, k, v = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 2, 4), torch.ones(1, 2, 2, 1)
    out = torch.ones(1, 2, 3, 1)
    out[0, 1, 2, 0] = 1.25
    budget = Budget.for_head_outputs(q, k, v)
    verdict = budget.check(out)
    assert (verdict.within, bool(verdict), verdict.error) == (False, False, 0.25)
    first, second, third = str(verdict).splitlines()
    assert first == "head outputs (float32): 5 of 6 elements are within the error budget"
    assert second.endswith("at batch 0, heads 1, queries 2, value_dim 0")
    assert third.endswith("got 1.25, the float64 reference is 1")
    assert f"{verdict.allowed:.3g}" in third
    with pytest.raises(AssertionError, match="5 of 6 elements"):
        budget.assert_holds(out)
    assert repr(budget).startswith("Budget(head outputs, float32, (1, 2, 3, 1); at most ")


def test_a_result_of_another_shape_is_refused() -> None:
    q, k, v = ordinary(torch.float32)
    with pytest.raises(ShapeError, match=r"\(3, 24, 6, 7\)") as caught:
        Budget.for_head_outputs(q, k, v).check(torch.zeros(3, 24, 6, 7))
    assert "(3, 6, 24, 7), the shape of the reference" in caught.value.needed


def test_a_dtype_without_arithmetic_has_no_budget() -> None:
    q = torch.zeros(1, 1, 2, 4, dtype=torch.float8_e4m3fn)
    with pytest.raises(DTypeError, match="float8_e4m3fn"):
        Budget.for_head_outputs(q, q, q)


# ---- mistakes are not ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_one_percent_off_exceeds_it(dtype: torch.dtype) -> None:
    q, k, v = ordinary(dtype)
    budget = Budget.for_head_outputs(q, k, v, factor=strictest(dtype))
    assert budget.check(honest(q, k, v)).within
    assert not budget.check(honest(q, k, v, scale=1.01 / math.sqrt(10))).within
    assert not budget.check(honest(q, k, v, scale=0.99 / math.sqrt(10))).within


@pytest.mark.parametrize("dtype", WIDES)
def test_a_scale_one_part_in_ten_thousand_off_exceeds_it(dtype: torch.dtype) -> None:
    q, k, v = ordinary(dtype)
    off = honest(q, k, v, scale=1.0001 / math.sqrt(10))
    assert Budget.for_head_outputs(q, k, v).check(off).ratio > 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", [0, 3, 11])
def test_a_window_off_by_one_exceeds_it(dtype: torch.dtype, left: int) -> None:
    q, k, v = ordinary(dtype)
    right = Mask.window(left, 0, align="bottom-right")
    wrong = Mask.window(left + 1, 0, align="bottom-right")
    budget = Budget.for_head_outputs(q, k, v, mask=right)
    budget.assert_holds(honest(q, k, v, mask=right))
    verdict = budget.check(honest(q, k, v, mask=wrong))
    assert verdict.ratio > 10
    assert verdict.outside > verdict.elements / 5


def running_float16_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A denominator that is summed up in float16, key by key."""
    s = stages.scores(q.float(), k.float()).half()
    e = torch.exp(s - s.amax(-1, keepdim=True))
    total = torch.zeros_like(e[..., 0])
    for column in e.unbind(-1):
        total = total + column
    return (e / total[..., None]) @ v


def float16_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Float32 throughout, but for scores that were kept in float16."""
    w = torch.softmax(stages.scores(q.float(), k.float()).half().float(), -1)
    return (w @ v.float()).half()


def test_a_float16_softmax_in_long_rows_exceeds_it() -> None:
    q, k = normal(1, 2, 5, 16).half(), normal(1, 2, 4099, 16, seed=1).half()
    v = normal(1, 2, 4099, 8, seed=2).half() + 1
    # The sum stops growing: too much even beside plain torch in float16.
    verdict = Budget.for_head_outputs(q, k, v).check(running_float16_softmax(q, k, v))
    assert verdict.ratio > 5
    # Rounded scores are what plain torch does, but not what a float32 kernel may do.
    q = q * 8
    assert Budget.for_head_outputs(q, k, v).check(float16_scores(q, k, v)).within
    assert not Budget.for_head_outputs(q, k, v, factor=0.0).check(float16_scores(q, k, v)).within
    assert Budget.for_head_outputs(q, k, v, factor=0.0).check(honest(q, k, v)).within


def test_an_unstable_entropy_exceeds_it() -> None:
    q, k, _ = ordinary(torch.float32, loud=100.0)
    s = stages.scores(q, k)
    assert 300 < float(s.abs().max()) < 2000
    w, logsumexp = torch.softmax(s, -1), torch.logsumexp(s, -1)
    budget = Budget.for_entropy(q, k)
    budget.assert_holds(readings(Problem(q, k, q))["entropy"])
    offset = 1000.0  # a common offset of the scores changes nothing but the rounding
    unstable = (logsumexp + offset) - (w * (s + offset)).sum(-1)
    assert not budget.check(unstable).within


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_gradients_exceed_it(dtype: torch.dtype) -> None:
    q, k, v = ordinary(dtype)
    p, g = Problem(q, k, v), normal(3, 6, 24, 7, seed=5, dtype=dtype)
    budgets = Budget.for_gradients(q, k, v, grad_output=g)
    got = gradients(p, lambda p: honest(p.q, p.k, p.v), g)
    for name, budget in budgets.items():
        budget.assert_holds(got[name])
        one_head_missing = got[name].clone()
        one_head_missing[0, 0] = 0
        assert not budget.check(one_head_missing).within
        assert not budget.check(got[name] * 1.2).within
    # Without the mean of dP, which the softmax takes off.
    w = stages.weights(q.double(), k.double())
    dp = g.double() @ stages.repeat_kv_heads(v.double(), heads=6).mT
    wrong = (w * dp) @ stages.repeat_kv_heads(k.double(), heads=6) / math.sqrt(10)
    assert not budgets["q"].check(wrong.to(dtype)).within


@pytest.mark.parametrize("dtype", DTYPES)
def test_readings_of_a_matrix_off_by_one_key_exceed_it(dtype: torch.dtype) -> None:
    q, k, _ = ordinary(dtype)
    right = Mask.lengths(keys=torch.tensor([29, 20, 11]))
    wrong = Mask.lengths(keys=torch.tensor([28, 20, 11]))
    got = readings(Problem(q, k, k, mask=wrong))
    for name, budget in budgets_of_readings(Problem(q, k, k, mask=right), factor=2.0).items():
        assert not budget.check(got[name]).within, name


def test_a_matrix_without_keys_has_a_budget() -> None:
    q, k, v = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 0, 4), torch.zeros(2, 3, 0, 7)
    Budget.for_head_outputs(q, k, v).assert_holds(torch.zeros(2, 3, 5, 7))
    Budget.for_entropy(q, k).assert_holds(torch.zeros(2, 3, 5))
    Budget.for_weights(q, k).assert_holds(torch.zeros(2, 3, 5, 0))
