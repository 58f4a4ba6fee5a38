"""All weights one: each fact turns when the library, or what is set and drawn, is otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import functional
from headwise.drop_in.layer import MultiheadAttention
from headwise.studies.question import Answer
from headwise.studies.questions import weights_of_one
from headwise.studies.study import ask


def asked() -> Answer:
    return ask(weights_of_one.QUESTION)


def assert_fails(answer: Answer, *facts: int) -> None:
    """These facts, and perhaps others, do not hold, and the verdict says so."""
    for number in facts:
        held, words = answer.facts[number]
        assert not held, words
        assert words in answer.verdict


def test_scores_on_another_scale_are_not_the_root_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "default_scale", lambda q: 0.1)
    assert_fails(asked(), 0, 1)


def test_weights_that_are_not_all_one_make_heads_that_are_not_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uneven(layer: nn.Module) -> None:
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter)

    monkeypatch.setattr(weights_of_one, "set_to_one", uneven)
    assert_fails(asked(), 0, 1, 2)


def test_another_scale_for_the_single_head_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_of_one, "THEIR_SCALE", weights_of_one.EMBED_DIM**-0.5)
    answer = asked()
    assert_fails(answer, 1)
    assert [held for held, _ in answer.facts].count(False) == 1


def test_small_positive_tokens_come_out_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.rand

    def small(*sizes: int, **options: Any) -> Tensor:
        return own(*sizes, **options) if options else 0.01 * own(*sizes)

    monkeypatch.setattr(torch, "rand", small)
    assert_fails(asked(), 2)


def test_without_the_small_factor_nothing_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_of_one, "QUIET", 1e-30)
    assert_fails(asked(), 4)


def test_tokens_that_are_not_equal_do_not_come_out_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "expand_as", lambda x, other: other)  # the tokens as drawn
    assert_fails(asked(), 3)


def test_own_weights_that_are_zero_hide_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    own = weights_of_one.layer_of

    def silent(heads: int) -> MultiheadAttention:
        layer = own(heads)
        nn.init.zeros_(layer.in_proj_weight[: 2 * weights_of_one.EMBED_DIM])
        return layer

    monkeypatch.setattr(weights_of_one, "layer_of", silent)
    assert_fails(asked(), 5)
