"""All weights one: each fact turns when the library, or what is set and drawn, is otherwise."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.function import stages
from headwise.study.implementations import TorchLayer
from headwise.study.question import Answer
from headwise.study.questions import weights_of_one
from tests.study.asking import ask

pytestmark = pytest.mark.slow  # each measures the study's question again


NAMED = {
    "rand": "inconclusive: saturated",
    "randn": "inconclusive: saturated",
    "quiet": "number of heads",
    "same": "inconclusive: equal tokens",
    "elsewhere": "number of heads",
}


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What compare says is that of the question, whose own test asks it; a test may change it."""
    answers = dict(NAMED)
    monkeypatch.setattr(weights_of_one, "name_causes", lambda layer, tokens: answers)
    return answers


def asked() -> Answer:
    return ask("weights-of-one")


def assert_fails(answer: Answer, *facts: int) -> None:
    """These facts, and perhaps others, do not hold, and the verdict says so."""
    for number in facts:
        held, words = answer.facts[number]
        assert not held, words
        assert words in answer.verdict


def soften(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """The softmax of torch's layer, of scores times a factor."""
    own = torch.nn.functional.softmax

    def softmax(s: Tensor, dim: int) -> Tensor:
        return own(factor * s, dim=dim)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)


def test_scores_on_another_scale_are_not_the_root_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "default_scale", lambda q: 0.1)
    assert_fails(asked(), 0)


def test_weights_that_are_not_all_one_make_heads_that_are_not_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uneven(layer: nn.Module) -> None:
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter)

    monkeypatch.setattr(weights_of_one, "set_weights_to_one", uneven)
    assert_fails(asked(), 0, 1, 2)


def test_a_layer_that_makes_up_for_small_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head is the same as several, and so another with its scores divided by the root."""

    class Scaled(nn.MultiheadAttention):
        def forward(self, query: Tensor, *args: Any, **options: Any) -> Any:
            return super().forward(query * math.sqrt(self.num_heads), *args, **options)

    monkeypatch.setattr(TorchLayer, "layer", Scaled)
    assert_fails(asked(), 1, 4)


def test_scores_that_are_too_small_to_pick_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then even tokens from torch.rand show the scale."""
    soften(monkeypatch, 1e-5)
    assert_fails(asked(), 2)


def test_a_softmax_that_is_even_hides_all(monkeypatch: pytest.MonkeyPatch) -> None:
    soften(monkeypatch, 0.0)
    assert_fails(asked(), 4, 5)


def test_tokens_that_are_not_equal_do_not_come_out_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_of_one, "repeat_first_token", lambda x: x)
    answer = asked()
    assert_fails(answer, 3)
    assert [held for held, _ in answer.facts].count(False) == 1


def test_default_weights_that_are_zero_hide_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = nn.MultiheadAttention._reset_parameters

    def silent(layer: nn.MultiheadAttention) -> None:
        own(layer)
        nn.init.zeros_(layer.in_proj_weight[: 2 * layer.embed_dim])

    monkeypatch.setattr(nn.MultiheadAttention, "_reset_parameters", silent)
    answer = asked()
    assert_fails(answer, 5)
    assert [held for held, _ in answer.facts].count(False) == 1


@pytest.mark.parametrize("tokens", ["rand", "elsewhere"])
def test_another_answer_of_compare(named: dict[str, str], tokens: str) -> None:
    named[tokens] = "same"
    assert_fails(asked(), 6)


# ---- what it measures with -----------------------------------------------------------------------


def test_evenness_is_the_share_of_the_largest_entropy() -> None:
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert weights_of_one.normalised_entropy(weights) == 0.5
    assert weights_of_one.normalised_entropy(weights[1:2]) == 0.5


def test_a_single_head_has_the_parameters_of_several() -> None:
    several = TorchLayer(weights_of_one.EMBED_DIM, 4)
    one, rescaled = (
        weights_of_one.copy_as_single_head_layer(several),
        weights_of_one.rescaled_single_head(several),
    )
    assert one.num_heads == rescaled.num_heads == 1
    mine = [layer.as_shared_weights().tensors for layer in (several, one, rescaled)]
    for number, (a, b, c) in enumerate(zip(*mine, strict=True)):
        assert torch.equal(a, b)
        assert a.data_ptr() != b.data_ptr()
        assert torch.equal(a / 2 if number == 0 else a, c)
