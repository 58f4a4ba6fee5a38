"""The reference arithmetic: closed forms, then torch's own functions, then gradients."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headwise.function import stages
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from tests.strategies import DTYPES, Problem, problem, problems


def column(*numbers: float) -> Tensor:
    """(1, 1, n, 1): one batch, one head, n tokens, one number each."""
    return torch.tensor(numbers, dtype=torch.float64).reshape(1, 1, -1, 1)


def ordinary() -> tuple[Tensor, Tensor, Tensor]:
    """Sizes in which no two axes coincide."""
    q = torch.randn(3, 6, 24, 10, dtype=torch.float64)
    k = torch.randn(3, 2, 29, 10, dtype=torch.float64)
    return q, k, torch.randn(3, 2, 29, 7, dtype=torch.float64)


# ---- closed forms ----------------------------------------------------------------------------


@pytest.mark.parametrize("difference", [0.0, 0.5, 3.0, 800.0])
def test_two_keys_are_a_logistic_function_of_the_score_difference(difference: float) -> None:
    w = stages.weights(column(1.0), column(difference, 0.0), scale=1.0)
    first = 1 / (1 + math.exp(-difference))
    assert w.flatten().tolist() == pytest.approx([first, 1 - first], abs=1e-15)


def test_the_scale_is_one_over_the_root_of_head_dim() -> None:
    q, k = torch.ones(1, 1, 1, 16), torch.ones(1, 1, 1, 16)
    assert stages.scores(q, k).item() == 16 / 4
    assert stages.scores(q, k, scale=0.5).item() == 8
    assert stages.scores(q, k, scale=0.0).item() == 0


def test_queries_of_zero_average_the_values() -> None:
    q, k, v = ordinary()
    out = stages.head_outputs(torch.zeros_like(q), k, v)
    mean = v.mean(2, keepdim=True).repeat_interleave(3, 1).expand_as(out)
    torch.testing.assert_close(out, mean)


def test_a_row_belongs_to_a_query_and_a_column_to_a_key() -> None:
    # Query 0 points at key 1, queries 1 and 2 at key 0.
    q, k = column(1.0, -1.0, -1.0), column(-50.0, 50.0)
    w = stages.weights(q, k, scale=1.0)
    assert w.round().tolist() == [[[[0, 1], [1, 0], [1, 0]]]]


def test_the_sink_takes_its_share_and_gives_nothing() -> None:
    q = torch.zeros(1, 3, 1, 2, dtype=torch.float64)
    k, v = torch.zeros(1, 3, 4, 2, dtype=torch.float64), torch.ones(1, 3, 4, 1, dtype=torch.float64)
    sink = torch.tensor([0.0, math.log(4.0), -torch.inf], dtype=torch.float64)
    # Four keys of score 0 against a sink of e^0 = 1, of 4, and of nothing.
    out = stages.head_outputs(q, k, v, sink=sink)
    assert out.flatten().tolist() == pytest.approx([4 / 5, 4 / 8, 1])
    assert stages.weights(q, k, sink=sink)[0, 0].tolist() == [[pytest.approx(1 / 5)] * 4]


def test_a_sink_far_above_the_scores_overflows_nothing() -> None:
    w = stages.weights(column(1.0), column(1.0, 2.0), scale=1.0, sink=torch.tensor([1e4]).double())
    assert w.flatten().tolist() == [0, 0]


def test_the_order_is_scale_softcap_bias_mask() -> None:
    q, k = column(3.0), column(4.0, 5.0)
    bias = ScoreBias.dense(torch.tensor([7.0, 8.0], dtype=torch.float64), axes="keys")
    mask = Mask.may_attend(torch.tensor([True, False]), axes="keys")
    s = stages.scores(q, k, mask=mask, score_bias=bias, scale=0.5, softcap=2.0)
    assert s.flatten().tolist() == [pytest.approx(2 * math.tanh(3 * 4 * 0.5 / 2) + 7), -math.inf]


def test_minus_infinity_in_a_bias_masks_and_finfo_min_does_not() -> None:
    q, k = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 3, 2)
    lowest = torch.finfo(torch.float32).min

    def weights_under(*bias: float) -> list[float]:
        dense = ScoreBias.dense(torch.tensor(bias), axes="keys")
        return stages.weights(q, k, score_bias=dense).flatten().tolist()

    assert weights_under(0.0, -math.inf, -math.inf) == [1, 0, 0]
    assert weights_under(lowest, lowest, -math.inf) == [0.5, 0.5, 0]
    assert weights_under(-math.inf, -math.inf, -math.inf) == [0, 0, 0]


def test_query_head_h_reads_kv_head_h_over_the_group() -> None:
    # Six query heads, two kv heads: 0, 1, 2 read the first, 3, 4, 5 the second.
    q, k = torch.zeros(1, 6, 1, 2), torch.zeros(1, 2, 5, 2)
    v = torch.tensor([10.0, 20.0]).reshape(1, 2, 1, 1).expand(1, 2, 5, 1)
    assert stages.head_outputs(q, k, v).flatten().tolist() == [10, 10, 10, 20, 20, 20]
    k = torch.stack([torch.ones(5, 2), torch.ones(5, 2) * 2])[None]
    s = stages.scores(torch.ones(1, 6, 1, 2), k, scale=1.0)
    assert s[0, :, 0, 0].tolist() == [2, 2, 2, 4, 4, 4]


def test_causal_by_hand() -> None:
    # Equal scores: each query averages what it sees of 1, 2, 4.
    q, k = torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3, 1)
    v = torch.tensor([1.0, 2.0, 4.0]).reshape(1, 1, 3, 1)
    out = stages.head_outputs(q, k, v, mask=Mask.causal())
    assert out.flatten().tolist() == pytest.approx([1, 3 / 2, 7 / 3])


@pytest.mark.parametrize(
    ("align", "seen"),
    [("top-left", [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]), ("bottom-right", [[1] * 4 + [0], [1] * 5])],
)
def test_causal_alignment_by_hand(align: str, seen: list[list[int]]) -> None:
    q, k = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 5, 1)
    w = stages.weights(q, k, mask=Mask.causal(align=align))  # type: ignore[arg-type]
    assert (w[0, 0] > 0).int().tolist() == seen


def test_a_row_without_keys_is_zero_with_finite_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in ordinary())
    mask = Mask.lengths(keys=torch.tensor([29, 0, 3]))
    out = stages.head_outputs(q, k, v, mask=mask)
    assert out[1].eq(0).all()
    assert out[0].ne(0).any()
    out.square().sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert x.grad[1].eq(0).all()


def test_without_keys_queries_or_samples_the_result_is_defined() -> None:
    q, k, v = ordinary()
    assert stages.head_outputs(q, k[:, :, :0], v[:, :, :0]).eq(0).all()
    assert stages.weights(q, k[:, :, :0]).shape == (3, 6, 24, 0)
    assert stages.head_outputs(q[:, :, :0], k, v).shape == (3, 6, 0, 7)
    assert stages.head_outputs(q[:0], k[:0], v[:0]).shape == (0, 6, 24, 7)


def test_scores_in_the_thousands_overflow_nothing() -> None:
    q, k, v = ordinary()
    out = stages.head_outputs(q * 1e4, k * 1e4, v)
    assert out.isfinite().all()
    assert stages.weights(q * 1e4, k * 1e4).sum(-1).allclose(torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_has_the_dtype_of_the_queries(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in ordinary())
    bias = ScoreBias.dense(torch.zeros(29, dtype=torch.float64), axes="keys")
    out = stages.head_outputs(q, k, v, score_bias=bias, sink=torch.zeros(6))
    assert out.dtype == dtype


def test_no_input_is_changed() -> None:
    p = problem(5)
    before = [x.clone() for x in (p.q, p.k, p.v)]
    stages.head_outputs(p.q, p.k, p.v, **p.kwargs)
    assert all(torch.equal(x, y) for x, y in zip(before, (p.q, p.k, p.v), strict=True))


# ---- against torch ---------------------------------------------------------------------------


def scores_of(p: Problem) -> Tensor:
    options = {name: value for name, value in p.kwargs.items() if name != "sink"}
    return stages.scores(p.q, p.k, **options)


def by_torch(p: Problem) -> Tensor:
    """The same weights from torch's softmax over the keys and the sink."""
    s = torch.einsum("bhqd,bhkd->bhqk", p.q, stages.repeat_kv_heads(p.k, heads=p.q.shape[1]))
    s = s * (p.q.shape[3] ** -0.5 if p.scale is None else p.scale)
    if p.softcap is not None:
        s = p.softcap * torch.tanh(s / p.softcap)
    s = s + p.dense_bias()
    if p.sink is not None:
        s = torch.cat([s, p.sink[:, None, None].expand(*s.shape[:3], 1)], -1)
    return torch.softmax(s, -1).nan_to_num(0.0)[..., : p.k.shape[2]]


