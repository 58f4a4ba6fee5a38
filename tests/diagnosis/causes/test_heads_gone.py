"""Layers and models that lost heads, against those that they were cut from."""

from typing import Any

import pytest
import torch

import headwise
from headwise import Attention, Rotary
from headwise.layers.distance import Alibi
from headwise.surgery import Cut, LayerCut, cut_layer, cut_model
from tests.quick import others_slow
from tests.surgery.families import FAMILIES, whole, without

EMBED, HEADS, KV_HEADS, HEAD_DIM = 40, 6, 3, 10


def layer_of(**options: Any) -> Attention:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_dim": 7}
    return Attention(EMBED, HEADS, **{**sizes, **options})


def cut_of(layer: Attention) -> LayerCut:
    return LayerCut(layer.num_heads, layer.num_kv_heads)


def causes_of(a: Any, b: Any, *inputs: Any) -> list[tuple[str, dict[str, Any]]]:
    found = headwise.compare(a, b, *inputs)
    causes = found.function.causes if found.function else found.model.layers[0].comparison.causes
    return [(cause.name, dict(cause.parameters)) for cause in causes]


@pytest.mark.parametrize(
    "options", others_slow([{}, {"rotary": Rotary()}, {"sink": True}]), ids=str
)
@pytest.mark.parametrize(
    "kept", [[2, 3, 4, 5], [4, 5, 0, 1], [5, 0, 3]], ids=["a group", "order", "one of each"]
)
def test_heads_that_are_gone_are_named(kept: list[int], options: dict[str, Any]) -> None:
    layer = layer_of(**options)
    made = cut_layer(cut_of(layer).keep(kept), layer)
    gone = tuple(head for head in range(HEADS) if head not in kept)
    diagnosis = headwise.compare(made, layer)
    assert causes_of(made, layer) == [("heads gone", {"without heads": gone})]
    assert "heads gone explains all of it" in str(diagnosis)


def test_slopes_stay_those_of_the_heads() -> None:
    layer = layer_of(score_bias=Alibi(), num_kv_heads=6)
    other = layer_of(score_bias=Alibi(), num_kv_heads=6)
    width = layer.value_dim
    with torch.no_grad():
        other.out_proj.weight[:, 2 * width : 3 * width] = 0
    assert causes_of(other, layer) == [("heads gone", {"without heads": (2,)})]


@pytest.mark.slow
def test_what_is_left_has_its_own_causes() -> None:
    layer = layer_of()
    made = cut_layer(cut_of(layer).drop([2, 3]), layer)
    made.scale = 0.5
    assert [name for name, _ in causes_of(made, layer)] == ["heads gone", "scale"]


def test_a_mean_in_the_bias_is_seen() -> None:
    layer = layer_of()
    made = cut_layer(cut_of(layer).drop([2, 3]).shift(torch.linspace(-1, 1, EMBED)), layer)
    parameters = {"without heads": (2, 3), "bias": "another one"}
    assert causes_of(made, layer) == [("heads gone", parameters)]


@pytest.mark.slow
def test_another_output_projection_is_not_explained() -> None:
    layer = layer_of()
    generator = torch.Generator().manual_seed(3)
    wo = torch.randn(4, 7, EMBED, generator=generator)
    made = cut_layer(cut_of(layer).drop([2, 3]).refit(wo), layer)
    diagnosis = headwise.compare(made, layer)
    assert [name for name, _ in causes_of(made, layer)] == ["heads gone"]
    assert "nothing explains output" in str(diagnosis)


@pytest.mark.parametrize("off", [(0, 3, 5), pytest.param((4,), marks=pytest.mark.slow)])
@pytest.mark.parametrize("shift", others_slow([False, True], True))
def test_heads_without_effect_are_named(off: tuple[int, ...], shift: bool) -> None:
    layer = layer_of()
    cut = cut_of(layer).zero(off)
    made = cut_layer(cut.shift(torch.linspace(-1, 1, EMBED)) if shift else cut, layer)
    parameters: dict[str, Any] = {"without heads": off}
    parameters |= {"bias": "another one"} if shift else {}
    assert causes_of(made, layer) == [("heads gone", parameters)]


def test_heads_of_half_their_size_are_not_gone() -> None:
    layer, other = layer_of(), layer_of()
    with torch.no_grad():
        other.out_proj.weight[:, :14] *= 0.5
    assert "heads gone" not in dict(causes_of(other, layer))


@pytest.mark.slow
def test_other_heads_are_not_matched() -> None:
    layer, other = layer_of(), layer_of(num_kv_heads=2)
    torch.manual_seed(1)
    smaller = Attention(EMBED, 4, num_kv_heads=2, head_dim=HEAD_DIM, value_dim=7)
    diagnosis = headwise.compare(smaller, layer)
    assert not causes_of(smaller, layer)
    assert "q has 4 heads against 6" in str(diagnosis)
    assert "heads gone" not in dict(causes_of(other, layer))


IDS = torch.arange(34).reshape(2, 17)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_cut_model_against_its_original(family: str) -> None:
    model = FAMILIES[family](num_hidden_layers=3)
    first, *others = whole(model)
    cuts = {first[0]: first[1].drop([2, 3])} | {name: cut.drop([0, 1]) for name, cut in others}
    made = cut_model(Cut(cuts), model)
    layers = headwise.compare(made, model, IDS).model.layers
    named = [dict(layer.comparison.causes[0].parameters) for layer in layers]
    assert [layer.comparison.causes[0].name for layer in layers] == ["heads gone"] * 3
    assert named == [{"without heads": gone} for gone in ((2, 3), (0, 1), (0, 1))]


def test_a_cut_model_is_cut_again() -> None:
    model = FAMILIES["llama"]()
    first = without(model, [2, 3])
    made = cut_model(first, model)
    second = without(made, [2, 3])
    twice, once = cut_model(second, made), cut_model(first.then(second), model)
    assert {tuple(gone) for gone in first.then(second).gone.values()} == {(2, 3, 4, 5)}
    for name, tensor in twice.state_dict().items():
        assert torch.equal(tensor, once.state_dict()[name])
