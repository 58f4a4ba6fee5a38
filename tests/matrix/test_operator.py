"""AttentionMatrix: closed forms, every reading within the budget, and what is refused."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.autograd import forward_ad

from headwise.function import stages
from headwise.function.budget import Budget
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.operator import AttentionMatrix
from tests.strategies import DTYPES, Problem, problem, problems

SIZES = {"batch": 3, "heads": 6, "kv_heads": 2, "queries": 24, "keys": 29, "head_dim": 10}


def draw(dtype: torch.dtype = torch.float64, value_dim: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values at sizes in which no two axes coincide."""
    s = SIZES
    q = torch.randn(s["batch"], s["heads"], s["queries"], s["head_dim"], dtype=dtype)
    k = torch.randn(s["batch"], s["kv_heads"], s["keys"], s["head_dim"], dtype=dtype)
    return q, k, torch.randn(s["batch"], s["kv_heads"], s["keys"], value_dim, dtype=dtype)


# ---- closed forms ----------------------------------------------------------------------------


def test_two_keys_are_a_logistic_function_of_the_score_difference() -> None:
    q = torch.tensor([[[[2.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[3.0], [1.0]]]], dtype=torch.float64)
    matrix = AttentionMatrix(q, k, scale=0.5)  # scores 3 and 1
    first = 1 / (1 + math.exp(-2))
    entropy = -first * math.log(first) - (1 - first) * math.log(1 - first)
    assert matrix.rows(torch.tensor([0])).flatten().tolist() == pytest.approx([first, 1 - first])
    assert matrix.maximum().item() == pytest.approx(first)
    assert matrix.entropy().item() == pytest.approx(entropy)
    assert matrix.logsumexp().item() == pytest.approx(math.log(math.exp(3) + math.exp(1)))
    assert matrix.received().flatten().tolist() == pytest.approx([first, 1 - first])


def test_equal_scores_attend_uniformly() -> None:
    _, k, v = draw()
    matrix = AttentionMatrix(torch.zeros(3, 6, 24, 10, dtype=torch.float64), k)
    mean = stages.repeat_kv_heads(v, heads=6).mean(2, keepdim=True).expand(-1, -1, 24, -1)
    torch.testing.assert_close(matrix @ v, mean)
    torch.testing.assert_close(matrix.entropy(), torch.full_like(matrix.entropy(), math.log(29)))
    torch.testing.assert_close(matrix.received(), torch.full((3, 6, 29), 24 / 29).double())


def test_the_entropy_of_large_scores_does_not_cancel() -> None:
    q, k = torch.full((1, 1, 1, 4), 30.0), torch.full((1, 1, 29, 4), 30.0)
    entropy = AttentionMatrix(q, k, scale=1.0).entropy()  # scores of 3600, whose steps are 2e-4
    assert entropy.item() == pytest.approx(math.log(29), rel=1e-6)


def test_a_sink_as_strong_as_every_key_takes_one_share_more() -> None:
    k = draw()[1]
    q = torch.zeros(3, 6, 24, 10, dtype=torch.float64)
    matrix = AttentionMatrix(q, k, sink=torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(matrix.dense(), torch.full((3, 6, 24, 29), 1 / 30).double())
    uniform = torch.full((3, 6, 24), math.log(30)).double()
    torch.testing.assert_close(matrix.entropy(), uniform)
    torch.testing.assert_close(matrix.logsumexp(), uniform)


def test_the_softcap_comes_before_the_bias_and_the_bias_before_the_mask() -> None:
    q = torch.full((1, 1, 1, 1), 100.0, dtype=torch.float64)
    k = torch.tensor([1.0, -1.0, 5.0], dtype=torch.float64).view(1, 1, 3, 1)
    bias = torch.tensor([[0.0, 1.0, 9.0]], dtype=torch.float64)
    matrix = AttentionMatrix(
        q,
        k,
        scale=1.0,
        softcap=2.0,
        score_bias=ScoreBias.dense(bias, axes="queries keys"),
        mask=Mask.may_attend(torch.tensor([True, True, False]), axes="keys"),
    )
    # Scores 100, -100, 500 are capped to 2, -2, 2; then +0, +1; then the third is hidden.
    first = 1 / (1 + math.exp(-1 - 2))
    assert matrix.dense().flatten().tolist() == pytest.approx([first, 1 - first, 0.0], abs=1e-12)


def test_a_one_hot_head_is_read_exactly() -> None:
    # Position i looks only at i - 1: keys are shifted unit vectors.
    eye = torch.eye(12, dtype=torch.float64)[None, None] * 60
    matrix = AttentionMatrix(eye, eye.roll(-1, dims=2), scale=1.0)
    torch.testing.assert_close(matrix.diagonal(-1), torch.ones(1, 1, 11).double())
    assert float(matrix.entropy().max()) < 1e-12
    torch.testing.assert_close(matrix.topk(1)[1].flatten(), (torch.arange(12) - 1) % 12)


def test_pool_is_the_mean_over_queries_of_the_sum_over_keys() -> None:
    q, k, _ = draw()
    matrix = AttentionMatrix(q, k, mask=Mask.causal(align="top-left"))
    dense = matrix.dense()
    rows, columns = torch.arange(24) * 5 // 24, torch.arange(29) * 4 // 29
    for i in range(5):
        for j in range(4):
            block = dense[:, :, rows == i][..., columns == j].sum(-1).mean(-1)
            torch.testing.assert_close(matrix.pool(5, 4)[:, :, i, j], block)
    torch.testing.assert_close(matrix.pool(5, 4).sum(-1), torch.ones(3, 6, 5).double())


# ---- every reading, within the budget --------------------------------------------------------


def matrix_of(p: Problem) -> AttentionMatrix:
    return AttentionMatrix(p.q, p.k, **p.kwargs)


@given(problems(dtypes=DTYPES))
def test_products_are_within_the_budget(p: Problem) -> None:
    matrix = matrix_of(p)
    y = torch.randn(*p.q.shape[:3], 3).to(p.q.dtype)
    Budget.for_head_outputs(p.q, p.k, p.v, **p.kwargs).assert_holds(matrix @ p.v)
    Budget.for_transposed(p.q, p.k, y, **p.kwargs).assert_holds(matrix.mT @ y)


@given(problems(dtypes=DTYPES))
def test_row_statistics_are_within_the_budget(p: Problem) -> None:
    matrix = matrix_of(p)
    found = matrix.statistics()
    Budget.for_logsumexp(p.q, p.k, **p.kwargs).assert_holds(found.logsumexp)
    Budget.for_entropy(p.q, p.k, **p.kwargs).assert_holds(found.entropy)
    largest = Budget.for_weights(p.q, p.k, read=lambda w: w.amax(-1), **p.kwargs)
    largest.assert_holds(found.maximum)
    received = Budget.for_weights(p.q, p.k, read=lambda w: w.sum(-2), **p.kwargs)
    received.assert_holds(found.received)
    assert float(found.entropy.min()) >= 0


@pytest.mark.slow
@given(problems(dtypes=DTYPES))
def test_single_readings_are_those_of_the_one_pass(p: Problem) -> None:
    matrix = matrix_of(p)
    together = matrix.statistics()
    assert torch.equal(matrix.entropy(), together.entropy)
    assert torch.equal(matrix.received(), together.received)
    Budget.for_logsumexp(p.q, p.k, **p.kwargs).assert_holds(matrix.logsumexp())
    largest = Budget.for_weights(p.q, p.k, read=lambda w: w.amax(-1), **p.kwargs)
    largest.assert_holds(matrix.maximum())


@given(problems(dtypes=DTYPES))
def test_parts_are_within_the_budget(p: Problem) -> None:
    matrix = matrix_of(p)
    _, _, queries, keys = p.shape
    chosen, count = torch.tensor([queries - 1, 0]), min(3, keys)
    offsets = (0, -1, 2, keys - 1, 1 - queries, keys)

    def picked(w: Tensor) -> Tensor:
        """Readings that are some of the weights: one budget serves them all."""
        diagonals = [w.diagonal(offset, -2, -1) for offset in offsets]
        parts = [w, w[:, :, chosen], *diagonals, w.topk(count, dim=-1).values]
        return torch.cat([x.flatten() for x in parts])

    values, indices = matrix.topk(count)
    diagonals = [matrix.diagonal(offset) for offset in offsets]
    found = [matrix.dense(), matrix.rows(chosen), *diagonals, values]
    budget = Budget.for_weights(p.q, p.k, read=picked, **p.kwargs)
    budget.assert_holds(torch.cat([x.flatten() for x in found]))
    assert torch.equal(found[0].gather(-1, indices), values)
    average = Budget.for_weights(p.q, p.k, read=lambda w: w.mean(1), **p.kwargs)
    average.assert_holds(matrix.head_average())


@pytest.mark.parametrize("value_heads", [1, 2, 6])
def test_values_may_be_shared_by_all_heads_by_groups_or_by_none(value_heads: int) -> None:
    q, k, _ = draw()
    v = torch.randn(3, value_heads, 29, 7, dtype=torch.float64)
    shared = v.repeat_interleave(6 // value_heads, dim=1)
    expected = stages.weights(q, k) @ shared
    torch.testing.assert_close(AttentionMatrix(q, k) @ v, expected)


# ---- gradients -------------------------------------------------------------------------------


@given(problems(dtypes=(torch.float64, torch.float32)))
def test_gradients_of_the_head_outputs_are_within_the_budget(p: Problem) -> None:
    leaves = [x.clone().requires_grad_() for x in (p.q, p.k, p.v)]
    options: dict[str, Any] = dict(p.kwargs)
    names = ["q", "k", "v"]
    if p.sink is not None:
        options["sink"] = p.sink.clone().requires_grad_()
        leaves.append(options["sink"])
        names.append("sink")
    out = AttentionMatrix(leaves[0], leaves[1], **options) @ leaves[2]
    upstream = torch.randn_like(out)
    budgets = Budget.for_gradients(p.q, p.k, p.v, grad_output=upstream, **p.kwargs)
    for name, gradient in zip(names, torch.autograd.grad(out, leaves, upstream), strict=True):
        budgets[name].assert_holds(gradient)


READINGS: dict[str, Callable[[AttentionMatrix], Tensor]] = {
    "logsumexp": AttentionMatrix.logsumexp,
    "entropy": AttentionMatrix.entropy,
    "maximum": AttentionMatrix.maximum,
    "received": AttentionMatrix.received,
    "head_average": AttentionMatrix.head_average,
    "diagonal": lambda a: a.diagonal(1),
    "rows": lambda a: a.rows(torch.tensor([2, 0])),
    "topk": lambda a: a.topk(2)[0],
    "pool": lambda a: a.pool(2, 3),
    "transposed": lambda a: a.mT @ a.q,
}


@pytest.mark.parametrize("reading", READINGS)
def test_every_reading_passes_gradcheck(reading: str) -> None:
    q, k, sink, table = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 2, 4, 3), (2, 1, 5, 3), (2,), (2, 5))
    )
    allowed = torch.rand(2, 2, 4, 5) > 0.3
    allowed[..., 2] = True  # a row without keys is flat at 0: tested elsewhere
    mask = Mask.may_attend(allowed, axes="batch heads queries keys")

    def read(q: Tensor, k: Tensor, sink: Tensor, table: Tensor) -> Tensor:
        bias = ScoreBias.relative(table, align="bottom-right")
        matrix = AttentionMatrix(q, k, mask=mask, score_bias=bias, softcap=1.7, sink=sink)
        return READINGS[reading](matrix)

    # By random projections of the Jacobian: one pair of calls for each input, not for each entry.
    assert torch.autograd.gradcheck(read, (q, k, sink, table), fast_mode=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own decompositions
def test_forward_mode_gradients_are_not_lost() -> None:
    q, k, v = draw()
    tangent = torch.randn_like(q)
    with forward_ad.dual_level():
        dual = AttentionMatrix(forward_ad.make_dual(q, tangent), k, softcap=5.0) @ v
        found = forward_ad.unpack_dual(dual).tangent
    _, expected = torch.func.jvp(
        lambda x: stages.head_outputs(x, k, v, softcap=5.0), (q,), (tangent,)
    )
    torch.testing.assert_close(found, expected)


# ---- dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_pooled_row_sums_to_one_over_many_queries(dtype: torch.dtype) -> None:
    q = torch.zeros(1, 1, 70_000, 1, dtype=dtype)
    assert AttentionMatrix(q, q[:, :, :5]).pool(1, 1).item() == 1.0


@pytest.mark.parametrize("reading", READINGS)
def test_tiles_and_rows_do_not_round_to_the_dtype_of_autocast(reading: str) -> None:
    q, k, _ = (x.float() for x in draw())
    matrix = AttentionMatrix(q, k, softcap=5.0)
    plain = READINGS[reading](matrix)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(READINGS[reading](matrix), plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_softcap_at_either_bound_is_the_limit_of_its_formula(dtype: torch.dtype) -> None:
    q, k, _ = (x.to(dtype) for x in draw())
    bounds = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    # A score over the bound is subnormal: rounded by at most half the least step, times the bound.
    rounding = bounds.max * bounds.tiny * bounds.eps / 2
    budget = Budget.for_logsumexp(q, k)
    budget = replace(budget, allowed=budget.allowed + rounding)
    budget.assert_holds(AttentionMatrix(q, k, softcap=bounds.max).logsumexp())
    uniform = AttentionMatrix(q, k, softcap=bounds.tiny)
    assert torch.equal(uniform.dense(), AttentionMatrix(q * 0, k).dense())


def test_a_scale_below_every_number_of_the_dtype_attends_uniformly() -> None:
    q, k, v = draw(torch.float32)
    mask = Mask.causal(align="top-left")
    for scale in (1e-46, -1e-46):
        found = AttentionMatrix(q, k, scale=scale, mask=mask) @ v
        Budget.for_head_outputs(q, k, v, scale=scale, mask=mask).assert_holds(found)
        assert AttentionMatrix(q, k, scale=scale, mask=mask).explain(v).lines[0].kernel == "tiled"


# ---- what it says ----------------------------------------------------------------------------


def test_repr_is_documentation() -> None:
    q = torch.zeros(2, 12, 1, 64).expand(2, 12, 8192, 64)
    matrix = AttentionMatrix(q, q[:, :4], mask=Mask.causal(), softcap=50.0, sink=torch.zeros(12))
    assert repr(matrix) == (
        "AttentionMatrix(batch=2, heads=12, queries=8192, keys=8192, float32, kv_heads=4, causal, "
        "softcap 50, sink; dense would be 6.4 GB)"
    )
    assert repr(matrix.mT).endswith(".mT")
    assert matrix.mT.mT is matrix
    assert matrix.mT.shape == (2, 12, 8192, 8192)


def test_explain_names_the_kernel_and_the_reason() -> None:
    q, k, v = draw(torch.float32)
    plain = str(AttentionMatrix(q, k).explain(v))
    assert "A @ v                  sdpa" in plain
    capped = str(AttentionMatrix(q, k, softcap=5.0).explain(v))
    assert "A @ v                  tiled" in capped
    assert "softcap: the fused kernel has none" in capped


# ---- empty axes ------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_an_empty_axis_gives_the_defined_result(empty: str) -> None:
    cut = {"batch": slice(0, 0) if empty == "batch" else slice(None)}
    q, k, v = (x[cut["batch"]] for x in draw())
    q = q[:, :, :0] if empty == "queries" else q
    k, v = (k[:, :, :0], v[:, :, :0]) if empty == "keys" else (k, v)
    matrix = AttentionMatrix(q, k, sink=torch.ones(6, dtype=torch.float64))
    assert (matrix @ v).shape == (*q.shape[:3], 7)
    assert not (matrix @ v).any()
    found = matrix.statistics()
    assert not found.entropy.any() or empty == "batch"
    assert found.received.shape == (*q.shape[:2], k.shape[2])
    if empty == "keys":
        assert bool((found.logsumexp == 1.0).all())  # the sink alone
    assert matrix.dense().shape == matrix.shape


def test_problems_repeat_from_their_seed() -> None:
    assert torch.equal(problem(7).q, problem(7).q)
