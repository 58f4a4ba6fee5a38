"""Layers and models whose kv heads were merged, against those that they were made from."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise
from headwise import Attention
from headwise.identify.results import Diagnosis, Verdict
from headwise.surgery import Cut, LayerCut, ModelHeads, cut_layer, cut_model, regroup
from headwise.surgery.maps import How
from tests.diagnosis.among import compare_among
from tests.quick import others_extra, others_slow
from tests.surgery.families import FAMILIES, GROUPED, inputs_of

EMBED, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 40, 12, 6, 10, 7
NAME = "kv heads merged"
Causes = list[tuple[str, dict[str, Any], str]]


def merged(model: Any, count: int, order: Sequence[int] | None = None) -> Any:
    """The model whose layers have kv heads of so many, after the heads were put in an order."""
    layers = {}
    for name, cut in ModelHeads(model).whole():
        moved = cut if order is None else cut.keep(order)
        layers[name] = moved.merge(cut.num_kv_heads // count)
    return cut_model(Cut(layers), model)


def causes_of(diagnosis: Diagnosis) -> list[Causes]:
    """The name, the parameters and the side of each cause of each layer."""
    layers = diagnosis.model.layers if diagnosis.model else ()
    comparisons = [layer.comparison for layer in layers]
    comparisons += [diagnosis.function] if diagnosis.function else []
    return [[(c.name, dict(c.parameters), c.side) for c in each.causes] for each in comparisons]


def expect(a: Any, b: Any, inputs: Any, parameters: dict[str, Any]) -> None:
    """Check that this cause explains all of it, whichever of the two comes first."""
    for first, second, side in ((a, b, "first"), (b, a, "second")):
        diagnosis = headwise.compare(first, second, inputs)
        layers = causes_of(diagnosis)
        assert layers == [[(NAME, parameters, side)]] * len(layers), str(diagnosis)
        assert f"{NAME} explains all of it" in str(diagnosis)
        assert diagnosis.verdict is Verdict.DIFFERENT


# Biases are those of bert, norms of q and k those of qwen3, a softcap and a scale those of gemma2.
READ = ["llama", "bert", "gpt2", "qwen3", "gemma2", "vit", "t5", "bart"]


@pytest.mark.parametrize("family", others_extra(READ, "llama"))
def test_the_mean_of_neighbours_in_each_family(family: str) -> None:
    model = FAMILIES[family]()
    count = 3 if family in GROUPED else 2
    groups = "0+1+2" if family in GROUPED else "0+1, 2+3, 4+5"
    expect(merged(model, count), model, inputs_of(model), {"kv heads": groups})


@pytest.mark.extra
@pytest.mark.parametrize("family", ["bert", "vit"])
def test_the_mean_of_heads_in_another_order(family: str) -> None:
    model, order = FAMILIES[family](), (0, 3, 5, 1, 4, 2)
    parameters = {"kv heads": "0+3+5, 1+2+4", "heads in the order": order}
    expect(merged(model, 3, order), model, inputs_of(model), parameters)


@pytest.mark.parametrize(
    ("family", "dtype"),
    others_slow([("bert", torch.bfloat16), ("llama", torch.float16), ("bert", torch.float64)]),
)
def test_weights_of_other_dtypes(family: str, dtype: torch.dtype) -> None:
    model = FAMILIES[family]()
    for parameter in model.parameters():  # frequencies of rotations stay what they are
        parameter.data = parameter.data.to(dtype)
    diagnosis = headwise.compare(merged(model, 3), model, inputs_of(model)["input_ids"])
    assert all([name for name, _, _ in layer] == [NAME] for layer in causes_of(diagnosis))
    assert f"{NAME} explains all of it" in str(diagnosis)


def uneven(family: str) -> Any:
    """A model whose numbers are none of an initialisation, which has a cause."""
    model = FAMILIES[family]()
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data *= 0.5 + 2 * torch.rand(parameter.shape) ** 3
    return model


WAYS: dict[How, str] = {
    "aligned": "by the mean of turned heads",
    "fitted": "by principal components",
}
MAPPED = [(f, how) for how in WAYS for f in ("llama", "qwen3", "bert", "gpt2", "gemma2")]


@pytest.mark.parametrize(("family", "how"), others_extra(MAPPED, *MAPPED[:3]))
def test_merges_by_maps_are_named(family: str, how: How) -> None:
    model = uneven(family)
    ids = inputs_of(model)["input_ids"]
    count = 1 if family in GROUPED else 2
    made = regroup(model, [ids[:1], ids[1:]], kv_heads=count, merge=how).model
    diagnosis = headwise.compare(made, model, ids)
    way = WAYS[how] if family != "qwen3" else f"keys by their mean, values {WAYS[how]}"
    for [(name, parameters, side)] in causes_of(diagnosis):
        assert (name, parameters["merged"], side) == (NAME, way, "first")
    assert f"{NAME} explains all of it" in str(diagnosis)


def layer_of(**options: Any) -> Attention:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "value_dim": VALUE_DIM,
    }
    return Attention(EMBED, HEADS, **{**sizes, **options})


def whole() -> LayerCut:
    return LayerCut(HEADS, KV_HEADS)


ORDER = [4, 5, 0, 1, 11, 10, 2, 3, 6, 7, 8, 9]


GROUPS: dict[str, tuple[LayerCut, dict[str, Any]]] = {
    "neighbours": (whole().merge(3), {"kv heads": "0+1, 2+3, 4+5"}),
    "order": (
        whole().keep(ORDER).merge(2),
        {"kv heads": "0+2+5, 1+3+4", "heads in the order": tuple(ORDER)},
    ),
    "copies": (whole().merge(2).expand(4), {"kv heads": "0+1+2, 3+4+5"}),
    "kv heads gone": (
        whole().drop([2, 3, 8, 9]).merge(2),
        {"kv heads": "0+2, 3+5", "without heads": (2, 3, 8, 9)},
    ),
    "heads gone": (
        whole().drop([0, 3, 4, 6, 9, 11]).merge(3),
        {"kv heads": "0+1, 2+3, 4+5", "without heads": (0, 3, 4, 6, 9, 11)},
    ),
}
WITH: dict[str, dict[str, Any]] = {
    "weights": {},
    "biases": {"k_bias": True, "v_bias": True},
    "sink": {"sink": True},
}
EACH_ONCE = [(groups, "weights") for groups in GROUPS] + [("order", "biases"), ("order", "sink")]


@pytest.mark.parametrize(
    ("groups", "options"),
    others_extra(
        itertools.product(GROUPS, WITH), *EACH_ONCE[1:], quick=[("neighbours", "weights")]
    ),
)
def test_groups_of_a_layer(groups: str, options: str) -> None:
    (cut, parameters), layer = GROUPS[groups], layer_of(**WITH[options])
    expect(cut_layer(cut, layer), layer, None, parameters)


def turned(layer: Attention) -> Attention:
    """The layer with kv heads that are means of turned ones, and are turned back."""
    generator = torch.Generator().manual_seed(2)
    maps: dict[str, Tensor] = {}
    for role, reader, width in (("key", "query", HEAD_DIM), ("value", "output", VALUE_DIM)):
        drawn = torch.randn(KV_HEADS, width, width, generator=generator, dtype=torch.float64)
        turns = torch.linalg.qr(drawn).Q
        maps |= {role: turns / 3, reader: turns}
    return cut_layer(whole().merge(2, **maps), layer)


def test_turned_heads_of_a_layer() -> None:
    parameters = {"kv heads": "0+1+2, 3+4+5", "merged": "by the mean of turned heads"}
    layer = layer_of()
    [causes] = causes_of(compare_among([NAME, "heads gone"], turned(layer), layer))
    assert causes == [(NAME, parameters, "first")]


@pytest.mark.parametrize("role", others_extra(["q_proj", "k_proj", "v_proj", "out_proj"]))
def test_a_factor_is_no_part_of_a_merge(role: str) -> None:
    """Maps that are fitted to the outputs could hide it."""
    layer = layer_of()
    made = turned(layer)
    with torch.no_grad():
        getattr(made, role).weight.mul_(1.001)
    [causes] = causes_of(compare_among([NAME, "heads gone"], made, layer))
    assert causes == []


@pytest.mark.slow
def test_what_is_left_has_its_own_causes() -> None:
    layer = layer_of()
    made = cut_layer(whole().merge(3), layer)
    made.scale = 0.5
    [causes] = causes_of(headwise.compare(made, layer))
    assert [name for name, _, _ in causes] == [NAME, "scale"]


@pytest.mark.extra
def test_a_fitted_output_projection_is_not_explained() -> None:
    layer = layer_of()
    wo = torch.randn(HEADS, VALUE_DIM, EMBED, generator=torch.Generator().manual_seed(3))
    diagnosis = headwise.compare(cut_layer(whole().merge(3).refit(wo), layer), layer)
    assert causes_of(diagnosis) == [[(NAME, {"kv heads": "0+1, 2+3, 4+5"}, "first")]]
    assert "nothing explains output" in str(diagnosis)


@pytest.mark.extra
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_means_are_rounded_to_the_dtype_of_the_weights(dtype: torch.dtype) -> None:
    """Else nothing is exact: the coarse rounding of a dtype is believed where all is explained."""
    model = FAMILIES["llama"]()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    layers = {}
    for name, cut in ModelHeads(model).whole():
        wo = torch.randn(6, 10, 48, generator=torch.Generator().manual_seed(3))
        layers[name] = cut.merge(1).refit(wo)
    made = cut_model(Cut(layers), model)
    diagnosis = headwise.compare(made, model, inputs_of(model)["input_ids"])
    assert causes_of(diagnosis) == [[(NAME, {"kv heads": "0+1+2"}, "first")]] * 2


@pytest.mark.parametrize("family", others_extra(["bert", "llama"], quick=["bert"]))
def test_heads_that_the_second_lacks(family: str) -> None:
    model = FAMILIES[family]()
    cut = Cut({name: layer.drop([2, 3]) for name, layer in ModelHeads(model).whole()})
    diagnosis = headwise.compare(model, cut_model(cut, model), inputs_of(model)["input_ids"])
    assert causes_of(diagnosis) == [[("heads gone", {"without heads": (2, 3)}, "second")]] * 2


def _noise(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(5))


CHANGES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "other keys": ("k", _noise),
    "other values": ("v", _noise),
    "a factor of keys": ("k", lambda x: 1.001 * x),
    "a factor of values": ("v", lambda x: 0.999 * x),
    "a small change of one head": ("k", lambda x: torch.cat([x[:-10], x[-10:] + 1e-4])),
    "kv heads in another order": ("k", lambda x: x.roll(HEAD_DIM, 0)),
    "values in another order": ("v", lambda x: x.roll(VALUE_DIM, 0)),
    "other queries": ("q", _noise),
}


@pytest.mark.parametrize(
    ("change", "copies"),
    others_extra(
        [*((each, 1) for each in CHANGES), ("a factor of values", 2)],
        *((each, 1) for each, (role, _) in CHANGES.items() if role != "v"),
        ("a factor of values", 2),
        quick=[("other keys", 1)],
    ),
)
def test_other_kv_heads_are_not_merged_ones(change: str, copies: int) -> None:
    layer, (role, function) = layer_of(), CHANGES[change]
    made = cut_layer(whole().merge(3), layer)
    with torch.no_grad():
        weight = getattr(made, f"{role}_proj").weight
        weight.copy_(function(weight.clone()))
    if copies > 1:
        made = cut_layer(LayerCut(HEADS, 3).expand(6), made)
    for a, b in ((made, layer), (layer, made)):
        [causes] = causes_of(compare_among([NAME, "factor", "heads gone"], a, b))
        assert NAME not in [name for name, _, _ in causes]


@pytest.mark.parametrize("kept", others_extra([((0, 2, 4),), ((1, 1, 5),)]), ids=str)
def test_kv_heads_of_a_group_are_not_their_mean(kept: tuple[int, ...]) -> None:
    """Keys and values are those of some kv heads alone."""
    layer = layer_of()
    made = cut_layer(whole().merge(3), layer)
    with torch.no_grad():
        for role, width in (("k", HEAD_DIM), ("v", VALUE_DIM)):
            rows = getattr(layer, f"{role}_proj").weight.unflatten(0, (KV_HEADS, width))
            getattr(made, f"{role}_proj").weight.copy_(rows[list(kept)].flatten(0, 1))
    [causes] = causes_of(headwise.compare(made, layer))
    assert causes == []


@pytest.mark.extra
def test_the_mean_of_other_heads_than_queries_read() -> None:
    """Kv heads 0 and 3, and so on, were merged, and the heads stayed where they were."""
    layer = layer_of()
    made = cut_layer(whole().merge(3), layer)
    with torch.no_grad():
        for role, width in (("k", HEAD_DIM), ("v", VALUE_DIM)):
            rows = getattr(layer, f"{role}_proj").weight.unflatten(0, (2, 3, width))
            getattr(made, f"{role}_proj").weight.copy_(rows.mean(0).flatten(0, 1))
    [causes] = causes_of(headwise.compare(made, layer))
    assert causes == []


@pytest.mark.slow
def test_equal_kv_heads_are_the_same_function() -> None:
    layer = cut_layer(whole().merge(3), layer_of())
    copied = cut_layer(LayerCut(HEADS, 3).expand(6), layer)
    for a, b in ((layer, copied), (copied, layer)):
        assert headwise.compare(a, b).verdict.is_same


@pytest.mark.slow
def test_copies_with_another_fault_are_not_merged_again() -> None:
    layer = cut_layer(whole().merge(3).expand(6), layer_of())
    other = cut_layer(LayerCut(HEADS, 6).keep(range(HEADS)), layer)
    other.scale = 0.5
    [causes] = causes_of(headwise.compare(other, layer))
    assert [name for name, _, _ in causes] == ["scale"]
