"""Head statistics: closed forms, then against the dense weights, with padding."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headwise import functional
from headwise.budget import Budget
from headwise.errors import ShapeError
from headwise.heads import statistics
from headwise.masks import Mask
from headwise.matrix import AttentionMatrix
from tests.memory import LargestTensor

BATCH, HEADS, KV_HEADS, LENGTH, HEAD_DIM = 3, 6, 2, 24, 10
REAL = torch.tensor([24, 17, 5])
QUERY_WEIGHTS = (torch.arange(LENGTH) < REAL[:, None]).double()
SEPARATORS = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
SEPARATORS[0, [4, 11, 23]] = SEPARATORS[1, 16] = SEPARATORS[2, [1, 4]] = True

Statistic = Callable[..., Tensor]


def mass_on_separators(matrix: AttentionMatrix, *, query_weights: Tensor | None = None) -> Tensor:
    return statistics.mass_on(matrix, SEPARATORS, query_weights=query_weights)


ALL: dict[str, Statistic] = {
    "entropy": statistics.entropy,
    "previous_token": statistics.previous_token,
    "first_token": statistics.first_token,
    "mass_on": mass_on_separators,
}


def draw(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    q = 3 * torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64)
    k = torch.randn(BATCH, KV_HEADS, LENGTH, HEAD_DIM, dtype=torch.float64)
    return q.to(dtype), k.to(dtype)


def looking_back(strength: float) -> AttentionMatrix:
    """Head h looks h tokens back: score ``strength`` there, 0 elsewhere. Nothing is so far back
    for the first h queries, which look evenly.
    """
    positions = torch.eye(LENGTH, dtype=torch.float64)
    q = torch.stack([positions.roll(-h, dims=1) for h in range(HEADS)])
    for h in range(HEADS):
        q[h, :h] = 0
    return AttentionMatrix(strength * q[None], positions.expand(1, HEADS, -1, -1), scale=1.0)


# ---- closed forms ----------------------------------------------------------------------------


def test_even_attention() -> None:
    k = draw()[1]
    matrix = AttentionMatrix(torch.zeros(BATCH, HEADS, 29, HEAD_DIM, dtype=torch.float64), k)
    ones = torch.ones(BATCH, HEADS, dtype=torch.float64)
    torch.testing.assert_close(statistics.entropy(matrix), math.log(24) * ones)
    torch.testing.assert_close(statistics.first_token(matrix), ones / 24)
    expected = SEPARATORS.sum(-1, keepdim=True) / 24 * ones
    torch.testing.assert_close(statistics.mass_on(matrix, SEPARATORS), expected)


def test_a_head_built_to_look_one_token_back() -> None:
    strength = 4.0
    there = math.exp(strength) / (math.exp(strength) + LENGTH - 1)
    elsewhere = 1 / (math.exp(strength) + LENGTH - 1)
    found = statistics.previous_token(looking_back(strength))
    assert found.shape == (1, HEADS)
    # Of the 23 queries that have a key before them, head h leaves the first h - 1 undecided.
    for head in range(HEADS):
        even = max(head - 1, 0)
        decided = there if head == 1 else elsewhere
        expected = (even / LENGTH + (LENGTH - 1 - even) * decided) / (LENGTH - 1)
        assert found[0, head].item() == pytest.approx(expected)


def test_an_exact_previous_token_head_gives_everything_one_token_back() -> None:
    found = statistics.previous_token(looking_back(1000.0))[0]
    assert found[1].item() == 1.0
    assert found[2:].max() < 0.01
    assert found[0].item() == 0.0  # it looks at itself


def test_a_head_that_looks_at_itself_has_no_entropy() -> None:
    assert statistics.entropy(looking_back(1000.0))[0, 0].item() == 0.0
    # The first query of head 1 looks evenly, the others at one key.
    expected = math.log(LENGTH) / LENGTH
    assert statistics.entropy(looking_back(1000.0))[0, 1].item() == pytest.approx(expected)


def test_even_causal_attention() -> None:
    k = draw()[1]
    q = torch.zeros(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64)
    matrix = AttentionMatrix(q, k, mask=Mask.causal())
    rows = torch.arange(1, LENGTH + 1, dtype=torch.float64)
    expected = {
        "entropy": rows.log().mean(),
        "previous_token": (1 / rows[1:]).mean(),
        "first_token": (1 / rows).mean(),
    }
    for name, value in expected.items():
        torch.testing.assert_close(ALL[name](matrix), value.expand(BATCH, HEADS))


# ---- against the dense weights ---------------------------------------------------------------


def mean_of_real(values: Tensor, first: int = 0) -> Tensor:
    """Query by query: the mean over the real queries from ``first`` on."""
    rows = [values[b, :, first : int(REAL[b])].mean(-1) for b in range(BATCH)]
    return torch.stack(rows)


def read_dense(name: str, weights: Tensor) -> Tensor:
    if name == "previous_token":
        before = [weights[:, :, i, i - 1] for i in range(1, LENGTH)]
        return mean_of_real(torch.stack([torch.zeros_like(before[0]), *before], -1), first=1)
    if name == "first_token":
        return mean_of_real(weights[..., 0])
    return torch.stack([mean_of_real(weights[..., SEPARATORS[b]].sum(-1))[b] for b in range(BATCH)])


@pytest.mark.parametrize("mask", [Mask(), Mask.causal(), Mask.window(3, 2)], ids=str)
@pytest.mark.parametrize("name", ["previous_token", "first_token", "mass_on"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dense_weights_give_the_same(name: str, dtype: torch.dtype, mask: Mask) -> None:
    q, k = draw(dtype)
    mask = mask & Mask.lengths(keys=REAL)
    budget = Budget.for_weights(q, k, read=lambda w: read_dense(name, w), mask=mask)
    budget.assert_holds(ALL[name](AttentionMatrix(q, k, mask=mask), query_weights=QUERY_WEIGHTS))


@pytest.mark.parametrize("mask", [Mask(), Mask.causal(), Mask.window(3, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dense_weights_give_the_same_entropy(dtype: torch.dtype, mask: Mask) -> None:
    q, k = draw(dtype)
    mask = mask & Mask.lengths(keys=REAL)
    allowed = Budget.for_entropy(q, k, mask=mask).allowed
    weights = functional.weights(q.double(), k.double(), mask=mask)
    exact = mean_of_real(-torch.special.xlogy(weights, weights).sum(-1))
    found = statistics.entropy(AttentionMatrix(q, k, mask=mask), query_weights=QUERY_WEIGHTS)
    assert ((found - exact).abs() <= mean_of_real(allowed)).all()


@pytest.mark.parametrize("name", ALL)
def test_padded_queries_do_not_count(name: str) -> None:
    q, k = draw()
    mask = Mask.lengths(keys=REAL)
    before = ALL[name](AttentionMatrix(q, k, mask=mask), query_weights=QUERY_WEIGHTS)
    padded = QUERY_WEIGHTS[:, None, :, None] == 0
    after = ALL[name](
        AttentionMatrix(q.where(~padded, 50 * torch.randn_like(q)), k, mask=mask),
        query_weights=QUERY_WEIGHTS,
    )
    torch.testing.assert_close(after, before)
    everything = ALL[name](AttentionMatrix(q, k, mask=mask))
    assert not torch.allclose(everything[1:], before[1:])


@pytest.mark.parametrize("name", ALL)
def test_a_sequence_alone_has_the_statistics_it_has_in_a_batch(name: str) -> None:
    q, k = draw()
    mask = Mask.lengths(keys=REAL)
    together = ALL[name](AttentionMatrix(q, k, mask=mask), query_weights=QUERY_WEIGHTS)
    alone = AttentionMatrix(q[1:2, :, :17], k[1:2, :, :17])
    if name == "mass_on":
        found = statistics.mass_on(alone, SEPARATORS[1:2, :17])
    else:
        found = ALL[name](alone)
    torch.testing.assert_close(found, together[1:2])


# ---- edges -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_where_nothing_counts_the_statistic_is_zero(name: str) -> None:
    q, k = draw()
    weights = QUERY_WEIGHTS.clone()
    weights[1] = 0
    found = ALL[name](AttentionMatrix(q, k, mask=Mask.lengths(keys=REAL)), query_weights=weights)
    assert found[1].tolist() == [0.0] * HEADS
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_half_types_are_averaged_in_float32(name: str) -> None:
    q, k = draw(torch.bfloat16)
    assert ALL[name](AttentionMatrix(q, k)).dtype == torch.float32


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_is_finite(name: str) -> None:
    q, k = (x.requires_grad_() for x in draw())
    found = ALL[name](AttentionMatrix(q, k, mask=Mask.lengths(keys=REAL)))
    gradient = torch.autograd.grad(found.sum(), [q, k])
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in gradient)


@pytest.mark.parametrize("name", ["entropy", "previous_token", "first_token"])
def test_nothing_of_queries_by_keys_is_written(name: str) -> None:
    length = 2048
    q, k = torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8)
    matrix = AttentionMatrix(q, k)
    with LargestTensor() as seen:
        ALL[name](matrix)
    assert seen.bytes < length * length


def test_query_weights_of_another_size_are_refused() -> None:
    matrix = AttentionMatrix(*draw())
    with pytest.raises(ShapeError) as error:
        statistics._weights(matrix, torch.ones(3, 29))
    assert "query_weights (batch 3, queries 29)" in str(error.value)
    assert "(batch 3, queries 24)" in str(error.value)


def test_chosen_keys_of_another_size_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"chosen keys \(batch 3, keys 29\)") as error:
        statistics.mass_on(AttentionMatrix(*draw()), torch.ones(3, 29, dtype=torch.bool))
    assert "(batch 3, keys 24)" in str(error.value)


def test_previous_token_needs_queries_and_keys_in_step() -> None:
    q, k = draw()
    matrix = AttentionMatrix(torch.cat([q, q[:, :, :5]], dim=2), k)
    with pytest.raises(ShapeError, match="29 queries and 24 keys"):
        statistics.previous_token(matrix)
