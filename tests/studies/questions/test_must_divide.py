"""Must embed_dim divide? The verdict turns where free widths go wrong, or torch takes them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import functional
from headwise.layer.attention import Attention
from headwise.layer.einops_block import EinopsAttention
from headwise.matrix import AttentionMatrix
from headwise.studies.experiments.per_head import Weights, budget, per_head, rounding_floor
from headwise.studies.question import Answer
from headwise.studies.questions import must_divide
from headwise.studies.study import ask


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(must_divide, "GRID_HEADS", (1, 3, 4, 6))
    monkeypatch.setattr(must_divide, "GRID_HEAD_DIMS", (7, 10, 40))


def failing(answer: Answer) -> list[str]:
    said = [words for held, words in answer.facts if not held]
    assert not answer.holds
    assert all(words in answer.verdict for words in said)
    return said


def test_a_scale_of_embed_dim_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class ByWidth(Attention):
        def __init__(self, *sizes: int, **options: Any) -> None:
            super().__init__(*sizes, scale=math.sqrt(sizes[1] / sizes[0]), **options)
            self.reset_parameters()

    monkeypatch.setattr(must_divide, "Attention", ByWidth)
    said = failing(ask(must_divide.QUESTION))
    assert said[0].startswith("6 heads with head_dim 10")
    assert "so do 2 of 12 other pairs" in said[1]  # 1 * 40 and 4 * 10
    assert "source_dim" in said[2]


def test_a_wrong_block_of_einops_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(self: EinopsAttention, q: Tensor, k: Tensor, *, mask: None) -> AttentionMatrix:
        return AttentionMatrix(self._heads("q", q, self.w_ks), self._heads("k", k, self.w_qs))

    monkeypatch.setattr(EinopsAttention, "matrix", swapped)
    (said,) = failing(ask(must_divide.QUESTION))
    assert "einops documentation" in said


def test_a_torch_that_does_not_divide_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Free(nn.MultiheadAttention):
        def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
            heads = num_heads if embed_dim % num_heads == 0 else 1
            super().__init__(embed_dim, heads, **options)

    monkeypatch.setattr(nn, "MultiheadAttention", Free)
    (said,) = failing(ask(must_divide.QUESTION))
    assert "and no other" in said


def test_another_count_of_parameters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(Attention):
        def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
            super().__init__(embed_dim, num_heads, **options)
            self.further = nn.Parameter(torch.zeros(num_heads))

    monkeypatch.setattr(must_divide, "Attention", Wide)
    (said,) = failing(ask(must_divide.QUESTION))
    assert "number of parameters" in said


def test_widths_that_follow_the_heads_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(must_divide, "EMBED_DIM", 48)  # 6 divides it
    monkeypatch.setattr(must_divide, "GRID_HEAD_DIMS", (8, 12, 48))
    (said,) = failing(ask(must_divide.QUESTION))
    assert "(remainder 0)" in said


def test_other_inputs_of_torchs_layer_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(*given: Any) -> Any:
        output, weights = forward(*given)
        return output.flip(1), weights

    forward = nn.MultiheadAttention.forward
    monkeypatch.setattr(nn.MultiheadAttention, "forward", swapped)
    (said,) = failing(ask(must_divide.QUESTION))
    assert "kdim 29" in said


# ---- the formula -----------------------------------------------------------------------------


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Weights]:
    """6 heads of head_dim 10 and value_dim 7, for inputs of three widths."""
    torch.manual_seed(1)
    sizes = ((60, 40), (60, 29), (42, 23), (31, 42))
    weights = [torch.randn(size, dtype=dtype) / size[1] ** 0.5 for size in sizes]
    biases = [torch.randn(size[0], dtype=dtype) for size in sizes]
    x, keys, values = (torch.randn(3, n, w, dtype=dtype) for n, w in ((5, 40), (9, 29), (9, 23)))
    return x, keys, values, Weights._make([*weights, *biases])


def test_the_formula_is_the_reference_arithmetic() -> None:
    x, keys, values, w = drawn(torch.float64)
    q, k, v = (
        (inputs @ weight.mT + bias).unflatten(-1, (6, -1)).transpose(1, 2)
        for inputs, weight, bias in ((x, w.wq, w.bq), (keys, w.wk, w.bk), (values, w.wv, w.bv))
    )
    expected = functional.head_outputs(q, k, v).transpose(1, 2).flatten(2) @ w.wo.mT + w.bo
    torch.testing.assert_close(per_head(x, keys, values, *w, heads=6), expected)


def test_one_head_that_sees_one_key_gives_its_value() -> None:
    one = torch.ones(1, 1)
    none = torch.zeros(1)
    weights = Weights(one, one, 3 * one, 2 * one, none, none, none, one[0])
    output = per_head(one[None], one[None], 5 * one[None], *weights, heads=1)
    assert output.item() == 5 * 3 * 2 + 1


def test_rounding_stays_under_its_floor_and_uses_some_of_it() -> None:
    x, keys, values, w = drawn()
    floor = rounding_floor(x, keys, values, w, heads=6)
    exact = per_head(*(t.double() for t in (x, keys, values, *w)), heads=6)
    share = (per_head(x, keys, values, *w, heads=6) - exact).abs() / floor
    assert share.max() < 1
    assert share.max() > 1e-3


def test_the_budget_sees_one_wrong_head() -> None:
    x, keys, values, w = drawn()
    allowed = budget(x, keys, values, w, heads=6)
    assert allowed.check(per_head(x, keys, values, *w, heads=6)).within
    turned = w._replace(wv=torch.cat([w.wv[:35], w.wv[35:] * (1 + 1e-3)]))
    assert not allowed.check(per_head(x, keys, values, *turned, heads=6)).within
