"""Parameters: the verdict turns when the number of heads does change them."""

from typing import Any

import pytest
import torch
from torch import nn

from headwise.layers.attention import Attention
from headwise.layers.torch_api.layer import MultiheadAttention
from headwise.study.implementations import Paper
from headwise.study.questions import parameters
from tests.study.asking import failed_facts


@pytest.mark.parametrize("layer", [nn.MultiheadAttention, MultiheadAttention])
def test_a_layer_with_a_parameter_for_each_head(
    layer: type[nn.MultiheadAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gated(layer):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.gate = nn.Parameter(torch.ones(self.num_heads))

    where = nn if layer is nn.MultiheadAttention else parameters
    monkeypatch.setattr(where, "MultiheadAttention", Gated)
    (words,) = failed_facts("parameters")
    assert "the same parameters, by name and shape" in words


def test_heads_that_share_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Paper.__init__

    def sharing(self: Paper, *args: int) -> None:
        own(self, *args)
        self.wk = nn.Parameter(self.wk[:1])

    monkeypatch.setattr(Paper, "__init__", sharing)
    (words,) = failed_facts("parameters")
    assert "557,056 numbers" in words
    assert "786,432" in words


def test_heads_of_another_width(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Paper.__init__

    def narrow(self: Paper, embed_dim: int, num_heads: int) -> None:
        own(self, embed_dim, num_heads + 1)

    monkeypatch.setattr(Paper, "__init__", narrow)
    (words,) = failed_facts("parameters")
    assert "a matrix (56, 512)" in words


def test_a_native_layer_that_forgets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(embed_dim: int, num_heads: int, **forgotten: int) -> Attention:
        return Attention(embed_dim, num_heads)

    monkeypatch.setattr(parameters, "Attention", plain)
    first, second = failed_facts("parameters")
    assert "and sixteen have 1,050,624" in first
    assert "has 1,050,624 parameters; with a kv head for each head it has 1,050,624" in second
