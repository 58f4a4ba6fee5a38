"""Quantised: the verdict turns when packing matters, when steps lie, or when torch drops a way."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import MissingExtraError
from headwise.matrix.operator import AttentionMatrix
from headwise.study.questions import quantised
from headwise.study.questions.quantised import (
    BFloat16Projection,
    QuantisedRange,
    StaticQuantised,
    error_bound,
)
from tests.study.asking import ask, failed_facts

unheard = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # asking ignores it


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EMBED_DIM": 36, "HEADS": 6, "BATCH": 2, "LENGTH": 9}.items():
        monkeypatch.setattr(quantised, name, value)
    monkeypatch.setattr(quantised, "TOKENS", {"one": 1, "many": 5})
    monkeypatch.setattr(quantised, "ROUNDS", {"one": 1, "many": 1})


# ---- the verdict turns -----------------------------------------------------------------------


def test_small_sizes_hold() -> None:
    assert failed_facts("quantised") == []


def test_wide_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Tensor.int_repr
    monkeypatch.setattr(Tensor, "int_repr", lambda weight: stored(weight).int())
    (fact,) = failed_facts("quantised")
    assert "four times as many" in fact


def test_packing_that_changes_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.ao.nn.quantized.functional.linear

    def other(x: Tensor, weight: Tensor, bias: Tensor, scale: float, zero: int) -> Tensor:
        return linear(x, weight, bias + 0.1, scale, zero)

    monkeypatch.setattr(torch.ao.nn.quantized.functional, "linear", other)
    (fact,) = failed_facts("quantised")
    assert "bit for bit" in fact


def test_steps_that_are_larger_than_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = quantised.quantise_weight
    monkeypatch.setattr(quantised, "quantise_weight", lambda given: weight((8 * given).round() / 8))
    assert "no element of q, k and v has a larger error" in failed_facts("quantised")[0]


def test_bfloat16_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = BFloat16Projection.forward
    monkeypatch.setattr(BFloat16Projection, "forward", lambda self, x: 1.1 * forward(self, x))
    (fact,) = failed_facts("quantised")
    assert "the error of int8 is larger than that of bfloat16" in fact


def test_float32_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    product = AttentionMatrix.__matmul__
    monkeypatch.setattr(AttentionMatrix, "__matmul__", lambda a, v: product(a, v) * 1.0001)
    (fact,) = failed_facts("quantised")
    assert "times the error budget of float32" in fact


def test_a_way_that_torch_has_dropped_is_gone_in_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.ao.quantization, "quantize_dynamic")
    answer = ask("quantised")
    assert answer.holds
    assert [row[2] for row in answer.rows if row[0] == "whole model"] == ["gone"]


def test_without_quantised_tensors_there_is_nothing_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "quantize_per_tensor")
    with pytest.raises(MissingExtraError, match="without quantised linears"):
        ask("quantised")


@pytest.mark.parametrize("way", ["Linear", "functional", "dynamic"])
def test_without_quantised_linears_there_is_nothing_to_ask(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.ao.nn.quantized, way)
    with pytest.raises(MissingExtraError, match="without quantised linears"):
        ask("quantised")


# ---- steps -----------------------------------------------------------------------------------


def test_steps_have_zero_among_them() -> None:
    assert QuantisedRange.from_values(torch.tensor([-1.0, 3.0]), levels=4) == QuantisedRange(1.0, 1)
    assert QuantisedRange.from_values(torch.tensor([1.0, 2.0]), levels=2) == QuantisedRange(1.0, 0)
    assert QuantisedRange.from_values(torch.tensor([-5.0, -1.0]), levels=5) == QuantisedRange(
        1.0, 5
    )


def test_the_bound_of_one_product() -> None:
    projection = nn.Linear(2, 1)
    nn.init.zeros_(projection.bias)
    projection.weight.data[:] = torch.tensor([[1.0, -0.5]])
    x = torch.tensor([[2.0, -1.0]])  # the output is 2.5
    of_x, of_weight, of_output = 3 / 127, 2 / 254, 2.5 / 255
    without = of_x / 2 * 1.5 + of_weight / 2 * 3 + (2 / 4 + 1 / 2) * of_x * of_weight
    for stores_output, allowed in ((False, without), (True, without + of_output / 2)):
        found = error_bound(projection, x, stores_output=stores_output)
        torch.testing.assert_close(found, torch.tensor([[allowed]]).double())


@unheard
def test_what_is_on_a_step_is_kept() -> None:
    projection = nn.Linear(2, 2, bias=True)
    nn.init.zeros_(projection.bias)
    projection.weight.data[:] = torch.eye(2)
    x = torch.tensor([[127.0, 3.0]])
    for packs_every_call in (True, False):
        layer = StaticQuantised(projection, x, packs_every_call=packs_every_call)
        torch.testing.assert_close(layer(x)[0, 0], x[0, 0])
        assert (layer(x) - x).abs().max() <= 127 / 255 / 2 * (1 + 1e-6)


# ---- what is still there ---------------------------------------------------------------------


def test_a_status_says_what_became_of_it() -> None:
    def missing() -> None:
        raise NotImplementedError

    def leaving() -> None:
        warnings.warn("this is deprecated", FutureWarning, stacklevel=1)

    assert quantised.support_status(missing) == "gone"
    assert quantised.support_status(leaving) == "works, deprecated"
    assert quantised.support_status(lambda: None) == "works"


def test_what_torch_says_once_is_heard_again() -> None:
    always = torch.is_warn_always_enabled()

    def make() -> Tensor:
        return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)

    assert quantised.support_status_always_warning(make) == quantised.support_status_always_warning(
        make
    )
    assert torch.is_warn_always_enabled() == always
