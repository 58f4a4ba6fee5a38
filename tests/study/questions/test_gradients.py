"""Gradients: the verdict turns when heads mix, when ranks or gradients agree, or nothing moves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.function import stages
from headwise.layers import attention
from headwise.layers.attention import Attention
from headwise.layers.latent import Product
from headwise.matrix.operator import AttentionMatrix
from headwise.study.implementations import SharedWeights
from headwise.study.questions import gradients
from headwise.study.questions.gradients import projection_gradients
from tests.study.asking import failed_facts


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"EMBED_DIM": 32, "LENGTH": 40, "STEPS": (0, 1, 5), "LEARNING_RATE": 0.02}
    for name, value in small.items():
        monkeypatch.setattr(gradients, name, value)


def test_small_sizes_hold() -> None:
    assert failed_facts("gradients") == []


def test_a_layer_with_another_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is right, and what comes back to the values is a little too large."""
    product = AttentionMatrix.__matmul__

    def loud(matrix: AttentionMatrix, v: Tensor) -> Tensor:
        return product(matrix, v + 1e-4 * (v - v.detach()))

    monkeypatch.setattr(AttentionMatrix, "__matmul__", loud)
    (words,) = failed_facts("gradients")
    assert words.startswith("the closed formulas")


def test_a_softmax_step_without_its_row_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "softmax_gradient", torch.mul)
    words = failed_facts("gradients")
    assert words[1].startswith("the formula of the softmax's step")


def test_one_softmax_for_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then dS of the single head is the sum of the heads' too."""

    def even(s: Tensor, sink: Tensor | None = None) -> Tensor:
        return 0 * s + 1 / s.shape[-1]

    monkeypatch.setattr(stages, "weights_from_scores", even)
    found = failed_facts("gradients")
    assert any(words.startswith("up to this step one head has the sums") for words in found)


def test_heads_whose_queries_know_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = attention._product_of_call

    def mixed(self: Attention, *call: Any) -> Product:
        product = operands(self, *call)
        if self.num_heads > 1:
            product.matrix.q = product.matrix.q + 0.01 * product.matrix.q.roll(1, dims=1)
        return product

    monkeypatch.setattr(attention, "_product_of_call", mixed)
    found = failed_facts("gradients")
    assert any("exactly zero in all other weights" in words for words in found)


def test_scores_that_values_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are a little of the values too, as where both share one projection."""
    operands = attention._product_of_call

    def shared(self: Attention, *call: Any) -> Product:
        product = operands(self, *call)
        product.matrix.k = product.matrix.k + 1e-3 * self.v_proj.weight.sum()
        return product

    monkeypatch.setattr(attention, "_product_of_call", shared)
    assert any("exactly zero in all other weights" in words for words in failed_facts("gradients"))


def test_a_text_of_fewer_tokens_than_head_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "LENGTH", 20)
    assert any(
        "have rank 20 with one head, 16, 16 with two" in words
        for words in failed_facts("gradients")
    )


def test_tokens_that_are_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head reads the mean of equal values: the gradients of values and output agree."""
    draw, calls = gradients.random_tokens, iter(range(4))

    def same() -> Tensor:
        drawn = draw()
        return drawn[:, :1].expand_as(drawn) if next(calls) == 0 else drawn

    monkeypatch.setattr(gradients, "random_tokens", same)
    assert any("are least alike in wq and wk" in words for words in failed_facts("gradients"))


def test_a_layer_that_has_eight_heads_whatever_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def eight(embed_dim: int, num_heads: int, **options: Any) -> Attention:
        return Attention(embed_dim, 8, **options)

    monkeypatch.setattr(gradients, "Attention", eight)
    found = failed_facts("gradients")
    assert any("are least alike" in words for words in found)
    assert any("difference of 0\u00a0% after one step" in words for words in found)


