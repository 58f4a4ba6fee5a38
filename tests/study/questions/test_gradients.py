"""Gradients: the verdict turns when heads mix, when ranks or gradients agree, or nothing moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.function import stages
from headwise.layers.attention import Attention
from headwise.matrix.operator import AttentionMatrix
from headwise.study.questions import gradients
from headwise.study.questions.gradients import (
    ForwardPass,
    projection_gradients,
    rounding_bounds,
)
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
        return product(matrix, v + 1e-6 * (v - v.detach()))

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
    operands = Attention._matrix_and_values

    def mixed(self: Attention, *call: Any) -> tuple[AttentionMatrix, Tensor]:
        matrix, v = operands(self, *call)
        if self.num_heads > 1:
            matrix.q = matrix.q + 0.01 * matrix.q.roll(1, dims=1)
        return matrix, v

    monkeypatch.setattr(Attention, "_matrix_and_values", mixed)
    found = failed_facts("gradients")
    assert any("exactly zero in all other weights" in words for words in found)


def test_scores_that_values_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are a little of the values too, as where both share one projection."""
    operands = Attention._matrix_and_values

    def shared(self: Attention, *call: Any) -> tuple[AttentionMatrix, Tensor]:
        matrix, v = operands(self, *call)
        matrix.k = matrix.k + 1e-3 * self.v_proj.weight.sum()
        return matrix, v

    monkeypatch.setattr(Attention, "_matrix_and_values", shared)
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


def test_the_heads_gradients_in_the_shapes_of_the_layer() -> None:
    torch.manual_seed(0)
    layer, x, upstream = (
        gradients.make_layer(4, gradients.initial_weights()),
        *(gradients.random_tokens(),) * 2,
    )
    by_hand = gradients.join_head_gradients(
        gradients.projection_gradients(gradients.forward_pass(layer, x, upstream))
    )
    for name, weight in gradients.projection_weights(layer).items():
        assert by_hand[name].shape == weight.shape


# ---- the closed formulas -----------------------------------------------------------------------

SIZES = {"batch": 3, "heads": 5, "length": 13, "embed_dim": 10, "out_dim": 8}
HEAD_DIM, VALUE_DIM = 4, 6


def made(dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], ForwardPass]:
    """Weights of each head, by the names of the formulas, and a forward pass with them."""
    torch.manual_seed(1)
    batch, heads, length, width, out = SIZES.values()
    shapes = {"q": (HEAD_DIM, width), "k": (HEAD_DIM, width), "v": (VALUE_DIM, width)}
    shapes["o"] = (out, VALUE_DIM)
    drawn = {name: torch.randn(heads, *shape, dtype=dtype) / 3 for name, shape in shapes.items()}
    w = {name: weight.requires_grad_() for name, weight in drawn.items()}
    x = torch.randn(batch, length, width, dtype=dtype)
    q, k, v = (torch.einsum("bld,hwd->bhlw", x, w[name]) + 0.5 for name in "qkv")
    return w, ForwardPass(x, q, k, v, w["o"], torch.randn(batch, length, out, dtype=dtype))


def by_autograd() -> tuple[dict[str, Tensor], ForwardPass]:
    w, forward = made()
    heads = stages.head_outputs(forward.q, forward.k, forward.v)
    output = torch.einsum("bhqv,hov->bqo", heads, forward.wo)
    found = torch.autograd.grad(output, list(w.values()), forward.upstream)
    return dict(zip(w, found, strict=True)), ForwardPass(*(part.detach() for part in forward))


def test_the_formulas_are_autograd() -> None:
    found, forward = by_autograd()
    formulas, bounds = projection_gradients(forward), rounding_bounds(forward)
    for name, theirs in found.items():
        assert formulas[name].shape == theirs.shape
        assert torch.all((formulas[name] - theirs).abs() <= bounds[name]), name
        assert bounds[name].max() < 1e-11 * theirs.abs().max()


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_the_bounds_see_a_small_mistake(name: str) -> None:
    """A value that is off by a millionth is more than rounding, in each formula."""
    found, forward = by_autograd()
    part = {"q": "k", "k": "q", "v": "upstream", "o": "v"}[name]
    wrong = forward._replace(**{part: getattr(forward, part) * (1 + 1e-6)})
    ours = projection_gradients(wrong)[name]
    assert torch.all((ours - found[name]).abs().max() > rounding_bounds(forward)[name].max())


def test_bounds_hold_in_float32() -> None:
    narrow = made(torch.float32)[1]
    wide = ForwardPass(*(part.double() for part in narrow))
    exact, plain = projection_gradients(wide), projection_gradients(narrow)
    bounds = rounding_bounds(narrow)
    for name, theirs in exact.items():
        assert torch.all((plain[name] - theirs).abs() <= bounds[name])
        assert bounds[name].max() < 1e-3 * theirs.abs().max()


def test_two_keys_by_hand() -> None:
    """One head of width 1: p = 1 / (1 + exp(s1 - s0)), dS = p (1 - p) G (v0 - v1)."""
    column = torch.tensor([[[[0.3], [-0.4]]]]).double()
    v, one = torch.tensor([[[[2.0], [0.5]]]]).double(), torch.ones(1, 1, 1).double()
    upstream = torch.tensor([[[5.0], [0.0]]]).double()  # only the first query counts
    forward = ForwardPass(column[0], torch.ones_like(column), column, v, one, upstream)
    p = 1 / (1 + torch.exp(torch.tensor(-0.7).double()))
    ds = p * (1 - p) * 5 * 1.5
    found = {name: float(part) for name, part in projection_gradients(forward).items()}
    assert found["q"] == pytest.approx(float(ds * (0.3 + 0.4) * 0.3))
    assert found["k"] == pytest.approx(float(ds * (0.3 + 0.4)))
    assert found["v"] == pytest.approx(float(5 * (p * 0.3 - (1 - p) * 0.4)))
    assert found["o"] == pytest.approx(float(5 * (p * 2 + (1 - p) * 0.5)))


def test_no_other_head_is_in_a_heads_gradients() -> None:
    forward = made()[1]
    parts = {name: getattr(forward, name)[:, 2:3] for name in "qkv"}
    alone = projection_gradients(forward._replace(**parts, wo=forward.wo[2:3]))
    for name, whole in projection_gradients(forward).items():
        torch.testing.assert_close(alone[name], whole[2:3])
