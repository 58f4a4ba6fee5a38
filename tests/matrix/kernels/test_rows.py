"""Largest weights of rows: their gradient, what may change before it, and which queries."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import ArgumentError, OptionError
from headwise.function.budget import Budget
from headwise.masks.mask import Mask
from headwise.masks.score_bias import ScoreBias
from headwise.matrix.kernels import tiles
from headwise.matrix.operator import AttentionMatrix

BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 3, 4, 2, 24, 29


def tensors() -> dict[str, Tensor]:
    """Everything that a matrix is made of, each a tensor that may change."""
    return {
        "q": torch.randn(BATCH, HEADS, QUERIES, 10, dtype=torch.float64),
        "k": torch.randn(BATCH, KV_HEADS, KEYS, 10, dtype=torch.float64),
        "sink": torch.randn(HEADS, dtype=torch.float64),
        "bias": torch.randn(HEADS, QUERIES, KEYS, dtype=torch.float64),
        "table": torch.randn(HEADS, 5, dtype=torch.float64),
        "allowed": torch.rand(QUERIES, KEYS) > 0.3,
        "key_lengths": torch.tensor([29, 7, 11]),
        "segments": torch.zeros(BATCH, KEYS, dtype=torch.long),
        "index": torch.tensor([20, 3, 9]),
    }


def largest(x: dict[str, Tensor]) -> Tensor:
    options: dict[str, Any] = {
        "mask": Mask.may_attend(x["allowed"], axes="queries keys")
        & Mask.lengths(keys=x["key_lengths"])
        & Mask.segments(torch.zeros(BATCH, QUERIES, dtype=torch.long), x["segments"]),
        "score_bias": ScoreBias.dense(x["bias"], axes="heads queries keys")
        + ScoreBias.relative(x["table"], align="bottom-right"),
        "softcap": 3.0,
    }
    return AttentionMatrix(x["q"], x["k"], sink=x["sink"], **options).topk(2, queries=x["index"])[0]


@pytest.mark.parametrize("name", tensors())
def test_a_tensor_that_changed_in_place_raises_the_error_of_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2 * BATCH * HEADS * KEYS)  # more than one block
    x = tensors()
    leaf = torch.ones((), dtype=torch.float64, requires_grad=True)
    # A change of something derived from a leaf, as an optimizer step is for a later layer.
    derived = {n: t * leaf if t.is_floating_point() else t.clone() for n, t in x.items()}
    values = largest(derived)
    (expected,) = torch.autograd.grad(values.square().sum(), leaf, retain_graph=True)
    with torch.no_grad():
        derived[name].copy_(derived[name].flip(0) if name != "segments" else x[name] + 1)
    # The matrix holds a table by distance, q and k with zeros as padding: gradients stay right.
    if name in ("table", "q", "k"):
        (found,) = torch.autograd.grad(values.square().sum(), leaf)
        assert torch.equal(found, expected)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(values.square().sum(), leaf)


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_gradient_of_chosen_queries(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 24 // blocks * BATCH * HEADS * KEYS)
    q = torch.randn(BATCH, HEADS, QUERIES, 10, requires_grad=True)
    k = torch.randn(BATCH, KV_HEADS, KEYS, 10, requires_grad=True)
    chosen = torch.randperm(QUERIES)
    values, indices = AttentionMatrix(q, k).topk(4, queries=chosen)
    weights = AttentionMatrix(q, k).dense()[:, :, chosen]
    assert torch.equal(values, weights.topk(4).values)
    assert torch.equal(indices, weights.topk(4).indices)
    found = torch.autograd.grad(values.square().sum(), (q, k))
    double = (q.detach().double().requires_grad_(), k.detach().double().requires_grad_())
    exact = AttentionMatrix(*double).dense()[:, :, chosen].gather(-1, indices)
    for a, b in zip(found, torch.autograd.grad(exact.square().sum(), double), strict=True):
        # Sums over keys, queries and heads of products of three weights, each at most 1.
        terms = KEYS + HEADS * QUERIES
        assert float((a - b).abs().max()) <= terms * 2**-24 * max(1.0, float(b.abs().max()))


def test_the_largest_weights_are_within_the_budget() -> None:
    q, k = torch.randn(BATCH, HEADS, QUERIES, 10), torch.randn(BATCH, KV_HEADS, KEYS, 10)
    chosen = torch.tensor([23, 0, 7])
    values, _ = AttentionMatrix(q, k).topk(3, queries=chosen)
    budget = Budget.for_weights(q, k, read=lambda w: w[:, :, chosen].topk(3, dim=-1).values)
    budget.assert_holds(values)
    none, _ = AttentionMatrix(q, k).topk(3, queries=chosen[:0])
    assert none.shape == (BATCH, HEADS, 0, 3)


@pytest.mark.usefixtures("shapes_unchecked")
def test_the_former_name_and_other_queries_are_refused() -> None:
    matrix = AttentionMatrix(torch.zeros(1, 2, 24, 10), torch.zeros(1, 2, 29, 10))
    with pytest.raises(ArgumentError, match=r"A\.topk\(k, queries=index\)"):
        matrix.topk(3, rows=torch.tensor([1]))  # type: ignore[call-arg]
    for wrong in ([1], torch.tensor([24]), torch.tensor([0.5])):
        with pytest.raises(OptionError, match=r"topk\(3, queries=index\).* 24 queries"):
            matrix.topk(3, queries=wrong)  # type: ignore[arg-type]
