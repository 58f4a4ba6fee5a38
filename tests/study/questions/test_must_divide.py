"""Must embed_dim divide? The verdict turns where free widths go wrong, or torch takes them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.layers.attention import Attention
from headwise.matrix.operator import AttentionMatrix
from headwise.study.implementations import EinopsPostNormBlock
from headwise.study.questions import must_divide
from tests.study.asking import ask, failing


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(must_divide, "GRID_HEADS", (1, 3, 4, 6))
    monkeypatch.setattr(must_divide, "GRID_HEAD_DIMS", (7, 10, 40))


def test_a_scale_of_embed_dim_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class ByWidth(Attention):
        def __init__(self, *sizes: int, **options: Any) -> None:
            super().__init__(*sizes, scale=math.sqrt(sizes[1] / sizes[0]), **options)
            self.reset_parameters()

    monkeypatch.setattr(must_divide, "Attention", ByWidth)
    said = failing(ask("must-divide"))
    assert said[0].startswith("6 heads with head_dim 10")
    assert "2 of 12 other pairs" in said[1]  # 1 * 40 and 4 * 10
    assert "source_dim" in said[2]


def test_a_wrong_block_of_einops_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(self: EinopsPostNormBlock, q: Tensor, k: Tensor, *, mask: None) -> AttentionMatrix:
        return AttentionMatrix(
            self._project_heads("q", q, self.w_ks), self._project_heads("k", k, self.w_qs)
        )

    monkeypatch.setattr(EinopsPostNormBlock, "matrix", swapped)
    (said,) = failing(ask("must-divide"))
    assert "EinopsPostNormBlock" in said


def test_head_outputs_that_are_a_little_larger_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    product = AttentionMatrix.__matmul__
    monkeypatch.setattr(AttentionMatrix, "__matmul__", lambda a, v: product(a, v) * (1 + 2e-4))
    said = failing(ask("must-divide"))
    assert said[0].startswith("6 heads with head_dim 10")
    assert said[1].startswith("0 of 12 other pairs")
    assert "EinopsPostNormBlock" in said[2]
    assert "source_dim" in said[3]


def test_a_torch_that_does_not_divide_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Free(nn.MultiheadAttention):
        def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
            heads = num_heads if embed_dim % num_heads == 0 else 1
            super().__init__(embed_dim, heads, **options)

    monkeypatch.setattr(nn, "MultiheadAttention", Free)
    (said,) = failing(ask("must-divide"))
    assert "and no other" in said


def test_another_count_of_parameters_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(Attention):
        def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
            super().__init__(embed_dim, num_heads, **options)
            self.further = nn.Parameter(torch.zeros(num_heads))

    monkeypatch.setattr(must_divide, "Attention", Wide)
    (said,) = failing(ask("must-divide"))
    assert "number of parameters" in said


def test_widths_that_follow_the_heads_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(must_divide, "EMBED_DIM", 48)  # 6 divides it
    monkeypatch.setattr(must_divide, "GRID_HEAD_DIMS", (8, 12, 48))
    (said,) = failing(ask("must-divide"))
    assert "(remainder 0)" in said


def test_other_inputs_of_torchs_layer_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(*given: Any) -> Any:
        output, weights = forward(*given)
        return output.flip(1), weights

    forward = nn.MultiheadAttention.forward
    monkeypatch.setattr(nn.MultiheadAttention, "forward", swapped)
    (said,) = failing(ask("must-divide"))
    assert "kdim 29" in said