@given(problems())
def test_weights_are_those_of_torchs_softmax(p: Problem) -> None:
    torch.testing.assert_close(stages.weights(p.q, p.k, **p.kwargs), by_torch(p))


@given(problems(softcap=None, sink=None))
def test_head_outputs_are_those_of_torchs_own_attention(p: Problem) -> None:
    theirs = scaled_dot_product_attention(
        p.q, p.k, p.v, attn_mask=p.dense_bias(), scale=p.scale, enable_gqa=True
    )
    torch.testing.assert_close(stages.head_outputs(p.q, p.k, p.v, **p.kwargs), theirs)


@given(problems())
def test_a_row_sums_to_one_less_the_share_of_the_sink(p: Problem) -> None:
    total = stages.weights(p.q, p.k, **p.kwargs).sum(-1)
    s = scores_of(p)
    share = torch.zeros_like(total)
    if p.sink is not None:
        share = torch.sigmoid(p.sink[:, None] - torch.logsumexp(s, -1))
    seen = (s > -torch.inf).any(-1)
    torch.testing.assert_close(total, (1 - share).where(seen, 0.0))


@given(problems())
def test_scores_at_chosen_queries_are_rows_of_the_scores(p: Problem) -> None:
    batch, heads, queries, keys = p.shape
    rows = torch.arange(queries).flip(0)[::2]
    bound = {"batch": batch, "heads": heads, "queries": queries, "keys": keys}
    device = p.q.device
    some = stages.scores_at_rows(
        p.q[:, :, rows],
        p.k,
        rows,
        mask=(p.mask or Mask()).bind(**bound, device=device),
        score_bias=(p.score_bias or ScoreBias()).bind(**bound, device=device),
        scale=stages.default_scale(p.q) if p.scale is None else p.scale,
        softcap=p.softcap,
    )
    torch.testing.assert_close(some, scores_of(p)[:, :, rows])