def test_training_that_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "LEARNING_RATE", 0.0)
    trained, moved = failed_facts("gradients")
    assert trained.startswith("trained from the same weights")
    assert moved.startswith("in the end wo differs most")


def test_an_output_projection_that_starts_large(monkeypatch: pytest.MonkeyPatch) -> None:
    start = gradients.initial_weights

    def large() -> dict[str, Tensor]:
        state = start()
        return state | {"out_proj.weight": 3 * state["out_proj.weight"]}

    monkeypatch.setattr(gradients, "initial_weights", large)
    (words,) = failed_facts("gradients")
    assert words.startswith("in the end wo differs most")


def test_whose_rows_are_its_own() -> None:
    two = [[1, 0, 1, 0, 0, 0, 0, 0], [0, 1, 0, 1, 0, 0, 0, 0]]
    assert gradients.depends_on_own_rows_only(two, 2)
    assert gradients.depends_on_own_rows_only([[1, 1, 1, 1, 0, 0, 0, 0]], 2)
    assert not gradients.depends_on_own_rows_only(two[::-1], 2)
    assert not gradients.depends_on_own_rows_only([[1, 1, 1, 0, 0, 0, 0, 0]], 2)
    assert not gradients.depends_on_own_rows_only([[1, 1, 1, 1, 1, 0, 0, 0]], 2)


# ---- the closed formulas -----------------------------------------------------------------------


def made(heads: int = 2) -> tuple[Tensor, Tensor, Attention]:
    torch.manual_seed(0)
    layer = gradients.make_layer(heads, gradients.initial_weights())
    return gradients.random_tokens(), gradients.random_tokens(), layer


@pytest.mark.parametrize("number", range(4))
def test_a_small_mistake_in_each_formula(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is off by a ten-thousandth is more than rounding."""

    def wrong(*tensors: Tensor, heads: int) -> Tensor:
        return projection_gradients(*tensors, heads=heads) * (
            1 + 1e-4 * (torch.arange(4) == number)[:, None, None]
        )

    monkeypatch.setattr(gradients, "projection_gradients", wrong)
    assert failed_facts("gradients")[0].startswith("the closed formulas")


def test_two_keys_by_hand() -> None:
    """One head of width 1: p = 1 / (1 + exp(s1 - s0)), dS = p (1 - p) G (v0 - v1)."""
    x, one = torch.tensor([[[0.3], [-0.4]]]).double(), torch.ones(1, 1).double()
    upstream = torch.tensor([[[5.0], [0.0]]]).double()  # only the first query counts
    found = projection_gradients(x, upstream, one, one, one, one, heads=1).flatten().tolist()
    p = 1 / (1 + torch.exp(torch.tensor(0.3 * -0.7).double()))
    ds = p * (1 - p) * 5 * 0.7
    assert found[0] == pytest.approx(float(ds * (0.3 + 0.4) * 0.3))
    assert found[1] == pytest.approx(float(ds * 0.3 * (0.3 + 0.4)))
    assert found[2] == pytest.approx(float(5 * (p * 0.3 - (1 - p) * 0.4)))
    assert found[3] == pytest.approx(float(5 * (p * 0.3 - (1 - p) * 0.4)))


def test_no_other_head_is_in_a_heads_gradients() -> None:
    x, upstream, layer = made()
    weights = SharedWeights.of_linears(*gradients.projections(layer))
    whole = projection_gradients(x, upstream, *weights.tensors, heads=2)
    with torch.no_grad():  # the rows of head 0, and its columns of the output
        for weight in weights.matrices[:3]:
            weight[:16] *= 2
        weights.out[:, :16] *= 2
    changed = projection_gradients(x, upstream, *weights.tensors, heads=2)
    assert torch.equal(changed[:3, 16:], whole[:3, 16:])
    assert torch.equal(changed[3, :, 16:], whole[3, :, 16:])
    assert not torch.isclose(changed[:3, :16], whole[:3, :16]).any(-1).all()
