"""Learning: the verdict turns when one head suffices, when heads are alike, or when none learns."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.layers import attention
from headwise.layers.attention import Attention
from headwise.layers.latent import Product
from headwise.matrix.operator import AttentionMatrix
from headwise.study.questions import learning
from headwise.study.questions.learning import LabelledTexts
from tests.study.asking import failed_facts

pytestmark = pytest.mark.slow  # each trains again


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"LENGTH": 8, "VALUE": 8, "EMBED_DIM": 24, "BATCH": 16, "RATE": 2e-2}
    for name, value in sizes.items():
        monkeypatch.setattr(learning, name, value)
    for name, value in {"SEEDS": 3, "FEWER_SEEDS": 1, "STEPS": 128, "TEST": 200}.items():
        monkeypatch.setattr(learning, name, value)


# ---- the verdict turns -----------------------------------------------------------------------


def test_small_sizes_hold() -> None:
    assert failed_facts("learning") == []


def test_heads_that_keep_their_width(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = learning.make_layer

    def as_wide(num_heads: int, **sizes: int) -> Attention:
        return layer(num_heads, **{"head_dim": 6} | sizes)

    monkeypatch.setattr(learning, "make_layer", as_wide)
    assert "the same number of parameters" in failed_facts("learning")[0]


def test_both_lookups_are_about_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = learning.random_texts

    def twice(batch: int) -> LabelledTexts:
        given = texts(batch)
        return given._replace(values=given.values[:, :, :1].expand(-1, -1, 2, -1))

    monkeypatch.setattr(learning, "random_texts", twice)
    assert "one head left at least half" in failed_facts("learning")[0]


def test_heads_that_all_attend_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = attention._product_of_call

    def alike(self: Attention, *call: Any) -> Product:
        product = operands(self, *call)
        both = product.matrix.q, product.matrix.k
        first = (x[:, :1].expand_as(x).contiguous() for x in both)
        return product._replace(matrix=AttentionMatrix(*first))

    monkeypatch.setattr(attention, "_product_of_call", alike)
    found = " ".join(failed_facts("learning"))
    assert "two heads left less than half" in found
    assert "each of two heads learned one lookup" in found
    assert "four and eight heads" in found
    assert "one head did not" not in found


def test_a_gate_that_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Attention.forward

    def open_always(self: Attention, x: Tensor, **call: Any) -> Tensor:
        output: Tensor = forward(self, x, **call | {"gate": None})
        return output

    monkeypatch.setattr(Attention, "forward", open_always)
    (fact,) = failed_facts("learning")
    assert "with one of two heads switched off" in fact


def test_two_heads_that_stay_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    train = learning.run_training_steps

    def worse(model: Attention, *, steps: int) -> list[float]:
        found = train(model, steps=steps)
        if model.num_heads == 2:
            nn.init.normal_(model.out_proj.bias, std=0.4)
        return found

    monkeypatch.setattr(learning, "run_training_steps", worse)
    (fact,) = failed_facts("learning")
    assert "median error is larger than with two heads" in fact


def test_nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "RATE", 0.0)
    found = " ".join(failed_facts("learning"))
    assert "in a task with a single lookup" in found


# ---- the task --------------------------------------------------------------------------------


def test_the_values_are_those_of_the_token_before_and_of_the_named_one() -> None:
    given = learning.random_texts(50)
    values, _, names = given.x.split([8, 8, 8], dim=-1)
    assert torch.equal(given.values[:, :, 0], values[:, :-1])
    assert torch.equal(names.argmax(-1), given.named)
    assert torch.equal(given.values[7, 2, 1], values[7, given.named[7, 3]])
    assert not (given.named == (torch.arange(8) - 1) % 8).any()


def test_telling_nothing_is_an_error_of_the_values() -> None:
    model, given = learning.make_layer(2), learning.random_texts(3)
    nn.init.zeros_(model.out_proj.weight)
    with torch.no_grad():
        torch.testing.assert_close(
            learning.squared_errors_by_lookup(model, given), (given.values**2).mean((1, 3))
        )


def test_a_head_without_queries_attends_to_all_tokens_alike() -> None:
    model, given = learning.make_layer(3), learning.random_texts(2)
    nn.init.zeros_(model.q_proj.weight)
    torch.testing.assert_close(learning.lookup_weights(model, given), torch.full((2, 3), 1 / 8))


def test_one_mean_leaves_what_the_formula_says() -> None:
    white = 30**0.5 * torch.linalg.qr(torch.randn(30, 8, dtype=torch.float64))[0]
    p = torch.rand(8, dtype=torch.float64).softmax(0)
    mean = (white @ p)[:, None]
    left = white - mean @ torch.linalg.lstsq(mean, white).solution
    shares = (left**2).mean(0)
    torch.testing.assert_close(shares, 1 - p**2 / (p**2).sum())
    assert min((shares[a] + shares[b]) / 2 for a in range(8) for b in range(a)) >= learning.HALF


# ---- what is counted -------------------------------------------------------------------------


def test_heads_are_counted_by_what_they_attend_to() -> None:
    look = torch.tensor([[0.9, 0.5, 0.0, 0.2], [0.0, 0.5, 0.6, 0.7]])
    assert learning.count_heads_preferring_each_lookup(look) == {
        "before": 1,
        "named": 2,
    }  # one has as much on both
    blend = {"more": pytest.approx(2.7 / 4), "less": pytest.approx(0.7 / 4)}
    assert learning.mean_weight_by_preference(look) == blend


def test_heads_of_their_own() -> None:
    apart, same = torch.tensor([[0.9, 0.1], [0.2, 0.7]]), torch.tensor([[0.6, 0.1], [0.4, 0.2]])
    assert learning.check_dedicated_heads([apart]) == {"apart": True, "least": pytest.approx(0.7)}
    assert learning.check_dedicated_heads([apart, same]) == {
        "apart": False,
        "least": pytest.approx(0.4),
    }


def test_a_curve_is_pooled_over_steps_and_spread_over_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learning, "STEPS", 8)
    runs = [[1.0] * 4 + [2.0] * 4, [4.0] * 8, [0.0, 2.0] * 4]
    found = learning.summarize_curves(runs)
    assert found == {"best": [1.0, 1.0], "median": [1.0, 2.0], "worst": [4.0, 4.0]}