# ---- gradients -------------------------------------------------------------------------------


def leaves_of(p: Problem) -> list[Tensor]:
    return [x for x in (p.q, p.k, p.v, p.sink) if x is not None]


def head_outputs_of(p: Problem, *leaves: Tensor) -> Tensor:
    q, k, v, *sink = leaves
    moved = replace(p, q=q, k=k, v=v, sink=sink[0] if sink else None)
    return stages.head_outputs(q, k, v, **moved.kwargs)


@pytest.mark.parametrize("seed", range(12))
def test_gradients(seed: int) -> None:
    p = problem(seed, longest=6)
    leaves = [x.requires_grad_() for x in leaves_of(p)]
    assert torch.autograd.gradcheck(lambda *x: head_outputs_of(p, *x), leaves, fast_mode=True)


@pytest.mark.parametrize(
    "seed", [0, 2, *(pytest.param(n, marks=pytest.mark.extra) for n in (1, 3))]
)
def test_gradients_of_gradients(seed: int) -> None:
    p = problem(seed, longest=4)
    leaves = [x.requires_grad_() for x in leaves_of(p)]
    assert torch.autograd.gradgradcheck(lambda *x: head_outputs_of(p, *x), leaves)


def test_gradients_of_score_biases() -> None:
    q, k, v = (x[:1, :2, :4] for x in ordinary())
    dense = torch.randn(2, 1, 4, dtype=torch.float64).requires_grad_()
    slopes = torch.rand(2, dtype=torch.float64).requires_grad_()
    table = torch.randn(2, 5, dtype=torch.float64).requires_grad_()

    def outputs(dense: Tensor, slopes: Tensor, table: Tensor) -> Tensor:
        bias = ScoreBias.dense(dense, axes="heads queries keys") + ScoreBias.alibi(slopes)
        bias = bias + ScoreBias.relative(table)
        return stages.head_outputs(q, k, v, score_bias=bias, softcap=3.0)

    assert torch.autograd.gradcheck(outputs, (dense, slopes, table))


def test_heads_are_runs_of_entries_and_stand_side_by_side_again() -> None:
    x = torch.arange(2 * 3 * 20).view(2, 3, 20).float()
    heads = stages.split_heads(x, heads=5)
    assert heads.shape == (2, 5, 3, 4)
    assert heads[1, 2, 0].tolist() == x[1, 0, 8:12].tolist()
    assert torch.equal(stages.merge_heads(heads), x)
